"""Several processes of each connector on one GPU: what may be concluded, what fits, who is asked
when."""

from __future__ import annotations

import argparse
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def modules(gpu_programs: Path) -> tuple[Any, Any, Any, Any]:
    import crowd_plan
    import crowd_report
    import crowd_verdict
    import memory_split

    return crowd_verdict, crowd_report, crowd_plan, memory_split


def points(connector: str, values: list[list[float]], **more: Any) -> list[dict[str, Any]]:
    """``values``: passes of each process."""
    return [
        {
            "phase": "alone", "connector": connector, "process": process, "pass": turn,
            "concurrency": 8, "failed": 0, "tpot_p50_ms": value, **more,
        }
        for process, passes in enumerate(values)
        for turn, value in enumerate(passes)
    ]  # fmt: skip


def kind(verdict: Any, *values: float) -> Any:
    return verdict.Kind(dict(enumerate(values)), 0.0)


def test_a_process_is_the_median_of_its_passes(modules: tuple[Any, ...]) -> None:
    found = modules[0].kind_of(points("x", [[3.0, 9.0, 4.0], [6.0, 6.0, 6.0]]), "tpot_p50_ms")
    assert found.values == {0: 4.0, 1: 6.0}
    assert found.mean == 5.0
    assert found.deviation == pytest.approx(2**0.5)
    assert found.spread_percent == pytest.approx(40)
    assert found.passes_deviation == pytest.approx((31 / 6) ** 0.5)


def test_a_failed_point_and_a_lone_process_say_nothing(modules: tuple[Any, ...]) -> None:
    verdict = modules[0]
    assert verdict.kind_of(points("x", [[3.0], [4.0]], failed=1), "tpot_p50_ms") is None
    assert verdict.kind_of(points("x", [[3.0, 4.0]]), "tpot_p50_ms") is None
    assert verdict.kind_of(points("x", [[3.0], [4.0]]), "hand_over_p50_ms") is None


def test_welch_by_hand(modules: tuple[Any, ...]) -> None:
    """Means 11 and 10, variances 1 and 4/3 over three and four processes: 4.95 degrees of freedom,
    4 in the table."""
    verdict = modules[0]
    found = verdict.difference(kind(verdict, 10, 11, 12), kind(verdict, 9, 9, 11, 11))
    assert found.percent == pytest.approx(10)
    assert found.error == pytest.approx(10 * (2 / 3) ** 0.5)
    assert found.high - found.percent == pytest.approx(2.776 * found.error)
    assert found.low == pytest.approx(found.percent - 2.776 * found.error)
    assert found.verdict == verdict.ALIKE


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ((3.0, 3.1, 2.9, 3.0), "higher"),
        ((1.0, 1.1, 0.9, 1.0), "lower"),
        ((2.1, 2.0, 1.9, 2.05), "no difference shown"),
    ],
)
def test_a_difference_is_shown_only_beyond_the_luck_of_processes(
    modules: tuple[Any, ...], ours: tuple[float, ...], expected: str
) -> None:
    verdict = modules[0]
    found = verdict.difference(kind(verdict, *ours), kind(verdict, 2.0, 2.1, 1.9, 2.0))
    assert found.verdict == expected
    assert str(found).endswith(expected)


def test_kinds_without_any_spread(modules: tuple[Any, ...]) -> None:
    verdict = modules[0]
    same = verdict.difference(kind(verdict, 2.0, 2.0), kind(verdict, 2.0, 2.0))
    assert (same.percent, same.error, same.verdict) == (0, 0, verdict.ALIKE)
    assert verdict.difference(kind(verdict, 3.0, 3.0), kind(verdict, 2.0, 2.0)).verdict == "higher"


def test_pairs_leave_out_what_the_machine_did(modules: tuple[Any, ...]) -> None:
    """A machine that doubles its speed meanwhile hides a difference from all but the pairs."""
    verdict = modules[0]
    ours, base = kind(verdict, 1.1, 2.2, 4.41), kind(verdict, 1.0, 2.0, 4.0)
    assert verdict.difference(ours, base).verdict == verdict.ALIKE
    found = verdict.paired(ours, base)
    assert found.percent == pytest.approx(10.08, abs=0.01)
    assert found.verdict == "higher"
    assert verdict.paired(ours, dataclasses.replace(base, values={2: 4.0, 9: 1.0})) is None


@pytest.mark.parametrize(("freedom", "expected"), [(0.4, 12.706), (1, 12.706), (6.9, 2.447),
                                                   (11.5, 2.228), (5000, 1.98)])  # fmt: skip
def test_the_bound_is_that_of_fewer_degrees(
    modules: tuple[Any, ...], freedom: float, expected: float
) -> None:
    assert modules[0].t_95(freedom) == expected


def test_the_interval_holds_what_it_promises(modules: tuple[Any, ...]) -> None:
    """Kinds that are alike are called different in one of twenty cases, not more."""
    verdict, source = modules[0], random.Random(5)

    def four() -> Any:
        return kind(verdict, *(source.gauss(3.0, 0.1) for _ in range(4)))

    wrong = sum(verdict.difference(four(), four()).verdict != verdict.ALIKE for _ in range(2000))
    assert 20 < wrong < 120


def test_the_report_tells_processes_kinds_and_luck(modules: tuple[Any, ...]) -> None:
    _, report, _, _ = modules
    many = [
        *points("hybridpd", [[2.0, 2.0], [2.2, 2.2]]),
        *points("in-tree", [[2.0, 2.0], [2.1, 2.1]]),
        *points("none", [[2.0]], failed=1),
    ]
    lines = report.report(many)
    assert "concurrency 8, TPOT p50, ms" in lines
    (ours,) = (line for line in lines if line.startswith("  hybridpd  "))
    assert ours.split()[1:3] == ["2.000", "2.200"]
    (compared,) = (line for line in lines if line.startswith("  hybridpd to in-tree:"))
    assert "+2.4 %" in compared
    assert compared.endswith("no difference shown")
    assert any("passes of one process by 0.0 %" in line for line in lines)
    assert not any("none" in line for line in lines)
    assert lines[-1] == "failed requests: 1"
    (verdict,) = (line for line in lines if line.startswith("alone, TPOT p50, ms, 8 at once, 2 "))
    assert verdict.count("no difference shown") == 2


def test_one_pass_goes_back_where_the_last_one_came(modules: tuple[Any, ...]) -> None:
    order = modules[2].order_of
    first = order("abc", range(4), 0)
    assert order("abc", range(4), 1) == first[::-1]
    assert sorted(first) == sorted((k, n) for k in "abc" for n in range(4))
    assert [k for k, _ in first[::3]] == ["a", "b", "c", "a"], "another kind begins each time"
    assert order("abc", range(4), 2) != first


def test_a_crowd_is_enough_with_two_kinds(modules: tuple[Any, ...]) -> None:
    plan = modules[2]
    two = ["hybridpd-d0", "hybridpd-d1", "hybridpd-p0"]
    assert plan.processes_of("hybridpd", two) == [0, 1]
    assert not plan.enough(two)
    assert not plan.enough([*two, "in-tree-d4", "in-tree-d5"]), "no prefill engine of in-tree"
    assert plan.enough([*two, "in-tree-d4", "in-tree-d5", "in-tree-p4"])
    assert plan.enough([*two, "none-d0", "none-d1"])


def test_weights_are_those_of_the_published_model(modules: tuple[Any, ...]) -> None:
    """Nemotron-3-Nano has 31.6 billion parameters."""
    import pd_models

    split = modules[3]
    assert split.weights_bytes(pd_models.NANO) == pytest.approx(2 * 31.6e9, rel=0.005)


def test_a_cache_holds_what_it_is_for(modules: tuple[Any, ...]) -> None:
    """On an H200 Nano has pages of 2,146,304 bytes in six regions and blocks of 2,096 tokens; four
    groups of states and one of attention."""
    import pd_models

    cache = modules[3].cache_bytes
    block = 6 * 2_146_304
    spare = modules[3].SPARE_SEQUENCES
    assert cache(pd_models.NANO, 10, 2096) == (10 + spare) * 5 * block
    assert cache(pd_models.NANO, 10, 2097) == (10 + spare) * 6 * block


def specs_of(plan: Any, processes: int) -> list[Any]:
    names = [(kind, part) for kind in plan.KINDS for part in "pd" if (kind, part) != ("none", "p")]
    from hybridpd_testkit.engines import EngineSpec

    return [
        EngineSpec(
            plan.name_of(kind, part, number),
            Path("model"),
            role=None if kind == "none" else {"p": "kv_producer", "d": "kv_consumer"}[part],
        )
        for kind, part in names
        for number in range(2 if part == "p" else processes)
    ]


def options(**more: Any) -> argparse.Namespace:
    given = {"model": "nano-thin", "concurrency": "1,8,32,128", "input": 1000, "output": 100}
    return argparse.Namespace(**{**given, **more})


def test_the_crowd_of_the_table_fits_on_an_h200(modules: tuple[Any, ...]) -> None:
    _, _, plan, split = modules
    shares = plan.shares_of(specs_of(plan, 4), options())
    assert len(shares) == 16
    assert split.too_much(shares, split.GPU_BYTES) == ""
    prefill, decode = shares[0], shares[2]
    assert prefill.name == "hybridpd-p0"
    assert decode.name == "hybridpd-d0"
    assert prefill.cache < decode.cache, "prefill holds a request for a shorter time"


def test_a_crowd_that_does_not_fit_is_told_before_it_starts(modules: tuple[Any, ...]) -> None:
    _, _, plan, split = modules
    shares = plan.shares_of(specs_of(plan, 6), options())
    words = split.too_much(shares, split.GPU_BYTES)
    assert words.startswith("22 engines want ")
    assert "fewer engines or clients, or a smaller model" in words
    whole = plan.shares_of(specs_of(plan, 2), options(model="nano64"))
    assert "alone takes 4" in split.too_much(whole, split.GPU_BYTES)


def test_memory_is_full_only_up_to_what_is_kept(modules: tuple[Any, ...]) -> None:
    split = modules[3]
    shares = [split.Share("a", 40, 6, beside=0), split.Share("b", 50, 0, beside=0)]
    assert split.too_much(shares, 100) == ""
    assert split.too_much([*shares, split.Share("c", 1, 0, beside=0)], 100)
