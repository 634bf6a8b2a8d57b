"""Sizes of published models at the TP sizes people run, row by row.

Expected numbers were computed with vLLM's own calculators (bf16 KV cache, alignment 16 tokens as on
a GPU, MLA 128); the dimensions are those of the models' cards.
"""

from typing import NamedTuple

import pytest

from hybridpd_geometry import (
    AttentionFacts,
    EngineFacts,
    GeometryError,
    ModelFacts,
    StateFacts,
    plan_engine,
)


def model(
    name: str,
    states: int,
    attentions: int,
    attention: tuple[int, int, int],
    state: StateFacts,
    latent: int | None = None,
) -> ModelFacts:
    """`states` state layers before `attentions` attention layers; sizes do not depend on order."""
    query_heads, kv_heads, head_dim = attention
    return ModelFacts(
        name,
        attention_layers=tuple(range(states, states + attentions)),
        state_layers=tuple(range(states)),
        attention=AttentionFacts(query_heads, kv_heads, head_dim, head_dim, latent),
        state=state,
    )


def mamba2(heads: int, head_dim: int, state: int, groups: int, ssm: str = "auto") -> StateFacts:
    return StateFacts(
        "mamba2",
        inner=heads * head_dim,
        heads=heads,
        head_dim=head_dim,
        state_size=state,
        groups=groups,
        ssm_dtype=ssm,
    )


def gdn(ssm: str) -> StateFacts:
    return StateFacts("gdn", heads=32, head_dim=128, key_heads=16, key_head_dim=128, ssm_dtype=ssm)


KDA = StateFacts("kda", heads=32, head_dim=128, key_heads=32, key_head_dim=128)
MAMBA1 = StateFacts("mamba1", inner=8192, state_size=16)
SHORT = StateFacts("short_conv", inner=2048, conv_kernel=3)

NANO = model("Nemotron-3-Nano-30B", 23, 6, (32, 2, 128), mamba2(64, 64, 128, 8, "float32"))
SUPER = model("Nemotron-3-Super-120B", 40, 8, (32, 2, 128), mamba2(128, 64, 128, 8, "float32"))
NEMOTRON_H = model("Nemotron-H-8B", 24, 4, (32, 8, 128), mamba2(128, 64, 128, 8, "float32"))
JAMBA = model("Jamba-Mini", 28, 4, (32, 8, 128), MAMBA1)
FALCON = model("Falcon-H1-7B", 44, 44, (12, 2, 128), mamba2(24, 128, 256, 1))
BAMBA = model("Bamba-9B", 29, 3, (32, 8, 128), mamba2(128, 64, 128, 1))
GRANITE = model("Granite-4-H-Small", 36, 4, (32, 8, 128), mamba2(128, 64, 128, 1))
QWEN_NEXT = model("Qwen3-Next-80B", 36, 12, (16, 2, 256), gdn("auto"))
QWEN_35 = model("GDN fp32 30/10", 30, 10, (16, 2, 256), gdn("float32"))
KIMI = model("Kimi-Linear", 20, 7, (32, 1, 576), KDA, latent=576)
LFM2 = model("LFM2-1.2B", 10, 6, (32, 8, 64), SHORT)


class Case(NamedTuple):
    """conv, ssm, T and page in bytes on one rank, N in tokens."""

    facts: ModelFacts
    tp: int
    conv: int
    ssm: int
    token: int
    block: int
    page: int
    padding_percent: float
    regions: int
    state_groups: int
    padding_slots: int
    state_mib: float


CASES = [
    Case(NANO, 1, 36864, 2097152, 1024, 2096, 2146304, 0.58, 6, 4, 1, 46.8),
    Case(NANO, 2, 18432, 1048576, 512, 2096, 1073152, 0.58, 6, 4, 1, 23.4),
    Case(NANO, 4, 9216, 524288, 512, 1056, 540672, 1.34, 6, 4, 1, 11.7),
    Case(NANO, 8, 4608, 262144, 512, 528, 270336, 1.34, 6, 4, 1, 5.9),
    Case(SUPER, 4, 15360, 1048576, 512, 2080, 1064960, 0.10, 8, 5, 0, 40.6),
    Case(NEMOTRON_H, 1, 61440, 4194304, 4096, 1040, 4259840, 0.10, 4, 6, 0, 97.4),
    Case(JAMBA, 1, 49152, 262144, 4096, 80, 327680, 5.26, 4, 7, 0, 8.3),
    Case(FALCON, 1, 21504, 1572864, 1024, 1568, 1605632, 0.71, 44, 1, 0, 66.9),
    Case(FALCON, 2, 12288, 786432, 512, 1568, 802816, 0.51, 44, 1, 0, 33.5),
    Case(BAMBA, 1, 50688, 2097152, 4096, 528, 2162688, 0.69, 3, 10, 1, 59.4),
    Case(GRANITE, 2, 26112, 1048576, 2048, 528, 1081344, 0.62, 4, 9, 0, 36.9),
    Case(QWEN_NEXT, 1, 49152, 1048576, 2048, 544, 1114112, 1.49, 12, 3, 0, 37.7),
    Case(QWEN_NEXT, 4, 12288, 262144, 1024, 272, 278528, 1.49, 12, 3, 0, 9.4),
    Case(QWEN_NEXT, 8, 6144, 131072, 1024, 144, 147456, 7.46, 12, 3, 0, 4.7),
    Case(QWEN_35, 1, 49152, 2097152, 2048, 1056, 2162688, 0.76, 10, 3, 0, 61.4),
    Case(QWEN_35, 4, 12288, 524288, 1024, 528, 540672, 0.76, 10, 3, 0, 15.4),
    Case(KIMI, 1, 73728, 2097152, 1152, 1920, 2211840, 1.89, 7, 3, 1, 41.4),
    Case(KIMI, 2, 36864, 1048576, 1152, 1024, 1179648, 8.68, 7, 3, 1, 20.7),
    Case(LFM2, 1, 8192, 0, 2048, 16, 32768, 300.0, 6, 2, 2, 0.08),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.facts.name}-tp{case.tp}")
def test_published_models(case: Case) -> None:
    geometry = plan_engine(case.facts, EngineFacts(case.tp))
    assert geometry.conv_bytes == case.conv
    assert geometry.ssm_bytes == case.ssm
    assert geometry.token_bytes == case.token
    assert geometry.block_tokens == case.block
    assert geometry.page_bytes == geometry.attention_page_bytes == case.page
    assert geometry.padding_bytes == case.page - case.conv - case.ssm
    percent = 100 * geometry.padding_bytes / geometry.state_bytes
    assert percent == pytest.approx(case.padding_percent, abs=0.01)
    assert geometry.region_count == case.regions
    assert sum(group.kind == "state" for group in geometry.groups) == case.state_groups
    assert geometry.padding_slots == case.padding_slots
    mib = geometry.state_bytes * len(case.facts.state_layers) / 2**20
    assert mib == pytest.approx(case.state_mib, abs=0.06)


@pytest.mark.parametrize(("tp", "block"), [(1, 2176), (2, 2176), (4, 1152)])
def test_cpu_alignment_is_128_tokens(tp: int, block: int) -> None:
    assert plan_engine(NANO, EngineFacts(tp, alignment_tokens=128)).block_tokens == block


def test_fp8_cache_doubles_the_tokens_of_a_block() -> None:
    engine = EngineFacts(4, kv_dtype="fp8", alignment_tokens=128)
    assert plan_engine(SUPER, engine).block_tokens == 4224


def test_a_configured_block_is_an_alignment_not_a_size() -> None:
    assert plan_engine(NANO, EngineFacts(4, block_size=64)).block_tokens == 1088
    assert plan_engine(NANO, EngineFacts(4, block_size=4096)).block_tokens == 4096


def test_backends_that_want_other_multiples_round_the_block_up() -> None:
    assert plan_engine(NANO, EngineFacts(4, backend_alignment_tokens=64)).block_tokens == 1088


def test_ratio_of_kernel_blocks() -> None:
    geometry = plan_engine(NANO, EngineFacts(1, kernel_block_tokens=16))
    assert (geometry.ratio, geometry.kernel_block_tokens) == (131, 16)
    with pytest.raises(GeometryError, match="block_tokens: expected a multiple of 64, got 2096"):
        plan_engine(NANO, EngineFacts(1, kernel_block_tokens=64))


def test_speculative_tokens_widen_the_conv_state() -> None:
    assert plan_engine(NANO, EngineFacts(1, spec_tokens=2)).conv_bytes == 36864 * 5 // 3
    # vLLM's Mamba1 has no room for drafts.
    assert plan_engine(JAMBA, EngineFacts(1, spec_tokens=2)).conv_bytes == 49152


def test_blocks_for_memory() -> None:
    geometry = plan_engine(NANO, EngineFacts(2))
    assert geometry.blocks_for_memory(40 * 2**30) == 40 * 2**30 // (6 * 1073152)
    assert geometry.blocks_for_memory(6 * 1073152 - 1) == 0


def test_groups_take_every_nth_layer() -> None:
    geometry = plan_engine(NANO, EngineFacts(1))
    states = [group.layers for group in geometry.groups if group.kind == "state"]
    assert [len(layers) for layers in states] == [6, 6, 6, 5]
    assert states[0] == (0, 4, 8, 12, 16, 20)
    assert states[3] == (3, 7, 11, 15, 19)


def test_nearly_equal_counts_are_padded_up_instead_of_split() -> None:
    facts = model("13/12", 13, 12, (4, 4, 16), mamba2(4, 16, 16, 1))
    geometry = plan_engine(facts, EngineFacts(1))
    assert [len(group.layers) for group in geometry.groups] == [13, 12]
    assert (geometry.region_count, geometry.padding_slots) == (13, 1)


def test_a_dense_model_is_one_group_without_inflation() -> None:
    facts = ModelFacts("dense", tuple(range(32)), (), AttentionFacts(32, 8, 128, 128), None)
    geometry = plan_engine(facts, EngineFacts(4))
    assert (geometry.block_tokens, geometry.region_count, geometry.padding_slots) == (16, 32, 0)
    assert (geometry.page_bytes, geometry.padding_bytes) == (16 * 2 * 256 * 2, 0)


@pytest.mark.parametrize("tp", [3, 16])
def test_a_tp_size_that_does_not_fit_is_named(tp: int) -> None:
    with pytest.raises(GeometryError, match="tp_size: expected a divisor of"):
        plan_engine(NANO, EngineFacts(tp))
