"""Which rows of a setting fail it, and what decides where vLLM's own noise is too large.

Noise above the cap means that no bound can tell a wrong token from vLLM's own rounding: a setting
that has only bounds fails then. `exact` needs no bound. Where it has passed, it decides, and the
scenarios that hand the same bytes over in other batches are told beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridpd_testkit.leads import Comparison, Told, compare, too_noisy
from hybridpd_testkit.processes import HttpError

EXACT = "exact"
# What `exact` decides for. The others do more than to hand bytes over: they want a bound.
TOLD = ("handover", "at-once")
# These compare no tokens with a bound.
WITHOUT_BOUND = (EXACT, "as asked", "checksums")


class WrongError(AssertionError):
    """A scenario saw something else than it should."""


def need(condition: bool, what: str) -> None:
    """A check of a scenario."""
    if not condition:
        raise WrongError(what)


FAILURES = (WrongError, HttpError, OSError, RuntimeError, ValueError)


def judged(
    expected: Sequence[Told], answers: Sequence[Sequence[int]], bound: float, decides: bool = True
) -> Comparison | str:
    """The comparison; WrongError when it shows a wrong token, or too little, and `decides`."""
    found = compare(expected, answers, bound)
    if decides:
        need(not found.problem, found.problem)
        return found
    return f"{found}; {found.problem}" if found.problem else str(found)


def run_checks(
    bench: Any, checks: Mapping[str, Callable[[Any], str]], say: Callable[..., None]
) -> bool:
    """Run and tell every check; whether all is well.

    ``bench`` has ``noise`` in nats, and ``decides``, which is turned off where `exact` decides: by
    itself it passes with half of its places or more. ``say`` takes scenario, verdict, seconds and
    details.
    """
    noisy = too_noisy(bench.noise)
    # A stable sort: `exact` comes before what it may have to decide for.
    names = sorted(checks, key=lambda name: name != EXACT) if noisy else list(checks)
    good: dict[str, bool] = {}
    for name in names:
        started = time.monotonic()
        try:
            detail = checks[name](bench)
            verdict = "ok" if bench.decides or name not in TOLD else "told"
        except FAILURES as error:
            verdict, detail = "WRONG", f"{type(error).__name__}: {error}"[:1500]
        say(name, verdict, f"{time.monotonic() - started:.1f}", detail)
        good[name] = verdict != "WRONG"
        if noisy and name == EXACT and good[name]:
            bench = replace(bench, decides=False)
    if noisy:
        problem = undecided(checks, good.get(EXACT, False))
        words = problem or "too noisy to decide, exact decides"
        say("noise", "WRONG" if problem else "ok", "", words)
        good["noise"] = not problem
    return all(good.values())


def undecided(names: Iterable[str], exact_passed: bool) -> str:
    """What nothing has decided in a setting with noise above the cap; "" when `exact` has."""
    if not exact_passed:
        return f"too noisy to decide, and {EXACT} has not passed"
    others = [name for name in names if name not in (*TOLD, *WITHOUT_BOUND)]
    return f"too noisy to decide {', '.join(others)}, for which {EXACT} says nothing" * bool(others)
