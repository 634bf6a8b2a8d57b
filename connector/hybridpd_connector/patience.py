"""How long a step may wait for the reads it has just begun.

A read between two GPUs takes a fraction of a millisecond, and a look that comes a moment too early
costs the request a whole engine step. Over a slow link no wait of that length ever pays. So a step
may wait for what it began, up to ``bound_seconds``, as long as waiting has paid lately:

    ended within the bound        -> wait again
    MISSES times not, in a row    -> wait for every RETRYth only, until one ends in time

Nothing here waits or reads a clock; ``worker_side`` does.
"""

from collections.abc import Hashable
from typing import NamedTuple

MISSES = 3
RETRY = 32
MAX_KEYS = 4096


class Watch(NamedTuple):
    """Something in flight since ``since``; ``worth``: waiting for it may pay."""

    key: Hashable
    since: float
    worth: bool


class Patience:
    """See the module. Keys name what takes alike long: a peer and what is asked of it."""

    def __init__(self, bound_seconds: float) -> None:
        """``bound_seconds`` 0: never wait."""
        self.bound_seconds = bound_seconds
        self._misses: dict[Hashable, int] = {}

    def begin(self, key: Hashable, now: float) -> Watch:
        """Something begins, or is seen for the first time."""
        misses = self._misses.get(key, 0)
        worth = misses < MISSES or (misses - MISSES) % RETRY == RETRY - 1
        return Watch(key, now, worth and self.bound_seconds > 0)

    def ended_at_once(self, key: Hashable) -> None:
        """It has ended at the very first look: no ``Watch`` is needed to count that."""
        if self._misses:
            self._misses.pop(key, None)

    def lasts(self, watch: Watch, now: float) -> bool:
        """Is it still worth waiting for?"""
        return watch.worth and now - watch.since < self.bound_seconds

    def end(self, watch: Watch, now: float) -> None:
        """It has ended: count whether the wait paid, or would have."""
        if now - watch.since <= self.bound_seconds:
            self._misses.pop(watch.key, None)
        elif watch.key in self._misses or len(self._misses) < MAX_KEYS:
            self._misses[watch.key] = self._misses.get(watch.key, 0) + 1
