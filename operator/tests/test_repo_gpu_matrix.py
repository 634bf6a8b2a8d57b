"""What decides a setting of the GPU matrix where vLLM's own noise is above the cap."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TOO_NOISY = 0.279


@dataclasses.dataclass(frozen=True)
class FakeBench:
    noise: float
    decides: bool = True


@pytest.fixture(scope="module")
def verdict(gpu_programs: Path) -> Any:
    import matrix_verdict

    return matrix_verdict


@pytest.fixture
def play(verdict: Any) -> Callable[..., tuple[bool, dict[str, tuple[str, str]]]]:
    """Run scenarios ``{name: whether it is right}``; the verdict, and by name what was told."""

    def run(noise: float, **scenarios: bool) -> tuple[bool, dict[str, tuple[str, str]]]:
        def check(name: str, right: bool) -> Callable[[FakeBench], str]:
            def scenario(bench: FakeBench) -> str:
                verdict.need(right or not bench.decides, f"{name} is wrong")
                return f"decides {bench.decides}"

            return scenario

        names = {name.replace("_", "-"): right for name, right in scenarios.items()}
        checks = {name: check(name, right) for name, right in names.items()}
        rows: dict[str, tuple[str, str]] = {}
        good = verdict.run_checks(
            FakeBench(noise),
            checks,
            lambda name, told, _seconds, detail: rows.update({name: (told, detail)}),
        )
        return good, rows

    return run


def test_exact_decides_where_noise_does_not(play: Callable[..., Any]) -> None:
    """Whatever the order: it runs first then."""
    good, rows = play(TOO_NOISY, handover=False, at_once=False, exact=True, checksums=True)
    assert good
    assert next(iter(rows)) == "exact"
    assert rows["exact"] == ("ok", "decides True")
    assert rows["handover"] == rows["at-once"] == ("told", "decides False")
    assert rows["checksums"][0] == "ok"
    assert rows["noise"] == ("ok", "too noisy to decide, exact decides")


@pytest.mark.parametrize("exact", [{}, {"exact": False}])
def test_noise_fails_what_nothing_else_decides(
    play: Callable[..., Any], exact: dict[str, bool]
) -> None:
    good, rows = play(TOO_NOISY, **exact, handover=True, checksums=True)
    assert not good
    assert rows["handover"] == ("ok", "decides True")
    assert rows["noise"] == ("WRONG", "too noisy to decide, and exact has not passed")


def test_wrong_tokens_fail_where_exact_has_not_passed(play: Callable[..., Any]) -> None:
    _, rows = play(TOO_NOISY, exact=False, handover=False)
    assert rows["handover"] == ("WRONG", "WrongError: handover is wrong")


def test_exact_says_nothing_about_drafts(play: Callable[..., Any]) -> None:
    good, rows = play(TOO_NOISY, exact=True, handover=True, drafts=True)
    assert not good
    assert rows["noise"] == ("WRONG", "too noisy to decide drafts, for which exact says nothing")


def test_wrong_checksums_fail_whatever_exact_says(play: Callable[..., Any], verdict: Any) -> None:
    def wrong(_bench: FakeBench) -> str:
        raise verdict.WrongError("got {'wrong': 1}")

    checks = {"exact": lambda _bench: "128 places", "checksums": wrong}
    assert not verdict.run_checks(FakeBench(TOO_NOISY), checks, lambda *_: None)


@pytest.mark.parametrize(("exact", "handover"), [(True, False), (False, True), (True, True)])
def test_below_the_cap_every_row_counts(
    play: Callable[..., Any], exact: bool, handover: bool
) -> None:
    good, rows = play(0.011, handover=handover, exact=exact)
    assert good is (exact and handover)
    assert list(rows) == ["handover", "exact"]


def told(tokens: tuple[int, ...]) -> Any:
    from hybridpd_testkit.leads import Told

    return Told(tokens, tuple({token: -0.1, token + 1: -3.0} for token in tokens))


def test_a_difference_that_does_not_decide_is_told(verdict: Any) -> None:
    expected, answers = [told((5, 6, 7))], [(5, 9, 7)]
    with pytest.raises(verdict.WrongError, match=r"1 wrong, bound 0\.25000; request 0"):
        verdict.judged(expected, answers, 0.25)
    text = str(verdict.judged(expected, answers, 0.25, decides=False))
    assert "1 of 3 tokens compared" in text
    assert "request 0: token 1: expected 6, which leads by 2.90000, got 9" in text
    assert "3 of 3 tokens" in str(verdict.judged(expected, [(5, 6, 7)], 0.25, decides=False))
