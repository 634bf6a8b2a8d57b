"""Which engines the connector accepts, and the one sentence it refuses the others with.

Everything here takes plain values; ``settings_of`` is the only reader of vLLM's configuration.
Supported are the versions with request-level failure reports: older ones cannot say that a load
of a hybrid model failed and decode from whatever the memory holds.
"""

import dataclasses
import difflib
import ipaddress
import os
import re
from collections.abc import Collection, Mapping
from typing import Any

from hybridpd_connector.errors import ConnectorError
from hybridpd_connector.settings import SETTINGS
from hybridpd_connector.vllm_features import FEATURES, features_of
from hybridpd_geometry import (
    CARRIED,
    KV_DTYPES,
    PROMPT_DRAFTS,
    SOUND_SINCE,
    STATE_MODES,
    Unshown,
    unshown_drafts,
)

OLDEST = (0, 30)
NEWEST = (0, 33)
CACHE_LAYOUT = "LBHNC"
CONV_LAYOUTS = ("DS", "SD")
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
REQUEST_IDS_VARIABLE = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
MAX_ENGINE_ID = 256
# What the setting `unproven` may name: refused as long as no test has shown its tokens right.
HYBRID_NGRAM = "hybrid_ngram"
UNPROVEN = (HYBRID_NGRAM,)
PROVEN = ("fp8_on_gpu",)  # carried by now, and still set by who measured it
ROLES = {"kv_producer": "producer", "kv_consumer": "consumer", "kv_both": "both"}

_VERSION = re.compile(r"v?(\d+)\.(\d+)")
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


class UnsupportedEngineError(ConnectorError):
    """This engine, set up like this, cannot take part in a transfer. Raised at start only."""


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """What of an engine's configuration decides whether the connector can serve it."""

    version: str
    role: str
    engine_id: str
    tp_size: int
    pp_size: int
    context_parallel_size: int
    mamba_cache_mode: str
    replay_ssm: bool
    hybrid_manager_disabled: bool
    host_pools: bool
    sleep_mode: bool = False
    permutes_cache: bool = False
    draft_method: str = ""
    state_types: tuple[str, ...] = ()
    on_cpu: bool = False
    kv_dtype: str = "auto"
    scales_at_run_time: bool = False
    unproven: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    @property
    def has_state(self) -> bool:
        return bool(self.state_types)


def check_version(version: str) -> tuple[int, int]:
    """(major, minor) of a supported vLLM version such as ``0.32.0+cpu``."""
    found = _VERSION.match(version)
    release = (int(found[1]), int(found[2])) if found else (-1, -1)
    if not OLDEST <= release <= NEWEST:
        supported = f"vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        raise UnsupportedEngineError(
            "vllm.version", supported, version, f"use an image with {supported}"
        )
    return release


def check_allocator(environment: Mapping[str, str]) -> None:
    """Refuse expandable segments: they move memory that is registered for transfers.

    vLLM itself looks at one of the two variables that PyTorch reads.
    """
    for name in ALLOCATOR_VARIABLES:
        if _EXPANDABLE.search(environment.get(name, "")):
            raise UnsupportedEngineError(
                name,
                "no expandable_segments:True",
                environment[name],
                "registered KV memory must not be remapped: remove the setting",
            )


def check_request_ids(environment: Mapping[str, str]) -> None:
    """Refuse request ids as clients send them: vLLM ends its engine ("duplicate request id") when
    one comes again while the blocks of the first are held, as after a retried prefill."""
    value = environment.get(REQUEST_IDS_VARIABLE, "0")
    if value != "0":
        raise UnsupportedEngineError(
            REQUEST_IDS_VARIABLE,
            "0",
            value,
            "a retried request id would end the engine while blocks are held: remove the setting",
        )


def check_setting_names(extra: Mapping[str, object]) -> None:
    """Refuse a key of ``kv_connector_extra_config`` that nothing reads, such as a misspelt one."""
    known = [setting.name for setting in SETTINGS]
    for name in extra:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}?" if close else "remove it"
            raise UnsupportedEngineError(
                "kv_connector_extra_config", f"keys among {', '.join(known)}", name, hint
            )


def check_seconds(field: str, value: object, shortest: float, longest: float) -> float:
    """A duration of ``kv_connector_extra_config``, refused at start when it cannot work."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedEngineError(field, "a number of seconds", value)
    if not shortest <= value <= longest:
        raise UnsupportedEngineError(field, f"{shortest} to {longest} seconds", value)
    return value


def check_flag(field: str, value: object) -> bool:
    """A switch of ``kv_connector_extra_config``."""
    if not isinstance(value, bool):
        raise UnsupportedEngineError(field, "true or false", value)
    return value


def check_side_channel_host(host: str) -> None:
    """Refuse an address that means all interfaces: it is bound, and it is what readers are told."""
    try:
        everywhere = ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        everywhere = host in ("", "*")
    if everywhere:
        raise UnsupportedEngineError(
            "VLLM_NIXL_SIDE_CHANNEL_HOST",
            "one address of this host that readers can reach",
            host,
            "in a pod: status.podIP",
        )


def check_choice(field: str, value: object, choices: Collection[str]) -> str:
    """A word of ``kv_connector_extra_config``, refused at start when it is none of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise UnsupportedEngineError(
            f"kv_connector_extra_config.{field}", " or ".join(choices), value
        )
    return value


def check_names(field: str, value: object) -> tuple[str, ...]:
    """A list of names in ``kv_connector_extra_config``."""
    names = value if isinstance(value, list | tuple) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UnsupportedEngineError(field, "a list of names, at least one", value)
    return tuple(names)


def check_conv_layout(layout: str, has_state: bool, tp_size: int) -> None:
    """Refuse what cannot be sharded: the state-first layout with more than one rank."""
    if layout not in CONV_LAYOUTS:
        raise UnsupportedEngineError("conv state layout", " or ".join(CONV_LAYOUTS), layout)
    if has_state and layout == "SD" and tp_size > 1:
        raise UnsupportedEngineError(
            "VLLM_SSM_CONV_STATE_LAYOUT",
            "DS for a hybrid model with tensor parallelism",
            layout,
            "set VLLM_SSM_CONV_STATE_LAYOUT=DS on prefill and decode engines",
        )


def check_cache_layout(layout: str | None) -> None:
    """Refuse a cache whose heads are not contiguous inside a block."""
    if layout not in (CACHE_LAYOUT, "HND"):
        raise UnsupportedEngineError(
            "KV cache layout",
            f"{CACHE_LAYOUT} (HND)",
            layout,
            "unset VLLM_KV_CACHE_LAYOUT, or choose an attention backend that supports HND",
        )


def check_settings(settings: EngineSettings) -> None:
    """Refuse what the connector does not transfer; each refusal names the setting to change."""
    check_version(settings.version)
    if settings.role not in ROLES.values():
        raise UnsupportedEngineError("kv_role", ", ".join(ROLES), settings.role)
    if not 1 <= len(settings.engine_id) <= MAX_ENGINE_ID:
        raise UnsupportedEngineError(
            "kv_transfer_config.engine_id", f"1 to {MAX_ENGINE_ID} characters", settings.engine_id
        )
    for field, value in (
        ("pipeline_parallel_size", settings.pp_size),
        ("context parallel size (decode and prefill)", settings.context_parallel_size),
    ):
        if value != 1:
            raise UnsupportedEngineError(field, "1", value, "use tensor parallelism instead")
    if settings.mamba_cache_mode not in STATE_MODES:
        raise UnsupportedEngineError(
            "mamba_cache_mode",
            " or ".join(STATE_MODES),
            settings.mamba_cache_mode,
            "set --mamba-cache-mode align, or --no-enable-prefix-caching",
        )
    for field, is_on, way_out in (
        ("use_replayssm", settings.replay_ssm, "its ring buffers would be part of the state"),
        (
            "disable_hybrid_kv_cache_manager",
            settings.hybrid_manager_disabled,
            "remove --disable-hybrid-kv-cache-manager",
        ),
        (
            "enable_sleep_mode",
            settings.sleep_mode,
            "registered KV memory must stay mapped: remove --enable-sleep-mode",
        ),
        (
            "calculate_kv_scales",
            settings.scales_at_run_time,
            "scales made at run time are not handed over: remove --calculate-kv-scales",
        ),
        (
            "enable_permute_local_kv",
            settings.permutes_cache,
            "pages are read as they lie: remove it from --kv-transfer-config",
        ),
    ):
        if is_on:
            raise UnsupportedEngineError(field, "off", "on", way_out)
    for feature in settings.features:
        raise UnsupportedEngineError(feature, "off", "on", FEATURES[feature])
    _check_kv_dtype(settings)
    _check_drafting(settings)
    _check_fresh_states(settings)
    if settings.host_pools:
        raise UnsupportedEngineError(
            "KV cache groups", "in device memory", "host resident", "remove the offloading options"
        )


def _check_kv_dtype(settings: EngineSettings) -> None:
    """Scales that an engine makes by itself would make one byte mean two numbers on P and D."""
    if settings.kv_dtype in KV_DTYPES:
        return
    # Weights that come with scales make an fp8 cache of "auto": bfloat16 is said, not asked for.
    raise UnsupportedEngineError(
        "kv_cache_dtype",
        " or ".join(KV_DTYPES),
        settings.kv_dtype,
        "scales made at run time are not handed over: use --kv-cache-dtype bfloat16",
    )


def _check_drafting(settings: EngineSettings) -> None:
    """A drafting model has a cache of its own, and its first step after a load wants what only the
    step before it knows. N-grams of a hybrid model are wrong, or end the engine, on every CPU."""
    if not settings.draft_method:
        return
    if settings.draft_method not in PROMPT_DRAFTS:
        raise UnsupportedEngineError(
            "speculative_config.method",
            " or ".join(PROMPT_DRAFTS),
            settings.draft_method,
            "a drafting model's cache is not handed over: use ngram, or no --speculative-config",
        )
    if settings.has_state and settings.on_cpu:
        raise UnsupportedEngineError(
            "speculative_config",
            "none for a hybrid model on a CPU",
            settings.draft_method,
            "vLLM itself is wrong there, with a connector or without: remove --speculative-config",
        )
    unshown = unshown_of(settings)
    if unshown is not None and HYBRID_NGRAM not in settings.unproven:
        raise UnsupportedEngineError(unshown.field, unshown.expected, unshown.got, unshown.reason)


def unshown_of(settings: EngineSettings) -> Unshown | None:
    """What of these settings only the setting `unproven` carries; None when nothing needs it."""
    if not settings.draft_method or not settings.has_state:
        return None
    release, mode = check_version(settings.version), settings.mamba_cache_mode
    return unshown_drafts(settings.draft_method, settings.state_types, mode, release)


def _check_fresh_states(settings: EngineSettings) -> None:
    """P is asked for all but one token: with two, a state that begins wrong is handed over."""
    release = check_version(settings.version)
    for family, since in SOUND_SINCE.items():
        if CARRIED[family] in settings.state_types and release < since:
            first = ".".join(map(str, since))
            raise UnsupportedEngineError(
                "vllm.version",
                f"{first} or later for a model with Gated DeltaNet or KDA layers",
                settings.version,
                "it starts a prompt of one token from the state of an earlier request, with a "
                f"connector or without: use an image with vLLM {first} or later",
            )


def check_unproven(value: object) -> tuple[str, ...]:
    """The combinations that ``kv_connector_extra_config.unproven`` asks to carry all the same."""
    names = value if isinstance(value, list | tuple) else (None,)
    if any(name not in (*UNPROVEN, *PROVEN) for name in names):
        raise UnsupportedEngineError(
            "kv_connector_extra_config.unproven", f"a list of {', '.join(UNPROVEN)}", value
        )
    return tuple(str(name) for name in names)


def state_type(spec: Any) -> str:
    """vLLM's name of a kind of state, such as MAMBA2."""
    return str(getattr(spec.mamba_type, "name", spec.mamba_type))


def settings_of(vllm_config: Any, kv_cache_config: Any, version: str) -> EngineSettings:
    """Read the settings from vLLM's configuration objects (``Any``: four versions of them)."""
    transfer = vllm_config.kv_transfer_config
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    groups = getattr(kv_cache_config, "kv_cache_groups", ())
    specs = [getattr(group, "kv_cache_spec", None) for group in groups]
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    state_types = tuple(state_type(spec) for spec in specs if type(spec).__name__ == "MambaSpec")
    return EngineSettings(
        version=version,
        role=ROLES.get(transfer.kv_role or "", str(transfer.kv_role)),
        engine_id=transfer.engine_id or "",
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        context_parallel_size=max(
            getattr(parallel, "decode_context_parallel_size", 1),
            getattr(parallel, "prefill_context_parallel_size", 1),
        ),
        mamba_cache_mode=getattr(cache, "mamba_cache_mode", "none"),
        replay_ssm=bool(getattr(cache, "use_replayssm", False)),
        hybrid_manager_disabled=bool(
            getattr(vllm_config.scheduler_config, "disable_hybrid_kv_cache_manager", False)
        ),
        host_pools=any(getattr(group, "host_resident", False) for group in groups),
        sleep_mode=bool(
            getattr(getattr(vllm_config, "model_config", None), "enable_sleep_mode", False)
        ),
        permutes_cache=bool(getattr(transfer, "enable_permute_local_kv", False)),
        draft_method=getattr(getattr(vllm_config, "speculative_config", None), "method", "") or "",
        state_types=state_types,
        on_cpu=getattr(getattr(vllm_config, "device_config", None), "device_type", "") == "cpu",
        kv_dtype=str(getattr(cache, "cache_dtype", "auto")),
        scales_at_run_time=bool(getattr(cache, "calculate_kv_scales", False)),
        unproven=check_unproven(extra.get("unproven", ())),
        features=features_of(vllm_config, has_state=bool(state_types)),
    )


def check_engine(vllm_config: Any, kv_cache_config: Any) -> EngineSettings:
    """All checks that need no cache memory; returns the settings they passed."""
    from vllm import __version__  # imported late: the checks above serve without vLLM

    check_version(__version__)
    check_allocator(os.environ)
    check_request_ids(os.environ)
    check_setting_names(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    settings = settings_of(vllm_config, kv_cache_config, __version__)
    check_settings(settings)
    return settings
