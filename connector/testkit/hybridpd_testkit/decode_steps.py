"""What steps of a decode engine last, with and without reads in them, from the lines of
`tracing`. Pure: lines in, tables out.

A step lasts from its schedule until the next one, if that has one of its requests again; so a pause
of an engine without requests is no step. Only steps in which every request gets one token count.
Each is one of

    no read in flight
    behind a pause                     the same, of the first steps after a pause of the engine
    1 read ordered, 2-3, 4 or more     the step posts them, behind the launch of its model
    the step after                     one that orders none, behind one that ordered some
    reads in flight                    any other while a load has not been reported

Told apart by the number of its requests, since a step of more requests lasts longer.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

NONE, AFTER, FLYING = "no read in flight", "the step after", "reads in flight"
ONE, FEW, MANY = "1 read ordered", "2-3 reads ordered", "4 or more ordered"
PAUSED = "behind a pause"
KINDS = (NONE, PAUSED, ONE, FEW, MANY, AFTER, FLYING)
MANY_READS = 4
FIRST_STEPS = 8
PLACES = 5
"""So many steps behind a pause are told by their place."""
FEWEST = 5
"""A row of fewer steps is not printed: its p99 would be one step."""

Durations = dict[tuple[str, int], list[float]]
"""(kind, most requests of the bucket) -> seconds of each step."""


class Step(NamedTuple):
    """One line: ``at`` seconds; ``reads`` ordered in it; ``flying``: loads that are not reported,
    these among them; ``goes_on``: has a request of the step before; ``own``: the connector's own
    seconds in the scheduler."""

    at: float
    requests: int
    tokens: int
    reads: int
    flying: int
    goes_on: bool
    own: float


class Calls(NamedTuple):
    """The connector's calls in one step of a worker; seconds."""

    at: float
    reads: int
    start: float
    results: float
    others: float


class Seen(NamedTuple):
    """What a connector's engine has done in some stretches of time."""

    steps: list[list[Step]]
    calls: list[Calls]


def seen_in(lines: Iterable[Sequence[Any]], stretches: Sequence[tuple[float, float]]) -> Seen:
    """The lines of these stretches (begin, end); steps of each stretch stay together."""
    steps: list[list[Step]] = [[] for _ in stretches]
    calls = []
    for kind, *values in lines:
        if kind not in ("step", "calls"):
            continue
        for index, (begin, end) in enumerate(stretches):
            if begin <= values[0] <= end:
                if kind == "step":
                    steps[index].append(Step(*values))
                else:
                    calls.append(Calls(*values))
    return Seen(steps, calls)


def durations(seen: Seen) -> Durations:
    """Seconds of every step that counts."""
    found: Durations = {}
    for steps in seen.steps:
        before, since_pause = [None, *steps], FIRST_STEPS
        for earlier, (step, later) in zip(before, itertools.pairwise(steps), strict=False):
            since_pause = since_pause + 1 if step.goes_on else 0
            if step.requests and step.tokens == step.requests and later.goes_on:
                kind = kind_of(step, earlier)
                if kind == NONE and since_pause < FIRST_STEPS:
                    kind = PAUSED
                key = kind, bucket(step.requests)
                found.setdefault(key, []).append(later.at - step.at)
    return found


def by_place(seen: Seen) -> list[list[tuple[float, float]]]:
    """(seconds, those of the connector's calls in the worker) of the first steps behind a pause, by
    their place: those of a request, when it is the only one. With asynchronous scheduling a step is
    scheduled while the one before still runs, so that the first ones look short."""
    found: list[list[tuple[float, float]]] = [[] for _ in range(PLACES)]
    calls = sorted(seen.calls)
    moments = [call.at for call in calls]
    for steps in seen.steps:
        place = PLACES
        for step, later in itertools.pairwise(steps):
            place = place + 1 if step.goes_on else 0
            if place < PLACES and step.requests and later.goes_on:
                mine = calls[bisect_left(moments, step.at) : bisect_left(moments, later.at)]
                own = sum(call.start + call.results + call.others for call in mine)
                found[place].append((later.at - step.at, own))
    return found


def kind_of(step: Step, earlier: Step | None) -> str:
    """By the reads in it and before it. See the module."""
    if step.reads >= MANY_READS:
        return MANY
    if step.reads:
        return ONE if step.reads == 1 else FEW
    if earlier is not None and earlier.reads:
        return AFTER
    return FLYING if step.flying else NONE


def bucket(requests: int) -> int:
    """The power of two that is not below it."""
    return 1 << (requests - 1).bit_length()


def percentile(values: Sequence[float], percent: float) -> float:
    """Of at least one value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))]


def steps_table(by_name: Mapping[str, Seen]) -> list[str]:
    """A line for each kind of step and bucket of requests, all connectors side by side."""
    found = {name: durations(seen) for name, seen in by_name.items()}
    buckets = sorted({most for own in found.values() for _, most in own})
    lines = [head("decode steps, ms", by_name)]
    for kind, most in itertools.product(KINDS, buckets):
        rows = {name: own.get((kind, most), []) for name, own in found.items()}
        if any(len(values) >= FEWEST for values in rows.values()):
            least = most // 2 + 1
            title = f"{kind}, {least}-{most} requests" if least < most else f"{kind}, {most}"
            lines.append(line_of(title, rows, 1e3))
    return lines


def places_table(by_name: Mapping[str, Seen]) -> list[str]:
    """A line for each place behind a pause, and for the worker's calls in it."""
    found = {name: by_place(seen) for name, seen in by_name.items()}
    lines = [head("first steps behind a pause, ms", by_name)]
    for at, title in enumerate(("step {}", "worker's calls in step {}")):
        for place in range(PLACES):
            row = {name: [both[at] for both in own[place]] for name, own in found.items()}
            if any(row.values()):
                lines.append(line_of(title.format(place + 1), row, 1e3))
    return lines if lines[1:] else []


def calls_table(by_name: Mapping[str, Seen]) -> list[str]:
    """What the connectors' own calls take in a step, in microseconds."""
    rows: dict[str, dict[str, list[float]]] = {
        "scheduler, no read ordered": {},
        "scheduler, reads ordered": {},
        "worker, no read ordered": {},
        "worker, reads ordered": {},
        "  of it start_load_kv, no read": {},
        "  of it get_transfer_results, no read": {},
    }
    for name, seen in by_name.items():
        steps = [step for stretch in seen.steps for step in stretch]
        quiet = [call for call in seen.calls if not call.reads]
        for title, values in zip(
            rows,
            (
                [step.own for step in steps if step.requests and not step.reads],
                [step.own for step in steps if step.reads],
                [call.start + call.results + call.others for call in quiet],
                [c.start + c.results + c.others for c in seen.calls if c.reads],
                [call.start for call in quiet],
                [call.results for call in quiet],
            ),
            strict=True,
        ):
            rows[title][name] = values
    return [
        head("the connector's calls in a step, us", by_name),
        *(line_of(title, row, 1e6) for title, row in rows.items() if any(row.values())),
    ]


def head(title: str, names: Iterable[str]) -> str:
    """The first line of a table of connectors side by side."""
    return (
        f"{title:<42}" + "".join(f"{name:>12} p50       p99  seen" for name in names) + "   ratio"
    )


def line_of(title: str, rows: Mapping[str, Sequence[float]], factor: float) -> str:
    """p50, p99 and number of values of each connector; the last one's p50 to the first one's."""
    line, medians = f"{title:<42}", []
    for values in rows.values():
        if not values:
            line += f"{'-':>16}{'-':>10}{0:>6}"
            continue
        medians.append(statistics.median(values))
        p99 = percentile(values, 99)
        line += f"{factor * medians[-1]:>16.2f}{factor * p99:>10.2f}{len(values):>6}"
    both = len(medians) == len(rows) > 1 and medians[0] > 0
    return line + (f"{medians[-1] / medians[0]:>8.3f}" if both else "")
