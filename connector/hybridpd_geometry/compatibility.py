"""Can these two engines hand requests over? Every difference, with its reason and its way out.

`compare` looks at two whole engines; `tp_problems` needs only a model and two TP sizes, so that a
custom resource can be judged before anything runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from hybridpd_geometry.engine import resolve_engine
from hybridpd_geometry.facts import EngineFacts, ModelFacts
from hybridpd_geometry.families import state_sections
from hybridpd_geometry.layers import ATTENTION, LayerGeometry
from hybridpd_geometry.layout import CacheLayout
from hybridpd_geometry.packings import Plane
from hybridpd_geometry.sections import Section, is_legal

MAX_LEGAL_TP = 64


@dataclass(frozen=True)
class Mismatch:
    """A difference between two engines. Only `fatal` ones forbid the pair."""

    field: str
    ours: object
    theirs: object
    fatal: bool
    reason: str
    hint: str = ""


_FATAL_FIELDS: tuple[tuple[str, str, str], ...] = (
    (
        "wire_version",
        "The two connectors speak different versions of the hand-over.",
        "Run the same connector release on prefill and decode.",
    ),
    (
        "vllm_version",
        "Another vLLM may lay the cache out differently.",
        "Run the same engine image on prefill and decode.",
    ),
    (
        "model_id",
        "The state of one model means nothing to another.",
        "Serve the same model string on prefill and decode.",
    ),
    (
        "packing",
        "The attention kernels store K and V in different orders.",
        "Use the same attention backend and dtype on both sides.",
    ),
    (
        "kv_dtype",
        "Attention bytes would be read as another type.",
        "Set the same --kv-cache-dtype on both sides.",
    ),
)
_STATE_FIELDS: tuple[tuple[str, str, str], ...] = (
    (
        "conv_dtype",
        "Conv state bytes would be read as another type.",
        "Set the same --mamba-cache-dtype on both sides.",
    ),
    (
        "ssm_dtype",
        "Temporal state bytes would be read as another type.",
        "Set the same --mamba-ssm-cache-dtype on both sides.",
    ),
    (
        "conv_layout",
        "The conv state has its two axes the other way round.",
        "Set VLLM_SSM_CONV_STATE_LAYOUT=DS on both sides.",
    ),
)
_HARMLESS_FIELDS: tuple[tuple[str, str], ...] = (
    ("tp_size", "Shards are read as the intersection of both partitions."),
    ("block_tokens", "Attention is paired by tokens, not by blocks."),
    ("kernel_block_tokens", "Attention is paired by tokens, not by kernel blocks."),
)


def compare(ours: CacheLayout, theirs: CacheLayout) -> tuple[Mismatch, ...]:
    """Every difference that changes bytes; an empty tuple or only harmless ones = they pair."""
    return tuple(_differences(ours, theirs))


def _differences(ours: CacheLayout, theirs: CacheLayout) -> Iterator[Mismatch]:
    yield from _equal_fields(ours, theirs, _FATAL_FIELDS)
    yield from _revision(ours, theirs)
    yield from _numerics(ours, theirs)
    if ours.has_state or theirs.has_state:
        yield from _equal_fields(ours, theirs, _STATE_FIELDS)
        yield from _opaque_conv(ours, theirs)
        yield from _spec_tokens(ours, theirs)
    yield from _layers(ours, theirs)
    yield from _tiles(ours, theirs)
    for field, reason in _HARMLESS_FIELDS:
        one, other = getattr(ours, field), getattr(theirs, field)
        if one != other:
            yield Mismatch(field, one, other, False, reason)


def _equal_fields(
    ours: CacheLayout, theirs: CacheLayout, rows: tuple[tuple[str, str, str], ...]
) -> Iterator[Mismatch]:
    for field, reason, hint in rows:
        one, other = getattr(ours, field), getattr(theirs, field)
        if one != other:
            yield Mismatch(field, one, other, True, reason, hint)


def _revision(ours: CacheLayout, theirs: CacheLayout) -> Iterator[Mismatch]:
    if ours.revision == theirs.revision:
        return
    known = ours.revision is not None and theirs.revision is not None
    yield Mismatch(
        "revision",
        ours.revision,
        theirs.revision,
        known,
        "Other weights give other states for the same prompt."
        if known
        else "One side does not know its model revision.",
        "Pin the same --revision on both sides.",
    )


def _numerics(ours: CacheLayout, theirs: CacheLayout) -> Iterator[Mismatch]:
    if None in (ours.numerics, theirs.numerics) or ours.numerics == theirs.numerics:
        return
    yield Mismatch(
        "numerics",
        ours.numerics,
        theirs.numerics,
        True,
        "One engine computes other numbers than the other from the same weights.",
        "Give the flags that are named here, and --max-model-len, the same values on both sides.",
    )


def _opaque_conv(ours: CacheLayout, theirs: CacheLayout) -> Iterator[Mismatch]:
    if "SD" in (ours.conv_layout, theirs.conv_layout) and ours.tp_size != theirs.tp_size:
        yield Mismatch(
            "conv_layout",
            f"{ours.conv_layout} at TP {ours.tp_size}",
            f"{theirs.conv_layout} at TP {theirs.tp_size}",
            True,
            "In the SD layout a shard of the conv state is not contiguous, so it moves only as a "
            "whole, between equal TP sizes.",
            "Set VLLM_SSM_CONV_STATE_LAYOUT=DS on both sides, or make the TP sizes equal.",
        )


def _spec_tokens(ours: CacheLayout, theirs: CacheLayout) -> Iterator[Mismatch]:
    if ours.spec_tokens == theirs.spec_tokens:
        return
    widened = _state_units(ours) != _state_units(theirs)
    yield Mismatch(
        "spec_tokens",
        ours.spec_tokens,
        theirs.spec_tokens,
        widened,
        "The conv state keeps conv_kernel - 1 + speculative tokens columns, so rows have other "
        "lengths."
        if widened
        else "No state of this model depends on it.",
        "Give both sides the same number of speculative tokens." if widened else "",
    )


def _state_units(layout: CacheLayout) -> tuple[int, ...]:
    return tuple(
        item.section.unit_bytes
        for layer in layout.layers
        if layer.kind != ATTENTION
        for item in layer.sections
    )


def _layers(ours: CacheLayout, theirs: CacheLayout) -> Iterator[Mismatch]:
    missing = sorted(set(ours.by_name) - set(theirs.by_name))
    extra = sorted(set(theirs.by_name) - set(ours.by_name))
    if missing or extra:
        yield Mismatch(
            "layers",
            _some(missing) or "no other layers",
            _some(extra) or "no other layers",
            True,
            "Layers pair by name; these exist on one side only.",
            "Serve the same model, without pipeline parallelism or a draft model on one side.",
        )
    seen: set[tuple[object, ...]] = set()
    for layer in ours.layers:
        other = theirs.by_name.get(layer.name)
        if other is None:
            continue
        for mismatch in _layer(layer, other):
            # Models repeat one layer many times: the first one of a kind speaks for all.
            key = (mismatch.field.rpartition(".")[2], mismatch.ours, mismatch.theirs)
            if key not in seen:
                seen.add(key)
                yield mismatch


def _layer(ours: LayerGeometry, theirs: LayerGeometry) -> Iterator[Mismatch]:
    where = f"layers[{ours.name}]"
    mine, other = f"{ours.kind}/{ours.family}", f"{theirs.kind}/{theirs.family}"
    if mine != other:
        yield Mismatch(
            f"{where}.kind",
            mine,
            other,
            True,
            "The layers are of different kinds.",
            "Serve the same model on both sides.",
        )
        return
    mine_sections = [_section_text(item.section) for item in ours.sections]
    other_sections = [_section_text(item.section) for item in theirs.sections]
    if mine_sections != other_sections:
        yield Mismatch(
            f"{where}.sections",
            "; ".join(mine_sections),
            "; ".join(other_sections),
            True,
            "The pages are made of different pieces (dimensions, dtypes or conv columns).",
            "Serve the same model with the same cache dtypes and speculative tokens.",
        )
    if ours.planes != theirs.planes:
        yield Mismatch(
            f"{where}.planes",
            _planes_text(ours.planes),
            _planes_text(theirs.planes),
            True,
            "A KV head is packed differently.",
            "Use the same attention backend on both sides.",
        )


def _tiles(ours: CacheLayout, theirs: CacheLayout) -> Iterator[Mismatch]:
    common = gcd(ours.kernel_block_tokens, theirs.kernel_block_tokens)
    tiles = {plane.tile_tokens for layer in ours.layers for plane in layer.planes}
    for tile in sorted(tiles):
        if common % tile:
            yield Mismatch(
                "kernel_block_tokens",
                ours.kernel_block_tokens,
                theirs.kernel_block_tokens,
                True,
                f"This packing stores tokens in tiles of {tile}, and block borders cut a tile.",
                f"Choose block sizes that are multiples of {tile}.",
            )


def _section_text(section: Section) -> str:
    copies = ", replicated" if section.replicates else ""
    return f"{section.name}: {section.extent} x {section.unit_bytes} B{copies}"


def _planes_text(planes: tuple[Plane, ...]) -> str:
    return "; ".join(
        f"{p.name}: {p.lanes} x {p.token_bytes} B per token, tiles of {p.tile_tokens}"
        for p in planes
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


@dataclass(frozen=True)
class TpProblem:
    """A TP size that cannot hold a dimension of the model. `nearest` sizes fit the whole model."""

    field: str
    dimension: str
    extent: int
    tp_size: int
    reason: str
    nearest: tuple[int, ...]


def tp_problems(model: ModelFacts, prefill_tp: int, decode_tp: int) -> tuple[TpProblem, ...]:
    """What is wrong with a pair of TP sizes; empty = both fit (they need not divide each other)."""
    problems = []
    for field, tp_size in (("prefill_tp", prefill_tp), ("decode_tp", decode_tp)):
        nearest = nearest_legal_tp(model, tp_size)
        for section in _sharded(model):
            if not is_legal(section, tp_size):
                rule = f"divide {section.extent}"
                if section.replicates:
                    rule += f" or be a multiple of {section.extent}"
                problems.append(
                    TpProblem(
                        field,
                        section.name,
                        section.extent,
                        tp_size,
                        f"The tensor-parallel size must {rule} ({section.name}).",
                        nearest,
                    )
                )
    return tuple(problems)


def legal_tp_sizes(model: ModelFacts, largest: int = MAX_LEGAL_TP) -> tuple[int, ...]:
    """All TP sizes up to `largest` that every sharded dimension of `model` allows."""
    sections = _sharded(model)
    return tuple(tp for tp in range(1, largest + 1) if all(is_legal(item, tp) for item in sections))


def nearest_legal_tp(model: ModelFacts, tp_size: int) -> tuple[int, ...]:
    """The closest legal sizes below and above `tp_size` (itself when legal)."""
    legal = legal_tp_sizes(model, max(MAX_LEGAL_TP, min(2 * tp_size, 1024)))
    if tp_size in legal:
        return (tp_size,)
    below = [size for size in legal if size < tp_size]
    above = [size for size in legal if size > tp_size]
    return tuple(below[-1:] + above[:1])


def _sharded(model: ModelFacts) -> tuple[Section, ...]:
    """Everything TP splits, query heads included (they have no cache but must divide)."""
    attention = model.attention
    sections = [Section("query heads", attention.query_heads, 1)]
    if attention.latent_dim is None:
        sections.append(Section("KV heads", attention.kv_heads, 1, replicates=True))
    if model.state is not None:
        engine = resolve_engine(model, EngineFacts(tp_size=1))
        sections += state_sections(model.state, engine.conv_dtype, engine.ssm_dtype)
    return tuple(sections)
