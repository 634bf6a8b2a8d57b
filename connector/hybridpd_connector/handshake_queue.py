"""Whose turn a handshake is. Addresses come with requests and may be made up, thousands of them,
and one that does not answer holds a thread for seconds: real engines must not queue behind those.

- Addresses that are known come first: configured ones, and those at which a handshake succeeded.
- The others, strangers, never hold all threads.
- Among them an engine that more requests ask for comes first, less so for each failure at its
  address: who makes addresses up needs as many requests for each as a real engine gets.
- One address is asked once at a time, whatever engines are said to live there.
- When too many wait, the one that would come last gives its place up to a better one.

No clock and no thread in here; a lock, because threads of the pool take from it.
"""

import collections
import dataclasses
import threading
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

A = TypeVar("A", bound=Hashable)
K = TypeVar("K", bound=Hashable)
W = TypeVar("W")

MAX_REMEMBERED = 1024
"""Addresses and engines of which something is remembered; the oldest are forgotten."""

MAX_FAILURES = 3
"""Failures in a row after which an address that has answered is a stranger again."""


@dataclasses.dataclass(frozen=True)
class Turn(Generic[A]):
    """A handshake that waits, or runs."""

    engine_id: str
    address: A
    attempt: int
    order: int


class HandshakeQueue(Generic[A]):
    """See the module. ``strangers``: how many of them may run at once."""

    def __init__(self, strangers: int) -> None:
        self._strangers = strangers
        self._configured: frozenset[A] = frozenset()
        self._answered: collections.OrderedDict[A, None] = collections.OrderedDict()
        self._failures: collections.OrderedDict[A, int] = collections.OrderedDict()
        self._requests: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._waiting: dict[int, Turn[A]] = {}
        self._running: dict[A, Turn[A]] = {}
        self._running_strangers: set[A] = set()
        self._orders = 0
        # Rank of the last in line without its order; None: not known. Requests that come later may
        # have raised it.
        self._lowest: tuple[bool, float] | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"HandshakeQueue(waiting={len(self._waiting)}, running={len(self._running)})"

    def configure(self, addresses: Iterable[A]) -> None:
        """Addresses that an operator has named; no failure makes strangers of them."""
        with self._lock:
            self._configured = frozenset(addresses)
            self._lowest = None

    def count_request(self, engine_id: str) -> None:
        """One more request asks for this engine."""
        with self._lock:
            if _remember(self._requests, engine_id, self._requests.get(engine_id, 0) + 1):
                # Whoever was forgotten may wait, and be the last in line from now on.
                self._lowest = None

    def put(self, engine_id: str, address: A, attempt: int) -> None:
        """A handshake is due; ``attempt`` is its number."""
        with self._lock:
            self._orders += 1
            turn = self._waiting[attempt] = Turn(engine_id, address, attempt, self._orders)
            if self._lowest is not None:
                self._lowest = min(self._lowest, self._rank(turn)[:2])

    def take(self) -> Turn[A] | None:
        """The next one to run, until ``done``; None when none may run now."""
        with self._lock:
            full = len(self._running_strangers) >= self._strangers
            ready = [
                turn
                for turn in self._waiting.values()
                if turn.address not in self._running and (self._known(turn.address) or not full)
            ]
            if not ready:
                return None
            turn = max(ready, key=self._rank)
            del self._waiting[turn.attempt]
            self._lowest = None
            self._running[turn.address] = turn
            if not self._known(turn.address):
                self._running_strangers.add(turn.address)
            return turn

    def done(self, turn: Turn[A], *, answered: bool, succeeded: bool) -> None:
        """It has ended; ``answered``: somebody was there, be it with a refusal."""
        with self._lock:
            del self._running[turn.address]
            self._lowest = None
            self._running_strangers.discard(turn.address)
            if answered:
                self._failures.pop(turn.address, None)
            else:
                failures = self._failures.get(turn.address, 0) + 1
                _remember(self._failures, turn.address, failures)
                if failures >= MAX_FAILURES:
                    self._answered.pop(turn.address, None)
            if succeeded:
                self._requests.pop(turn.engine_id, None)
                _remember(self._answered, turn.address, None)

    def may_come_first(self, engine_id: str, address: A) -> bool:
        """Worth asking ``give_way``? Cheap: hundreds ask in every step."""
        with self._lock:
            if not self._waiting:
                return False
            if self._lowest is None:
                self._lowest = min(map(self._rank, self._waiting.values()))[:2]
            return self._rank_of(engine_id, address) > self._lowest

    def give_way(self, engine_id: str, address: A) -> Turn[A] | None:
        """Too many wait: the last in line is taken out when this engine comes before it."""
        with self._lock:
            if not self._waiting or any(t.engine_id == engine_id for t in self._waiting.values()):
                return None
            last = min(self._waiting.values(), key=self._rank)
            self._lowest = self._rank(last)[:2]
            if self._rank_of(engine_id, address) <= self._lowest:
                return None
            # The next one is no lower.
            del self._waiting[last.attempt]
            return last

    def clear(self) -> None:
        """Nothing that waits is run any more."""
        with self._lock:
            self._waiting.clear()

    def _known(self, address: A) -> bool:
        return address in self._configured or address in self._answered

    def _rank_of(self, engine_id: str, address: A) -> tuple[bool, float]:
        wanted = self._requests.get(engine_id, 0) / (1 + self._failures.get(address, 0))
        return self._known(address), wanted

    def _rank(self, turn: Turn[A]) -> tuple[bool, float, int]:
        return *self._rank_of(turn.engine_id, turn.address), -turn.order


def _remember(memory: "collections.OrderedDict[K, W]", key: K, value: W) -> bool:
    """True: another key was forgotten for it."""
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) <= MAX_REMEMBERED:
        return False
    memory.popitem(last=False)
    return True
