"""Tables of `pd_crowd.py`: a value for each process, means of kinds, and what may be concluded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from crowd_verdict import Kind, Point, difference, kind_of, luck, paired
from pd_report import BASE, COLOCATED, OURS

NONE = "none"
ORDER = (OURS, BASE, NONE, COLOCATED)
ALONE, PAIRS = "alone", "pairs"
# What a row is called, where it stands in a point, its digits.
ROWS: dict[str, tuple[tuple[str, str, int], ...]] = {
    ALONE: (("TPOT p50, ms", "tpot_p50_ms", 3),),
    PAIRS: (
        ("TPOT p50, ms", "tpot_p50_ms", 3),
        ("hand-over p50, ms", "hand_over_p50_ms", 2),
        ("hand-over p99, ms", "hand_over_p99_ms", 2),
        ("TTFT p50, ms", "ttft_p50_ms", 1),
        ("output tokens/s", "tokens_per_second", 0),
    ),
}
TITLES = {
    ALONE: "Engines asked alone, without any hand-over",
    PAIRS: "Prefill and decode, with hand-overs; colocated: two engines without connector",
}


def report(points: Sequence[Point]) -> list[str]:
    """Both phases, those of them that have points."""
    lines = []
    for phase, rows in ROWS.items():
        here = [point for point in points if point["phase"] == phase]
        if not here:
            continue
        passes = 1 + max(point["pass"] for point in here)
        lines += [f"{TITLES[phase]}; medians of up to {passes} passes for each process"]
        for concurrency in sorted({point["concurrency"] for point in here}):
            at = [point for point in here if point["concurrency"] == concurrency]
            for row in rows:
                lines += ["", *row_of(row, concurrency, at)]
        lines.append("")
    failed = sum(point["failed"] for point in points)
    return [*lines, *verdicts(points), "", f"failed requests: {failed}"]


def verdicts(points: Sequence[Point]) -> list[str]:
    """Ours to in-tree in short: a line for each figure and load that has both."""
    lines = [f"{OURS} to {BASE}, by the means over processes, and in pairs:"]
    for phase, rows in ROWS.items():
        here = [point for point in points if point["phase"] == phase]
        for title, name, _ in rows:
            for concurrency in sorted({point["concurrency"] for point in here}):
                at = [point for point in here if point["concurrency"] == concurrency]
                ours, base = (
                    kind_of([p for p in at if p["connector"] == connector], name)
                    for connector in (OURS, BASE)
                )
                if ours is None or base is None:
                    continue
                by_pairs = paired(ours, base)
                place = f"{phase}, {title}, {concurrency} at once, {len(ours.values)} processes"
                lines.append(f"{place:<52} {difference(ours, base)}; in pairs {by_pairs}")
    return lines


def row_of(row: tuple[str, str, int], concurrency: int, points: Sequence[Point]) -> list[str]:
    """One figure at one concurrency."""
    title, name, digits = row
    kinds = {
        connector: kind
        for connector in ORDER
        if (kind := kind_of([p for p in points if p["connector"] == connector], name)) is not None
    }
    if not kinds:
        return [f"concurrency {concurrency}, {title}: fewer than two processes have it"]
    lines = [f"concurrency {concurrency}, {title}"]
    for connector, kind in kinds.items():
        values = " ".join(f"{value:>9.{digits}f}" for value in kind.values.values())
        lines.append(
            f"  {connector:<10} {values}   mean {kind.mean:.{digits}f}, standard deviation "
            f"{kind.deviation:.{digits}f}, lowest to highest {kind.spread_percent:.1f} %"
        )
    lines.append(f"  {luck(list(kinds.values()))}")
    for one, base in combinations(kinds, 2):
        lines += [f"  {text}" for text in compared(one, base, kinds)]
    return lines


def compared(one: str, base: str, kinds: dict[str, Kind]) -> list[str]:
    """Two kinds: by all processes, and process by process."""
    lines = [f"{one} to {base}: {difference(kinds[one], kinds[base])}"]
    by_pairs = paired(kinds[one], kinds[base])
    if by_pairs is not None and COLOCATED not in (one, base):
        lines.append(f"{'':>{len(one) + len(base) + 4}}  in pairs: {by_pairs}")
    return lines
