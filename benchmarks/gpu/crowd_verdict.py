"""Do engines of two kinds differ, or only processes? Means over processes and their errors.

Each process is one value: the median of its passes. Kinds are compared by the mean over their
processes; how far these lie apart within a kind says how sure that is (Welch's t, 95 %, two-sided).
Repeats of one process cannot say it: what a process was dealt when it came up stays with it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Point = Mapping[str, Any]

# Two-sided 95 % of Student's t; degrees of freedom are rounded down to one of these.
T_95 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
    10: 2.228, 12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.0, 120: 1.98,
}  # fmt: skip
LEAST_PROCESSES = 2
ALIKE = "no difference shown"


@dataclass(frozen=True)
class Kind:
    """One kind of engine at one load: a value for each process, and how its passes vary."""

    values: Mapping[int, float]
    passes_deviation: float  # of one pass around its process's mean; 0 with one pass each

    @property
    def mean(self) -> float:
        return statistics.mean(self.values.values())

    @property
    def deviation(self) -> float:
        """Between processes."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else 0.0

    @property
    def spread_percent(self) -> float:
        """From the lowest process to the highest, of the mean."""
        values = self.values.values()
        return 100 * (max(values) - min(values)) / self.mean if self.mean else 0.0


@dataclass(frozen=True)
class Difference:
    """Of two kinds' means, in percent of the second one's."""

    percent: float
    error: float  # standard error of `percent`, over processes
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Is zero outside of the 95 %?"""
        if self.low > 0:
            return "higher"
        return "lower" if self.high < 0 else ALIKE

    def __str__(self) -> str:
        interval = f"95 %: {self.low:+.1f} to {self.high:+.1f} %"
        return f"{self.percent:+.1f} % +- {self.error:.1f} ({interval}): {self.verdict}"


def kind_of(points: Iterable[Point], name: str) -> Kind | None:
    """From points of one kind and load; None when fewer than two processes have a value."""
    passes: dict[int, list[float]] = {}
    for point in points:
        if point.get(name) is not None and not point.get("failed"):
            passes.setdefault(point["process"], []).append(float(point[name]))
    if len(passes) < LEAST_PROCESSES:
        return None
    variances = [statistics.variance(found) for found in passes.values() if len(found) > 1]
    return Kind(
        {process: statistics.median(found) for process, found in sorted(passes.items())},
        math.sqrt(statistics.mean(variances)) if variances else 0.0,
    )


def t_95(freedom: float) -> float:
    """The bound for so many degrees of freedom, or for the next fewer in the table."""
    return T_95[max((known for known in T_95 if known <= freedom), default=1)]


def difference(one: Kind, base: Kind) -> Difference:
    """Of `one` to `base`, which may have other variances and numbers of processes."""
    parts = [kind.deviation**2 / len(kind.values) for kind in (one, base)]
    error = math.sqrt(sum(parts))
    gap = one.mean - base.mean
    freedom = 1.0
    if error:
        below = sum(
            part**2 / (len(kind.values) - 1) for part, kind in zip(parts, (one, base), strict=True)
        )
        freedom = sum(parts) ** 2 / below
    reach = t_95(freedom) * error
    low, high = gap - reach, gap + reach
    percent = 100 / base.mean
    return Difference(gap * percent, error * percent, low * percent, high * percent)


def paired(one: Kind, base: Kind) -> Difference | None:
    """The same of processes with the same number, which were asked right behind each other: what
    the machine did meanwhile falls out. None when fewer than two numbers are in both."""
    both = sorted(one.values.keys() & base.values.keys())
    if len(both) < LEAST_PROCESSES:
        return None
    gaps = [100 * (one.values[at] / base.values[at] - 1) for at in both]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    mean, reach = statistics.mean(gaps), t_95(len(gaps) - 1) * error
    return Difference(mean, error, mean - reach, mean + reach)


def luck(kinds: Sequence[Kind]) -> str:
    """How far processes of one kind lie apart, beside what repeats of one process do."""
    between = math.sqrt(statistics.mean(kind.deviation**2 for kind in kinds))
    within = math.sqrt(statistics.mean(kind.passes_deviation**2 for kind in kinds))
    mean = statistics.mean(kind.mean for kind in kinds)
    spread = max(kind.spread_percent for kind in kinds)
    return (
        f"processes of one kind differ by {100 * between / mean:.1f} % (standard deviation; lowest "
        f"to highest up to {spread:.1f} %), passes of one process by {100 * within / mean:.1f} %"
    )
