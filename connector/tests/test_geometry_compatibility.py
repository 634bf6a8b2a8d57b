"""Every difference between two engines is reported, fatal exactly when bytes would be wrong."""

from dataclasses import replace

import pytest
from test_geometry_numbers import FALCON, JAMBA, KIMI, NANO, QWEN_NEXT

from hybridpd_geometry import (
    CacheLayout,
    EngineFacts,
    GeometryError,
    Mismatch,
    ModelFacts,
    compare,
    layout_of,
    legal_tp_sizes,
    nearest_legal_tp,
    plan_pair,
    tp_problems,
)

BASE = replace(
    layout_of(NANO, EngineFacts(2), "org/nano", revision="abc", vllm_version="0.32.0"),
    numerics="dtype bfloat16",
)


def engine(model: ModelFacts = NANO, tp: int = 2, **changes: object) -> CacheLayout:
    facts = replace(EngineFacts(tp), **changes)  # type: ignore[arg-type]
    layout = layout_of(model, facts, "org/nano", revision="abc", vllm_version="0.32.0")
    return replace(layout, numerics=BASE.numerics)


def fatal(found: tuple[Mismatch, ...]) -> list[str]:
    return [mismatch.field for mismatch in found if mismatch.fatal]


def test_equal_engines_have_no_difference() -> None:
    assert compare(BASE, engine()) == ()


@pytest.mark.parametrize(
    ("theirs", "fields"),
    [
        (replace(BASE, wire_version=2), ["wire_version"]),
        (replace(BASE, vllm_version="0.31.0"), ["vllm_version"]),
        (replace(BASE, model_id="org/other"), ["model_id"]),
        (replace(BASE, revision="def"), ["revision"]),
        (replace(BASE, numerics="dtype float16"), ["numerics"]),
        (engine(kv_dtype="float32"), ["kv_dtype", "sections", "planes"]),
        # Two dtypes of one width: no size differs, the bytes still mean something else.
        (engine(kv_dtype="float16"), ["kv_dtype"]),
        (engine(conv_dtype="float16"), ["conv_dtype"]),
        (engine(conv_dtype="float32"), ["conv_dtype", "sections"]),
        (engine(ssm_dtype="bfloat16"), ["ssm_dtype", "sections"]),
        (engine(spec_tokens=2), ["spec_tokens", "sections"]),
        (engine(conv_layout="SD"), ["conv_layout"]),
        (engine(packing="cpu_vec", alignment_tokens=128), ["packing", "planes"]),
        (engine(FALCON), ["ssm_dtype", "layers", "sections"]),
        (engine(JAMBA), ["ssm_dtype", "layers", "kind", "sections"]),
    ],
)
def test_what_forbids_a_pair(theirs: CacheLayout, fields: list[str]) -> None:
    for one, other in ((BASE, theirs), (theirs, BASE)):
        found = compare(one, other)
        names = [name.rpartition(".")[2] for name in fatal(found)]
        assert list(dict.fromkeys(names)) == fields
        for mismatch in found:
            assert mismatch.ours != mismatch.theirs
            assert mismatch.reason
        with pytest.raises(GeometryError):
            plan_pair(one, other, 0)


@pytest.mark.parametrize(
    ("theirs", "fields"),
    [
        (engine(tp=4), {"tp_size", "block_tokens", "kernel_block_tokens"}),
        (engine(block_size=4192), {"block_tokens", "kernel_block_tokens"}),
        (engine(kernel_block_tokens=16), {"kernel_block_tokens"}),
        (replace(BASE, revision=None), {"revision"}),
        # What plans ahead of the engines does not know it.
        (replace(BASE, numerics=None), set()),
    ],
)
def test_what_is_reported_and_allowed(theirs: CacheLayout, fields: set[str]) -> None:
    found = compare(BASE, theirs)
    assert {mismatch.field for mismatch in found} == fields
    assert fatal(found) == []
    assert plan_pair(theirs, BASE, 1).sources


def test_both_values_and_the_way_out_are_named() -> None:
    (mismatch, *_) = compare(BASE, engine(spec_tokens=2))
    assert (mismatch.field, mismatch.ours, mismatch.theirs) == ("spec_tokens", 0, 2)
    assert "conv_kernel - 1 + speculative tokens" in mismatch.reason
    assert "same number of speculative tokens" in mismatch.hint


def test_speculative_tokens_do_not_matter_to_mamba1() -> None:
    one, other = engine(JAMBA), engine(JAMBA, spec_tokens=3)
    assert fatal(compare(one, other)) == []
    assert [mismatch.field for mismatch in compare(one, other)] == ["spec_tokens"]


def test_dense_models_do_not_look_at_state_settings() -> None:
    dense = replace(NANO, state_layers=(), state=None)
    assert (
        compare(engine(dense), engine(dense, conv_layout="SD", ssm_dtype="float32", spec_tokens=4))
        == ()
    )


def test_sd_layout_needs_equal_tp() -> None:
    one, other = engine(conv_layout="SD"), engine(tp=4, conv_layout="SD")
    assert fatal(compare(one, other)) == ["conv_layout"]
    assert fatal(compare(one, engine(conv_layout="SD"))) == []


def test_tiles_that_block_borders_cut() -> None:
    one = engine(packing="cpu_amx", alignment_tokens=32, kernel_block_tokens=32)
    two = replace(one, block_tokens=40, kernel_block_tokens=8)
    fields = [(m.field, m.ours, m.theirs) for m in compare(one, two) if m.fatal]
    assert fields == [("kernel_block_tokens", 32, 8)]


def test_layers_on_one_side_only() -> None:
    fewer = replace(BASE, layers=BASE.layers[:-1])
    (mismatch,) = compare(BASE, fewer)
    assert mismatch.fatal
    assert mismatch.ours == BASE.layers[-1].name
    assert mismatch.theirs == "no other layers"


def test_a_repeated_difference_is_told_once() -> None:
    sections = [m for m in compare(BASE, engine(ssm_dtype="bfloat16")) if "sections" in m.field]
    assert len(sections) == 1


def test_legal_tp_sizes_of_published_models() -> None:
    # Nano: 64 heads, 8 groups, 2 KV heads (copied from 4 on), 32 query heads.
    assert legal_tp_sizes(NANO) == (1, 2, 4, 8)
    # Falcon-H1-7B: 24 SSM heads, one group, 12 query heads, 2 KV heads.
    assert legal_tp_sizes(FALCON) == (1, 2, 4, 6, 12)
    assert legal_tp_sizes(QWEN_NEXT) == (1, 2, 4, 8, 16)
    # MLA has no KV heads to split.
    assert legal_tp_sizes(KIMI) == (1, 2, 4, 8, 16, 32)


def test_nearest_legal_tp() -> None:
    assert nearest_legal_tp(NANO, 4) == (4,)
    assert nearest_legal_tp(NANO, 3) == (2, 4)
    assert nearest_legal_tp(NANO, 100) == (8,)


def test_tp_problems_name_role_dimension_and_way_out() -> None:
    assert tp_problems(NANO, 2, 4) == ()
    problems = tp_problems(NANO, 3, 2)
    assert {problem.field for problem in problems} == {"prefill_tp"}
    assert {problem.dimension for problem in problems} == {
        "query heads",
        "KV heads",
        "x",
        "B",
        "C",
        "ssm",
    }
    assert all(problem.nearest == (2, 4) for problem in problems)
    assert "must divide 8" in next(p.reason for p in problems if p.dimension == "B")
    sixteen = tp_problems(NANO, 16, 16)
    assert [(p.field, p.dimension) for p in sixteen] == [
        ("prefill_tp", "B"),
        ("prefill_tp", "C"),
        ("decode_tp", "B"),
        ("decode_tp", "C"),
    ]
