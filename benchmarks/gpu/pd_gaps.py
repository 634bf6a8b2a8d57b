"""Times between the tokens of an answer, by their place in it, as a client sees them.

Time per token is one figure for a whole answer. Where two connectors differ in it, this says
whether one of them is late once, right behind the hand-over, or in every step. Servers join tokens
into one event where a client or they themselves fall behind: events per token say so.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence

SECOND, THIRD, REST, MOST = "gap_2", "gap_3", "gap_rest", "gap_most"
EVENTS = "events_per_token"
TITLES = {
    SECOND: "2nd token behind the 1st",
    THIRD: "3rd token behind the 2nd",
    REST: "the rest, median of a request",
    MOST: "the longest of the rest",
}


def gaps_of(moments: Sequence[float]) -> dict[str, float]:
    """Seconds of one answer. ``moments``: of its events, in order. What it is too short for is
    left out."""
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    found = dict(zip((SECOND, THIRD), gaps, strict=False))
    if rest := gaps[2:]:
        found |= {REST: statistics.median(rest), MOST: max(rest)}
    return found


def by_place(answers: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """The values of each place that some answer has."""
    found: dict[str, list[float]] = {}
    for gaps in answers:
        for place, seconds in gaps.items():
            found.setdefault(place, []).append(seconds)
    return found
