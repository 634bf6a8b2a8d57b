"""What timed reads prove of a link when the process that times them may not get to look.

The end of a read is noticed when a thread of Python looks, and other threads may keep it from
looking: whoever spins keeps the interpreter for 5 ms at a time, in which NVLink carries 2 MiB a
hundred times over. So a read has no duration here but two bounds. ``at_most_seconds``: until its
end was seen. ``at_least_seconds``: it was seen unfinished for so long after it was posted, or the
reading thread itself was at work on it for so long; what others took is in neither.

    at most below the bar     fast, whatever this process was doing
    at least above the bar    slow, whatever this process was doing
    the bar is in between     this read proves nothing

A longer read moves the bar and leaves what others take as it was: that decides sooner or later.

Pure.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Final

ENOUGH_READS: Final = 4
ENOUGH_SECONDS: Final = 0.1
"""A link is slow when so many reads agree, or when those that do took so long together."""


class Verdict(enum.Enum):
    """What reads of one length prove together."""

    FAST = "fast"
    SLOW = "slow"
    UNSURE = "unsure"


@dataclasses.dataclass(frozen=True)
class Sample:
    """One read of ``bytes`` bytes. See the module for the bounds."""

    bytes: int
    at_least_seconds: float
    at_most_seconds: float


@dataclasses.dataclass(frozen=True)
class Bar:
    """How fast a fast link is. ``bulk_bytes``: lengths of the reads that are made, one after the
    other, while shorter ones prove nothing; none where no link is called slow."""

    latency_seconds: float
    bytes_per_second: float
    bulk_bytes: tuple[int, ...] = ()

    def seconds(self, size: int) -> float:
        """What a read of ``size`` bytes may take."""
        return self.latency_seconds + size / self.bytes_per_second

    def fast(self, sample: Sample) -> bool:
        return sample.at_most_seconds <= self.seconds(sample.bytes)

    def slow(self, sample: Sample) -> bool:
        return sample.at_least_seconds > self.seconds(sample.bytes)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The best of a few reads: ``bytes`` bytes in ``seconds``, from the post until the end was
    seen. ``sound``: that is the link's own speed; else it is at least that fast."""

    bytes: int
    seconds: float
    sound: bool = True

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds


def enough(samples: Sequence[Sample]) -> bool:
    """May these be the last ones? Time that others took does not count."""
    spent = sum(sample.at_least_seconds for sample in samples)
    return len(samples) >= ENOUGH_READS or spent >= ENOUGH_SECONDS


def judge(samples: Sequence[Sample], bar: Bar) -> Verdict:
    """One fast read is proof. Slow needs all of them: a read may have waited for others' reads."""
    if any(map(bar.fast, samples)):
        return Verdict.FAST
    slow = enough(samples) and all(map(bar.slow, samples))
    return Verdict.SLOW if slow else Verdict.UNSURE


def summary(samples: Sequence[Sample], bar: Bar, verdict: Verdict) -> Measurement:
    """The fastest of ``samples``; of those that are fast, where some are."""
    shown = [sample for sample in samples if bar.fast(sample)] or samples
    best = max(shown, key=lambda sample: sample.bytes / sample.at_most_seconds)
    return Measurement(best.bytes, best.at_most_seconds, verdict is not Verdict.UNSURE)
