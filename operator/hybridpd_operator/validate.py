"""Judge a service before anything runs: the resource itself, then prefill against decode.

The arithmetic is the connector's own (`hybridpd_geometry`), so what is admitted here is what the
engines will agree on at their hand-shake. Every problem is collected; nothing stops at the first.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybridpd_geometry import (
    CARRIED,
    PROMPT_DRAFTS,
    SOUND_SINCE,
    STATE_MODES,
    CacheLayout,
    EngineFacts,
    EngineGeometry,
    GeometryError,
    Mismatch,
    ModelFacts,
    TpProblem,
    compare,
    layout_of,
    plan_engine,
    tp_problems,
    unshown_drafts,
)
from hybridpd_operator.assessment import Assessment
from hybridpd_operator.engine_settings import EngineSettings, engine_settings
from hybridpd_operator.errors import InvalidSpecError
from hybridpd_operator.facts import find_facts, model_facts
from hybridpd_operator.forecast import MOST_PAGE_BYTES, forecast
from hybridpd_operator.names import ENGINE_ROLES
from hybridpd_operator.problems import (
    CACHE_TOO_SMALL,
    IMPOSSIBLE_ENGINE,
    INVALID_FIELD,
    LAYOUT_MISMATCH,
    MAX_MODEL_LEN,
    TENSOR_PARALLEL_SIZE,
    Problem,
)
from hybridpd_operator.spec import CPU, Service, parse_service
from hybridpd_operator.validate_spec import minor_of, spec_problems

_MIB_BYTES = 1 << 20
#: Smallest attention block of the platform, in tokens: an inflated block is a multiple of it.
_ALIGNMENT_TOKENS: Mapping[str, int] = {CPU: 128}
_GPU_ALIGNMENT_TOKENS = 16
#: How K and V lie in memory; it changes descriptors, not bytes, and both roles share the image.
_PACKING: Mapping[str, str] = {CPU: "cpu_vec"}


@dataclass(frozen=True)
class Pair:
    """One model on two engines, as planned. A role that cannot be planned is missing."""

    service: Service
    model: ModelFacts
    settings: Mapping[str, EngineSettings]
    geometries: Mapping[str, EngineGeometry]
    layouts: Mapping[str, CacheLayout]
    errors: Mapping[str, GeometryError]


def assess(
    resource: Mapping[str, Any], config: Mapping[str, Any] | None = None, config_problem: str = ""
) -> Assessment:
    """The verdict on a custom resource; `config` and `config_problem` as in `find_facts`."""
    try:
        service = parse_service(resource)
    except InvalidSpecError as error:
        problems = tuple(
            Problem(INVALID_FIELD, item.path, f"expected {item.expected}, got {item.got}")
            for item in error.problems
        )
        return Assessment(service=None, spec_problems=problems)
    return assess_service(service, config, config_problem)


def assess_service(
    service: Service, config: Mapping[str, Any] | None = None, config_problem: str = ""
) -> Assessment:
    """The verdict on a resource that could be read."""
    own = spec_problems(service)
    settings: dict[str, EngineSettings] = {}
    for role in ENGINE_ROLES:
        settings[role], found = engine_settings(service.spec, role)
        own += tuple(problem for problem in found if problem not in own)
    facts = find_facts(service.spec.model, config, config_problem)
    if facts.problems:
        return Assessment(service, own, facts.problems)
    if facts.config is None:
        return Assessment(service, own, has_facts=False, why_unknown=facts.why_unknown)
    overrides = settings[ENGINE_ROLES[0]].hf_overrides
    model, problems, why_unknown = model_facts(facts.config, overrides)
    if model is None:
        known = bool(problems)
        return Assessment(service, own, problems, has_facts=known, why_unknown=why_unknown)
    pair = plan_pair_of(service, model, settings)
    found = tuple(problem for check in PAIR_CHECKS for problem in check(pair))
    geometry = forecast(facts.source or "", pair.geometries, pair.layouts, _kv_blocks(pair))
    return Assessment(service, own, found, geometry=geometry)


def plan_pair_of(
    service: Service, model: ModelFacts, settings: Mapping[str, EngineSettings]
) -> Pair:
    """Plan both engines; what cannot be planned is kept as an error of its role."""
    geometries: dict[str, EngineGeometry] = {}
    layouts: dict[str, CacheLayout] = {}
    errors: dict[str, GeometryError] = {}
    spec = service.spec
    version = spec.engine.stated_version or "unknown"
    for role, given in settings.items():
        engine = engine_facts(given, spec.engine.device)
        own = _with_dtype(model, given)
        try:
            geometries[role] = plan_engine(own, engine)
            layouts[role] = layout_of(own, engine, spec.model.id, spec.model.revision, version)
        except GeometryError as error:
            errors[role] = error
    return Pair(service, model, settings, geometries, layouts, errors)


def engine_facts(settings: EngineSettings, device: str) -> EngineFacts:
    """`settings` on a device, as the arithmetic wants them."""
    return EngineFacts(
        tp_size=settings.tp_size,
        kv_dtype=settings.kv_dtype,
        conv_dtype=settings.conv_dtype,
        ssm_dtype=settings.ssm_dtype,
        block_size=settings.block_size,
        alignment_tokens=_ALIGNMENT_TOKENS.get(device, _GPU_ALIGNMENT_TOKENS),
        packing=_PACKING.get(device, "token"),
        spec_tokens=settings.spec_tokens,
    )


def _with_dtype(model: ModelFacts, settings: EngineSettings) -> ModelFacts:
    return model if settings.dtype == "auto" else replace(model, dtype=settings.dtype)


def _kv_blocks(pair: Pair) -> dict[str, int]:
    """Blocks of each role whose memory is known."""
    blocks: dict[str, int] = {}
    for role, geometry in pair.geometries.items():
        given, mib = pair.settings[role].num_blocks, pair.service.spec.role(role).kv_cache_mib
        if given is not None:
            blocks[role] = given
        elif mib is not None:
            blocks[role] = geometry.blocks_for_memory(mib * _MIB_BYTES)
    return blocks


Check = Callable[[Pair], Iterator[Problem]]

#: Sections of a state by the names that model cards use.
_DIMENSIONS: Mapping[str, str] = {
    "x": "convolution channels",
    "B": "B groups",
    "C": "C groups",
    "q": "query heads of the linear attention",
    "k": "key heads of the linear attention",
    "v": "value heads of the linear attention",
    "ssm": "state heads",
}


def check_tensor_parallel(pair: Pair) -> Iterator[Problem]:
    """Both TP sizes divide what they shard; they need not divide each other."""
    sizes = {role: settings.tp_size for role, settings in pair.settings.items()}
    by_role: dict[str, list[TpProblem]] = {}
    try:
        problems = tp_problems(pair.model, sizes["prefill"], sizes["decode"])
    except GeometryError:
        return  # The model's own dtype is none; told where the engines are planned with it.
    for problem in problems:
        by_role.setdefault(problem.field.removesuffix("_tp"), []).append(problem)
    for role, found in by_role.items():
        shared = ", ".join(
            f"{one.extent} {_DIMENSIONS.get(one.dimension, one.dimension)}" for one in found
        )
        nearest = " or ".join(str(size) for size in found[0].nearest)
        text = (
            f"{sizes[role]} ranks cannot share {shared} (prefill has {sizes['prefill']} ranks, "
            f"decode {sizes['decode']}); the nearest sizes that fit this model: {nearest}"
        )
        yield Problem(TENSOR_PARALLEL_SIZE, f"spec.{role}.tensorParallelSize", text)


def check_planned(pair: Pair) -> Iterator[Problem]:
    """Each engine can be planned at all, TP sizes aside."""
    bad_tp = {problem.field for problem in check_tensor_parallel(pair)}
    for role, geometry in pair.geometries.items():
        if geometry.page_bytes > MOST_PAGE_BYTES:
            text = (
                f"expected pages of at most {MOST_PAGE_BYTES} bytes, got more than "
                f"2**{geometry.page_bytes.bit_length() - 1}; correct the model's config.json or "
                "the flags"
            )
            yield Problem(IMPOSSIBLE_ENGINE, f"spec.{role}", text)
    for role, error in pair.errors.items():
        if f"spec.{role}.tensorParallelSize" not in bad_tp:
            yield Problem(IMPOSSIBLE_ENGINE, f"spec.{role}", str(error))


def check_startable(pair: Pair) -> Iterator[Problem]:
    """What the connector refuses when an engine starts, told before one does."""
    engine, found = pair.service.spec.engine, dict[Problem, None]()
    for role, settings in pair.settings.items():
        args, mode = f"spec.{role}.extraArgs", settings.mamba_cache_mode
        # vLLM puts the mode of a hybrid model back to none where there is no prefix caching.
        counts = engine.prefix_caching or pair.model.state is None
        if counts and mode is not None and mode not in STATE_MODES:
            where = settings.origin.get("mamba-cache-mode", args)
            text = f"expected {' or '.join(STATE_MODES)}, got {mode}; remove --mamba-cache-mode"
            found[Problem(IMPOSSIBLE_ENGINE, where, text)] = None
        if (drafting := _drafting(pair, settings)) is not None:
            found[Problem(IMPOSSIBLE_ENGINE, settings.drafts or args, drafting)] = None
    yield from found  # a setting of both roles is told once


def _drafting(pair: Pair, settings: EngineSettings) -> str | None:
    """What is wrong with how an engine drafts tokens."""
    method = settings.spec_method
    if method is not None and method not in PROMPT_DRAFTS:
        return (
            f"expected {' or '.join(PROMPT_DRAFTS)}, got {method}: a drafting model's cache is not "
            "handed over; use ngram, or no --speculative-config"
        )
    on_cpu = pair.service.spec.engine.device == CPU
    if settings.drafts and pair.model.state is not None and on_cpu:
        return (
            "expected no speculation for a hybrid model on a CPU, got "
            f"{method or settings.spec_tokens}: vLLM itself is wrong there, with a connector or "
            "without; remove --speculative-config"
        )
    if settings.drafts and method is None:
        return (
            f"expected {' or '.join(PROMPT_DRAFTS)}, got no method, which is a drafting model to "
            "vLLM: its cache is not handed over; name the method, or remove --speculative-config"
        )
    return _unshown(pair, settings) if settings.drafts else None


def _unshown(pair: Pair, settings: EngineSettings) -> str | None:
    """What of a hybrid model's drafting on GPUs nobody has seen to be right."""
    engine, state = pair.service.spec.engine, pair.model.state
    if state is None or settings.spec_method is None:
        return None
    # With prefix caching vLLM makes "align" of "none" for a hybrid model, without it the reverse.
    mode = "align" if engine.prefix_caching else "none"
    minor = minor_of(engine.stated_version or "")
    release = None if minor is None else (0, minor)
    types = (CARRIED.get(state.family, state.family),)
    unshown = unshown_drafts(settings.spec_method, types, mode, release)
    if unshown is None:
        return None
    return f"{unshown.field}: expected {unshown.expected}, got {unshown.got}; {unshown.reason}"


def check_version(pair: Pair) -> Iterator[Problem]:
    """The stated vLLM computes this kind of state right."""
    engine, family = pair.service.spec.engine, pair.model.state.family if pair.model.state else ""
    since, stated = SOUND_SINCE.get(family), engine.stated_version
    minor = minor_of(stated or "")
    if since is not None and minor is not None and (0, minor) < since:
        first = ".".join(map(str, since))
        text = (
            f"expected vLLM {first} or later for a model with {family} layers, got {stated}: it "
            "starts a prompt of one token from the state of an earlier request; use an image with "
            f"vLLM {first} or later"
        )
        field = "vllmVersion" if engine.vllm_version else "image"
        yield Problem(IMPOSSIBLE_ENGINE, f"spec.engine.{field}", text)


def check_max_model_len(pair: Pair) -> Iterator[Problem]:
    """No longer requests than the model was made for."""
    wanted, limit = pair.service.spec.model.max_model_len, pair.model.max_len
    if wanted is not None and limit is not None and wanted > limit:
        text = (
            f"expected at most the model's context of {limit} tokens, got {wanted}; lower it, or "
            "raise max_position_embeddings by --hf-overrides or spec.model.config"
        )
        yield Problem(MAX_MODEL_LEN, "spec.model.maxModelLen", text)


def check_overrides(pair: Pair) -> Iterator[Problem]:
    """Both roles serve the same model after overrides and in the same dtype.

    How a role caches or drafts is its own affair: no byte of a state depends on it.
    """
    prefill, decode = pair.settings["prefill"], pair.settings["decode"]
    for flag, ours, theirs in (
        ("hf-overrides", dict(prefill.hf_overrides), dict(decode.hf_overrides)),
        ("dtype", prefill.dtype, decode.dtype),
    ):
        if ours != theirs:
            where = decode.origin.get(flag) or prefill.origin.get(flag) or "spec.decode.extraArgs"
            text = f"--{flag} is {ours} on prefill and {theirs} on decode; make them equal"
            yield Problem(LAYOUT_MISMATCH, where, text)


def check_layouts(pair: Pair) -> Iterator[Problem]:
    """The comparison that the engines make at their hand-shake."""
    prefill, decode = pair.layouts.get("prefill"), pair.layouts.get("decode")
    if prefill is None or decode is None:
        return
    fatal = [mismatch for mismatch in compare(prefill, decode) if mismatch.fatal]
    # Pages differ because a setting differs: the setting is the thing to tell.
    settings = [mismatch for mismatch in fatal if not mismatch.field.startswith("layers[")]
    for mismatch in settings or fatal:
        text = (
            f"{mismatch.field} is {mismatch.ours} on prefill and {mismatch.theirs} on decode. "
            f"{mismatch.reason} {mismatch.hint}"
        )
        yield Problem(LAYOUT_MISMATCH, _where_set(pair, mismatch), text.rstrip())


#: Field of a layout → flags that set it.
_FLAGS: Mapping[str, tuple[str, ...]] = {
    "kv_dtype": ("kv-cache-dtype", "dtype"),
    "conv_dtype": ("mamba-cache-dtype", "dtype"),
    "ssm_dtype": ("mamba-ssm-cache-dtype", "dtype"),
    "spec_tokens": ("speculative-config", "spec-tokens"),
}


def _where_set(pair: Pair, mismatch: Mismatch) -> str:
    """The flag that made the two sides differ, when it can be told."""
    for role in ("decode", "prefill"):
        for flag in _FLAGS.get(mismatch.field, ()):
            where = pair.settings[role].origin.get(flag, "")
            if where.startswith(f"spec.{role}."):
                return where
    return "spec.decode"


def check_capacity(pair: Pair) -> Iterator[Problem]:
    """Where the cache's memory is given, it holds one request of the longest length."""
    wanted = pair.service.spec.model.max_model_len or pair.model.max_len
    if wanted is None:
        return
    for role, blocks in _kv_blocks(pair).items():
        geometry = pair.geometries[role]
        needed = blocks_of_request(geometry, wanted)
        if blocks < needed:
            mib = -(-needed * geometry.region_count * geometry.page_bytes // _MIB_BYTES)
            text = (
                f"a request of {wanted} tokens needs {needed} blocks and there are {blocks}; give "
                f"{mib} MiB or more, or a smaller spec.model.maxModelLen"
            )
            where = pair.settings[role].origin.get("num-gpu-blocks-override")
            yield Problem(CACHE_TOO_SMALL, where or f"spec.{role}.kvCacheMiB", text)


def blocks_of_request(geometry: EngineGeometry, tokens: int) -> int:
    """Blocks that one request of `tokens` holds, over all groups, and vLLM's null block."""
    attention = -(-tokens // geometry.block_tokens)
    return 1 + sum(attention if group.kind == "attention" else 1 for group in geometry.groups)


#: The checks of the pair, in the order in which their problems are told.
PAIR_CHECKS: tuple[Check, ...] = (
    check_tensor_parallel,
    check_planned,
    check_startable,
    check_version,
    check_max_model_len,
    check_overrides,
    check_layouts,
    check_capacity,
)
