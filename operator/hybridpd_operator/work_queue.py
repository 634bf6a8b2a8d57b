"""The queue of services to look at. Knows keys and times, nothing of clusters.

* A key is in it once, however many events named it: passes look at everything anyway.
* A key that is being worked on is not handed out again before it is finished.
* A pass that failed comes back after a growing, capped, jittered delay.

Not thread-safe: the event loop owns it. ``now`` is monotonic seconds, given by the caller.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

FIRST_RETRY_SECONDS: Final = 1.0
LONGEST_RETRY_SECONDS: Final = 300.0
_MOST_DOUBLINGS: Final = 16


class Key(NamedTuple):
    """Namespace and name of one service."""

    namespace: str
    name: str


def retry_seconds(failures: int, jitter: float) -> float:
    """Delay after the n-th failure in a row: doubles up to the cap, times 0.5 to 1 by ``jitter``.

    ``jitter`` is in [0, 1).
    """
    doublings = min(failures - 1, _MOST_DOUBLINGS)
    whole = min(FIRST_RETRY_SECONDS * 2**doublings, LONGEST_RETRY_SECONDS)
    return float(whole * (0.5 + jitter / 2))


@dataclass
class WorkQueue:
    """Keys with the time at which each is due."""

    jitter: Callable[[], float]
    _due: dict[Key, float] = field(default_factory=dict)
    _active: set[Key] = field(default_factory=set)
    _failures: dict[Key, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<WorkQueue waiting={len(self._due)} active={len(self._active)}>"

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: Key, now: float, delay_seconds: float = 0.0) -> None:
        """Ask for a pass; an earlier one that is already waiting stands."""
        due = now + delay_seconds
        self._due[key] = min(self._due.get(key, due), due)

    def take(self, now: float) -> Key | None:
        """Hand out the longest-waiting due key that nobody works on."""
        ready = [(due, key) for key, due in self._due.items() if key not in self._active]
        if not ready:
            return None
        due, key = min(ready)
        if due > now:
            return None
        del self._due[key]
        self._active.add(key)
        return key

    def wait_seconds(self, now: float) -> float | None:
        """Seconds until the next key can be taken; None when nothing waits."""
        waiting = [due for key, due in self._due.items() if key not in self._active]
        return max(0.0, min(waiting) - now) if waiting else None

    def succeed(self, key: Key, now: float, again_seconds: float | None) -> None:
        """A pass ended well; look again after ``again_seconds`` if given."""
        self._active.discard(key)
        self._failures.pop(key, None)
        if again_seconds is not None:
            self.add(key, now, again_seconds)

    def fail(self, key: Key, now: float) -> float:
        """A pass failed; returns the delay after which the key is due again."""
        self._active.discard(key)
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        # A watch event that came in meanwhile must not undercut the delay.
        self._due.pop(key, None)
        delay = retry_seconds(failures, self.jitter())
        self.add(key, now, delay)
        return delay
