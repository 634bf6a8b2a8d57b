"""From facts to sizes: what vLLM will allocate for a model on an engine.

The formulas are vLLM's; T and S are bytes on one rank:

* S, a state page's real bytes = sum over conv and temporal state of shape x dtype
  (`MambaSpec.page_size_bytes`); T = KV heads on the rank x bytes per head and token.
* inflated block N = A * ceil(S / (A * T)), A = max(smallest kernel block, configured block; MLA:
  at least 128), then rounded up to what all backends accept
  (`platforms/interface.py`, `_align_hybrid_block_size`); page = N * T; the state page is padded
  to exactly one page.
* layers of one kind are split into groups of about equally many layers, each group taking every
  n-th layer; regions = layers of the longest group; a shorter group leaves *padding slots*
  (`v1/core/kv_cache_utils.py`, `_get_kv_cache_groups_uniform_page_size`).
* blocks = memory // (regions * page) (`get_kv_cache_config_from_groups`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridpd_geometry.dtypes import AUTO, canonical_dtype, element_bytes
from hybridpd_geometry.errors import GeometryError
from hybridpd_geometry.exact import ceil_div, divide_exact, round_up
from hybridpd_geometry.facts import EngineFacts, ModelFacts
from hybridpd_geometry.families import conv_sections, family_of, temporal_sections
from hybridpd_geometry.layers import (
    ATTENTION,
    STATE,
    LayerGeometry,
    attention_layer,
    state_layer,
)
from hybridpd_geometry.layout import CacheLayout, check_layout
from hybridpd_geometry.packings import Plane, head_token_bytes, planes_of
from hybridpd_geometry.sections import Section, place, placed_bytes, units_per_rank

MLA_ALIGNMENT_TOKENS = 128
WIRE_VERSION = 1


@dataclass(frozen=True)
class Group:
    """A KV-cache group: layers (model indices) that share block ids; position = region."""

    kind: str
    layers: tuple[int, ...]


@dataclass(frozen=True)
class EngineGeometry:
    """Sizes on one rank of an engine, in tokens and bytes.

    `ratio` = kernel blocks per logical block (attention only).
    `state_bytes` = `conv_bytes + ssm_bytes`; `padding_bytes` fills the state page up to a page.
    `padding_slots` = (group, region) pairs that hold no layer.
    """

    tp_size: int
    block_tokens: int
    kernel_block_tokens: int
    ratio: int
    page_bytes: int
    attention_page_bytes: int
    token_bytes: int
    state_bytes: int
    conv_bytes: int
    ssm_bytes: int
    padding_bytes: int
    groups: tuple[Group, ...]
    region_count: int
    padding_slots: int

    def blocks_for_memory(self, memory_bytes: int) -> int:
        """Logical blocks that fit into `memory_bytes` of cache on one rank."""
        if memory_bytes < 0:
            raise GeometryError("memory_bytes", "zero or more", memory_bytes)
        return memory_bytes // (self.region_count * self.page_bytes)


def resolve_engine(model: ModelFacts, engine: EngineFacts) -> EngineFacts:
    """`engine` with every `auto` replaced by what vLLM chooses for `model`."""
    for field in ("tp_size", "alignment_tokens", "backend_alignment_tokens"):
        value: int = getattr(engine, field)
        if value < 1:
            raise GeometryError(f"engine.{field}", "a positive number", value)
    kv_wishes = (engine.kv_dtype, model.kv_dtype, model.dtype)
    kv_dtype = next(wish for wish in kv_wishes if wish != AUTO)
    conv_dtype = model.dtype if engine.conv_dtype == AUTO else engine.conv_dtype
    ssm_dtype = engine.ssm_dtype
    if model.state is not None:
        wishes = (ssm_dtype, model.state.ssm_dtype, family_of(model.state).ssm_dtype, conv_dtype)
        ssm_dtype = next(wish for wish in wishes if wish != AUTO)
    elif ssm_dtype == AUTO:
        ssm_dtype = conv_dtype
    packing = "latent" if model.attention.latent_dim is not None else engine.packing
    return replace(
        engine,
        kv_dtype=canonical_dtype(kv_dtype, "kv_dtype"),
        conv_dtype=canonical_dtype(conv_dtype, "conv_dtype"),
        ssm_dtype=canonical_dtype(ssm_dtype, "ssm_dtype"),
        packing=packing,
    )


def plan_engine(model: ModelFacts, engine: EngineFacts) -> EngineGeometry:
    """Everything vLLM derives before it allocates; GeometryError when TP does not fit."""
    engine = resolve_engine(model, engine)
    if not model.attention_layers:
        raise GeometryError("model.attention_layers", "at least one", 0)
    token_bytes = _token_bytes(model, engine)
    conv_bytes, ssm_bytes = _state_bytes(model, engine)
    state_bytes = conv_bytes + ssm_bytes
    block_tokens = _block_tokens(model, engine, token_bytes, state_bytes)
    kernel_tokens = engine.kernel_block_tokens or block_tokens
    page_bytes = block_tokens * token_bytes
    groups = plan_groups(model.attention_layers, model.state_layers)
    regions = max(len(group.layers) for group in groups)
    return EngineGeometry(
        tp_size=engine.tp_size,
        block_tokens=block_tokens,
        kernel_block_tokens=kernel_tokens,
        ratio=divide_exact(block_tokens, kernel_tokens, "block_tokens"),
        page_bytes=page_bytes,
        attention_page_bytes=page_bytes,
        token_bytes=token_bytes,
        state_bytes=state_bytes,
        conv_bytes=conv_bytes,
        ssm_bytes=ssm_bytes,
        padding_bytes=page_bytes - state_bytes if model.state_layers else 0,
        groups=groups,
        region_count=regions,
        padding_slots=sum(regions - len(group.layers) for group in groups),
    )


def plan_groups(attention_layers: Sequence[int], state_layers: Sequence[int]) -> tuple[Group, ...]:
    """KV-cache groups in vLLM's order: kinds by first appearance in the model."""
    buckets = [(ATTENTION, tuple(attention_layers)), (STATE, tuple(state_layers))]
    buckets = [bucket for bucket in buckets if bucket[1]]
    if len(buckets) == 1:
        return (Group(*buckets[0]),)
    buckets.sort(key=lambda bucket: bucket[1][0])
    fewest = min(len(layers) for _, layers in buckets)
    most = max(len(layers) for _, layers in buckets)
    size = most if 2 * most < 3 * fewest else fewest
    groups = []
    for kind, layers in buckets:
        count = ceil_div(len(layers), size)
        groups += [Group(kind, layers[first::count]) for first in range(count)]
    return tuple(groups)


def attention_planes(model: ModelFacts, engine: EngineFacts) -> tuple[Plane, ...]:
    """How a KV head is packed on this engine (dtypes already resolved)."""
    facts = model.attention
    element = element_bytes(engine.kv_dtype, "kv_dtype")
    width = facts.head_dim if facts.latent_dim is None else facts.latent_dim
    return planes_of(engine.packing, width, facts.v_head_dim, element)


def layout_of(
    model: ModelFacts,
    engine: EngineFacts,
    model_id: str,
    revision: str | None = None,
    vllm_version: str = "unknown",
) -> CacheLayout:
    """The layout an engine is going to have; layers are named `layers.<index>.<kind>`."""
    engine = resolve_engine(model, engine)
    geometry = plan_engine(model, engine)
    return check_layout(
        CacheLayout(
            model_id=model_id,
            revision=revision,
            vllm_version=vllm_version,
            wire_version=WIRE_VERSION,
            tp_size=engine.tp_size,
            block_tokens=geometry.block_tokens,
            kernel_block_tokens=geometry.kernel_block_tokens,
            packing=engine.packing,
            kv_dtype=engine.kv_dtype,
            conv_dtype=engine.conv_dtype,
            ssm_dtype=engine.ssm_dtype,
            conv_layout=engine.conv_layout,
            spec_tokens=engine.spec_tokens,
            page_bytes=geometry.page_bytes,
            layers=_layers(model, engine, geometry),
        )
    )


def _layers(
    model: ModelFacts, engine: EngineFacts, geometry: EngineGeometry
) -> tuple[LayerGeometry, ...]:
    planes = attention_planes(model, engine)
    kv_heads = _kv_section(model, engine).extent
    family = model.state.family if model.state else ""
    sections = place(_state_sections(model, engine), engine.tp_size)
    layers = []
    for group, members in enumerate(geometry.groups):
        for slot, index in enumerate(members.layers):
            name = f"layers.{index}.{members.kind}"
            if members.kind == ATTENTION:
                layers.append(attention_layer(name, group, slot, kv_heads, planes))
            else:
                layers.append(state_layer(name, group, slot, family, sections))
    return tuple(layers)


def _kv_section(model: ModelFacts, engine: EngineFacts) -> Section:
    heads = 1 if model.attention.latent_dim is not None else model.attention.kv_heads
    planes = attention_planes(model, engine)
    return Section("kv", heads, head_token_bytes(planes), replicates=True)


def _token_bytes(model: ModelFacts, engine: EngineFacts) -> int:
    section = _kv_section(model, engine)
    return units_per_rank(section, engine.tp_size) * section.unit_bytes


def _state_sections(model: ModelFacts, engine: EngineFacts) -> tuple[Section, ...]:
    if model.state is None:
        return ()
    conv = conv_sections(model.state, engine.conv_dtype, engine.spec_tokens)
    return conv + temporal_sections(model.state, engine.ssm_dtype)


def _state_bytes(model: ModelFacts, engine: EngineFacts) -> tuple[int, int]:
    """(conv bytes, temporal bytes) of one state page on one rank."""
    if bool(model.state_layers) != (model.state is not None):
        raise GeometryError(
            "model.state", "facts exactly when there are state layers", len(model.state_layers)
        )
    if model.state is None:
        return 0, 0
    conv = conv_sections(model.state, engine.conv_dtype, engine.spec_tokens)
    temporal = temporal_sections(model.state, engine.ssm_dtype)
    return (
        placed_bytes(place(conv, engine.tp_size), engine.tp_size),
        placed_bytes(place(temporal, engine.tp_size), engine.tp_size),
    )


def _block_tokens(
    model: ModelFacts, engine: EngineFacts, token_bytes: int, state_bytes: int
) -> int:
    """N: tokens of a logical block, inflated until an attention page holds a state."""
    configured = engine.block_size or engine.alignment_tokens
    if state_bytes == 0:
        return configured
    alignment = max(engine.alignment_tokens, configured)
    if model.attention.latent_dim is not None:
        alignment = max(alignment, MLA_ALIGNMENT_TOKENS)
    inflated = alignment * ceil_div(state_bytes, alignment * token_bytes)
    return max(configured, round_up(inflated, engine.backend_alignment_tokens))
