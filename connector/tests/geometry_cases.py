"""Random pairs of engines for one random model: what hypothesis draws in the geometry tests."""

from dataclasses import dataclass
from math import lcm

from hypothesis import strategies as st

from hybridpd_geometry import (
    AttentionFacts,
    CacheLayout,
    EngineFacts,
    ModelFacts,
    RequestBlocks,
    StateFacts,
    layout_of,
    plan_engine,
)

TP_SIZES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Pair:
    """A model on a source and a destination engine, and a prompt length."""

    model: ModelFacts
    source: CacheLayout
    destination: CacheLayout
    tokens: int


@st.composite
def state_facts(draw: st.DrawFn, common: int) -> StateFacts:
    """A state layer whose dimensions `common` ranks can share."""
    family = draw(st.sampled_from(["mamba1", "mamba2", "gdn", "kda", "short_conv"]))
    per = st.integers(1, 2)
    heads = common * draw(per)
    return StateFacts(
        family=family,
        inner=heads * 2,
        heads=heads,
        head_dim=2,
        state_size=draw(st.sampled_from([1, 2, 3])),
        groups=draw(st.sampled_from([1, common, 2 * common])),
        key_heads=common * draw(per),
        key_head_dim=2,
        conv_kernel=draw(st.integers(2, 4)),
        ssm_dtype=draw(st.sampled_from(["auto", "float32", "bfloat16"])),
    )


@st.composite
def attention_facts(draw: st.DrawFn, tp_sizes: tuple[int, int], packing: str) -> AttentionFacts:
    """KV heads that both TP sizes can split or copy."""
    legal = [
        heads
        for heads in range(1, 2 * lcm(*tp_sizes) + 1)
        if all(heads % tp == 0 or tp % heads == 0 for tp in tp_sizes)
    ]
    kv_heads = draw(st.sampled_from(legal[:6]))
    width = 16 if packing == "cpu_amx" else draw(st.sampled_from([2, 4]))
    latent = draw(st.sampled_from([3, 6])) if packing == "latent" else None
    return AttentionFacts(lcm(*tp_sizes), kv_heads, width, width, latent)


@st.composite
def engines(
    draw: st.DrawFn, model: ModelFacts, tp_size: int, packing: str, spec_tokens: int, kv_dtype: str
) -> EngineFacts:
    """An engine for `model`: any block size, kernel block a divisor of it, either alignment."""
    alignment = draw(st.sampled_from([16, 32, 48]))
    block_size = draw(st.sampled_from([None, 16, 32, 96, 96, 192]))
    facts = EngineFacts(
        tp_size,
        kv_dtype=kv_dtype,
        block_size=block_size,
        alignment_tokens=alignment,
        packing=packing,
        spec_tokens=spec_tokens,
    )
    block_tokens = plan_engine(model, facts).block_tokens
    grain = 1 if packing in ("token", "latent") else 16
    kernels = [n for n in range(grain, block_tokens + 1, grain) if block_tokens % n == 0]
    kernel = draw(st.sampled_from([None, *kernels[-6:]]))
    return EngineFacts(
        tp_size,
        kv_dtype=kv_dtype,
        block_size=block_size,
        alignment_tokens=alignment,
        packing=packing,
        spec_tokens=spec_tokens,
        kernel_block_tokens=kernel,
    )


@st.composite
def pairs(draw: st.DrawFn, hybrid: bool | None = None) -> Pair:
    """Any model on any two engines that can be paired."""
    tp_sizes = (draw(st.sampled_from(TP_SIZES)), draw(st.sampled_from(TP_SIZES)))
    packing = draw(st.sampled_from(["token", "cpu_vec", "cpu_amx", "latent"]))
    with_state = draw(st.booleans()) if hybrid is None else hybrid
    attention = draw(attention_facts(tp_sizes, packing))
    state = draw(state_facts(lcm(*tp_sizes))) if with_state else None
    states = draw(st.integers(1, 5)) if with_state else 0
    model = ModelFacts(
        "random",
        attention_layers=tuple(range(states, states + draw(st.integers(1, 3)))),
        state_layers=tuple(range(states)),
        attention=attention,
        state=state,
    )
    spec_tokens = draw(st.integers(0, 2))
    kv_dtype = draw(st.sampled_from(["bfloat16", "float32", "fp8_e4m3"]))
    source, destination = (
        layout_of(model, draw(engines(model, tp, packing, spec_tokens, kv_dtype)), "model")
        for tp in tp_sizes
    )
    longest = 2 * max(source.block_tokens, destination.block_tokens) + 3
    return Pair(model, source, destination, draw(st.integers(1, min(longest, 300))))


def request_blocks(
    draw_ids: st.DataObject, layout: CacheLayout, tokens: int, spare: int = 0
) -> RequestBlocks:
    """Distinct block ids for every group, in any order, `spare` more than the tokens need."""
    counts = [
        -(-tokens // layout.block_tokens) + spare if kind == "attention" else 1
        for kind in layout.group_kinds
    ]
    order = draw_ids.draw(st.permutations(range(block_count(layout, tokens))))
    per_group = []
    for count in counts:
        per_group.append(tuple(order[:count]))
        order = order[count:]
    return RequestBlocks(tuple(per_group))


def dealt_blocks(layout: CacheLayout, tokens: int, first: int) -> RequestBlocks:
    """Blocks `first`, `first + 1`, ... dealt to the groups in turn, highest first."""
    groups = []
    for kind in layout.group_kinds:
        count = -(-tokens // layout.block_tokens) if kind == "attention" else 1
        groups.append(tuple(range(first + count - 1, first - 1, -1)))
        first += count
    return RequestBlocks(tuple(groups))


def block_count(layout: CacheLayout, tokens: int) -> int:
    """Blocks a memory needs for a request, with one spare per attention group and one unused."""
    per_attention = -(-tokens // layout.block_tokens) + 1
    return sum(per_attention if k == "attention" else 1 for k in layout.group_kinds) + 1
