"""Leases: how long P keeps the blocks of a finished prefill for a reader it has never met.

Producer (one ``ProducerLeases`` per P rank). The deadline lives on this rank's clock only.

    state      pin        renew              release (set not full / full)   deadline passed
    unknown    held       ignored            remembered                      -
    held       replaced   deadline = now+L   noted / ended: released         ended: expired
    ended      held       counted            same reader: nothing; else counted      -

A lease ends exactly once, and ends on the lease board first (see ``lease_board``), so a reader that
came too late can tell. ``tick`` takes the notifications *and* the time, in this order: whatever has
arrived renews or releases before anything expires, also after a step of 25 s.

Readers are counted as sets, not numbers: a lease is released when all ranks 0..tp-1 of *one* D
engine have released it. Repeats are harmless. A second engine that reads the same lease is counted;
its load fails by the board if the first engine has released by then.

Consumer (``ConsumerLeases``): which P requests this D engine still wants, who of its own requests
uses each (n > 1 shares one prefill), and which renewals are due.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from hybridpd_connector.errors import StateError, shorten
from hybridpd_connector.notifications import Message, Release, Renew

MAX_REMEMBERED = 8192
"""How many ended (or not yet pinned) requests are remembered; the oldest is forgotten first."""

MAX_EARLY_READERS = 128
"""How many releases are remembered for one request that is not pinned yet."""

MAX_EARLY = 16384
"""How many releases are remembered in all for requests that are not pinned yet."""

MAX_ENGINES = 64
"""How many reading engines of one lease are told apart."""

RENEWALS_PER_LEASE = 4
"""D renews this often per lease time, so that three lost renewals do not lose the lease."""

OTHER_ENGINE = "reader_from_other_engine"
AFTER_END = "reader_after_end"
TP_SIZE_CHANGED = "reader_tp_size_changed"
STALE_SEQUENCE = "release_of_earlier_lease"
PINNED_TWICE = "pinned_twice"
FORGOTTEN = "early_release_forgotten"


class Board(Protocol):
    """Where the end of a lease is published before it is reported."""

    def end(self, sequence: int) -> None: ...


class Ended(NamedTuple):
    """What one ``tick`` ended: request ids, each named exactly once over all ticks.

    ``problems``: how often something was seen that a well-behaved reader does not do, by reason.
    ``notes``: of an expired lease, who was heard of and when.
    """

    released: tuple[str, ...]
    expired: tuple[str, ...]
    problems: Mapping[str, int]
    notes: Mapping[str, str] = MappingProxyType({})


@dataclasses.dataclass(slots=True)
class _Lease:
    """``seen_engines``: of those that read it, in the order in which they were heard of.
    ``readers``: D ranks that have released, per engine: engine -> (tp size, ranks); None before
    the first. Most leases need neither: nothing is made for them."""

    sequence: int
    deadline: float
    pinned_at: float
    seen_engines: tuple[str, ...] = ()
    readers: dict[str, tuple[int, set[int]]] | None = None


_End = tuple[int, str]
"""What is remembered of an ended lease: its sequence, and the engine that ended it."""


class ProducerLeases:
    """Leases of one P rank. Not thread-safe: the engine thread owns it."""

    def __init__(self, lease_seconds: float, board: Board) -> None:
        self._lease_seconds = lease_seconds
        self._board = board
        self._held: dict[str, _Lease] = {}
        self._early: collections.OrderedDict[str, list[Release]] = collections.OrderedDict()
        self._early_releases = 0
        self._ends: collections.OrderedDict[str, _End] = collections.OrderedDict()
        self._problems: collections.Counter[str] = collections.Counter()
        self._released: list[str] = []
        # No deadline lies before this; renewals only move deadlines later.
        self._earliest_deadline = float("inf")

    def __repr__(self) -> str:
        return (
            f"ProducerLeases(held={len(self._held)}, early={len(self._early)}, "
            f"ends_remembered={len(self._ends)})"
        )

    @property
    def held(self) -> int:
        return len(self._held)

    def is_held(self, p_request: str) -> bool:
        return p_request in self._held

    def pin(self, p_request: str, sequence: int, now: float) -> None:
        """Start the lease of a finished prefill. Releases that were faster than us count now.

        A request id that is still held is replaced: its older lease ends on the board at once, and
        the id is reported once, with the newer lease.
        """
        if p_request in self._held:
            self._problems[PINNED_TWICE] += 1
            self._board.end(self._held.pop(p_request).sequence)
        if p_request in self._ends:
            del self._ends[p_request]
        deadline = now + self._lease_seconds
        self._held[p_request] = _Lease(sequence, deadline, now)
        if deadline < self._earliest_deadline:
            self._earliest_deadline = deadline
        if p_request not in self._early:
            return
        early = self._early.pop(p_request)
        self._early_releases -= len(early)
        for release in early:
            self._on_release(release)

    def quiet(self, now: float) -> bool:
        """Would a tick without messages end nothing, and have nothing to say?"""
        # The deadline of a lease that was released stays the earliest until the next look.
        due = self._held and now >= self._earliest_deadline
        return not (due or self._released or self._problems)

    def tick(self, messages: Iterable[Message], now: float) -> Ended:
        """Apply what has arrived, then expire; returns what ended since the last tick."""
        for message in messages:
            if isinstance(message, Renew):
                self._on_renew(message, now)
            else:
                self._on_release(message)
        notes = self._expire(now)
        ended = Ended(tuple(self._released), tuple(notes), dict(self._problems), notes)
        self._released.clear()
        self._problems.clear()
        return ended

    def _on_renew(self, renew: Renew, now: float) -> None:
        for p_request in renew.p_requests:
            lease = self._held.get(p_request)
            if lease is not None:
                lease.deadline = now + self._lease_seconds
                self._note_engine(lease, renew.d_engine)
            elif p_request in self._ends:
                self._problems[AFTER_END] += 1

    def _on_release(self, release: Release) -> None:
        lease = self._held.get(release.p_request)
        if lease is None:
            self._release_without_lease(release)
            return
        if release.sequence != lease.sequence:
            self._problems[STALE_SEQUENCE] += 1
            return
        engine, seen = release.d_engine, lease.seen_engines
        # One rank, and nobody else was heard of: it ends the lease, whatever is noted of it.
        alone = release.d_tp_size == 1 and not lease.readers and (not seen or seen == (engine,))
        if not alone and not self._is_last(release, lease):
            return
        self._end(release.p_request, lease, engine)
        self._released.append(release.p_request)

    def _is_last(self, release: Release, lease: _Lease) -> bool:
        """Has every rank of this reader's engine released now?"""
        engine = release.d_engine
        self._note_engine(lease, engine)
        if engine not in lease.seen_engines:
            return False
        if lease.readers is None:
            lease.readers = {}
        tp_size, ranks = lease.readers.setdefault(engine, (release.d_tp_size, set()))
        if tp_size != release.d_tp_size:
            self._problems[TP_SIZE_CHANGED] += 1
            return False
        ranks.add(release.d_rank)
        return len(ranks) >= tp_size

    def _release_without_lease(self, release: Release) -> None:
        end = self._ends.get(release.p_request)
        if end is not None and end[0] >= release.sequence:
            if end[1] != release.d_engine:
                self._problems[AFTER_END] += 1
            return
        early = self._early.setdefault(release.p_request, [])
        if release not in early and len(early) < MAX_EARLY_READERS:
            early.append(release)
            self._early_releases += 1
        while len(self._early) > MAX_REMEMBERED or self._early_releases > MAX_EARLY:
            _, forgotten = self._early.popitem(last=False)
            self._early_releases -= len(forgotten)
            self._problems[FORGOTTEN] += 1

    def _note_engine(self, lease: _Lease, engine: str) -> None:
        if engine not in lease.seen_engines:
            if lease.seen_engines:
                self._problems[OTHER_ENGINE] += 1
            if len(lease.seen_engines) < MAX_ENGINES:
                lease.seen_engines += (engine,)

    def _expire(self, now: float) -> dict[str, str]:
        if now < self._earliest_deadline:
            return {}
        expired = {
            p_request: self._note(lease, now)
            for p_request, lease in self._held.items()
            if lease.deadline <= now
        }
        for p_request in expired:
            self._end(p_request, self._held[p_request], "")
        self._earliest_deadline = min(
            (lease.deadline for lease in self._held.values()), default=float("inf")
        )
        return expired

    def _note(self, lease: _Lease, now: float) -> str:
        held = f"held for {now - lease.pinned_at:.1f} s"
        if not lease.seen_engines:
            return f"{held}, no reader was heard of"
        silent = now - (lease.deadline - self._lease_seconds)
        readers = ", ".join(shorten(engine) for engine in sorted(lease.seen_engines)[:3])
        return f"{held}, last renewed {silent:.1f} s ago by {readers}"

    def _end(self, p_request: str, lease: _Lease, engine: str) -> None:
        self._board.end(lease.sequence)
        del self._held[p_request]
        self._ends[p_request] = lease.sequence, engine
        if len(self._ends) > MAX_REMEMBERED:
            self._ends.popitem(last=False)


class LeaseKey(NamedTuple):
    """One prefill of one P engine, as D names it. ``sequence`` makes it unique over time.

    ``seal``: of the offer. One that was made up is another prefill than the one it names.
    """

    engine_id: str
    p_request: str
    sequence: int
    seal: str = ""


@dataclasses.dataclass
class _Want:
    users: set[str]
    lease_seconds: float
    renew_due_at: float


class ConsumerLeases:
    """P requests that one D engine still wants; `now` is given. Not thread-safe."""

    def __init__(self) -> None:
        self._wants: dict[LeaseKey, _Want] = {}
        self._released: collections.OrderedDict[LeaseKey, None] = collections.OrderedDict()
        self._earliest_due = float("inf")

    def __repr__(self) -> str:
        return f"ConsumerLeases(wanted={len(self._wants)}, released={len(self._released)})"

    @property
    def wanted(self) -> int:
        return len(self._wants)

    def acquire(self, key: LeaseKey, d_request: str, lease_seconds: float, now: float) -> bool:
        """``d_request`` uses this prefill from now on; its first renewal is due at once.

        False: this engine has already released it, P's blocks may be gone, the load must fail.
        """
        if lease_seconds <= 0:
            raise StateError("lease_seconds", "above 0", lease_seconds)
        if key in self._released:
            return False
        want = self._wants.get(key)
        if want is None:
            self._wants[key] = _Want({d_request}, lease_seconds, now)
            self._earliest_due = min(self._earliest_due, now)
        else:
            want.users.add(d_request)
        return True

    def renewals(self, now: float) -> dict[str, tuple[str, ...]]:
        """Renewals due now, P engine -> request ids. They count as sent: send them."""
        if now < self._earliest_due:
            return {}
        due: dict[str, list[str]] = {}
        for key, want in self._wants.items():
            if want.renew_due_at <= now:
                want.renew_due_at = now + want.lease_seconds / RENEWALS_PER_LEASE
                due.setdefault(key.engine_id, []).append(key.p_request)
        self._earliest_due = min(
            (want.renew_due_at for want in self._wants.values()), default=float("inf")
        )
        return {engine_id: tuple(requests) for engine_id, requests in due.items()}

    def is_wanted(self, key: LeaseKey) -> bool:
        return key in self._wants

    def wants_of(self, engine_id: str) -> bool:
        """Is any prefill of this P engine wanted?"""
        return any(key.engine_id == engine_id for key in self._wants)

    def drop(self, key: LeaseKey, d_request: str) -> bool:
        """``d_request`` is done with it (read, failed or aborted).

        True exactly once per prefill, when its last user is gone: release it on every P rank.
        """
        want = self._wants.get(key)
        if want is None or d_request not in want.users:
            return False
        want.users.discard(d_request)
        if want.users:
            return False
        del self._wants[key]
        self._released[key] = None
        if len(self._released) > MAX_REMEMBERED:
            self._released.popitem(last=False)
        return True

    def forget(
        self, engine_id: str, d_requests: Collection[str] | None = None
    ) -> tuple[tuple[LeaseKey, str], ...]:
        """The P engine is gone, for these D requests or for all: drop their prefills of it; returns
        (key, D request) of each user that was dropped."""
        dropped: list[tuple[LeaseKey, str]] = []
        for key in [key for key in self._wants if key.engine_id == engine_id]:
            users = self._wants[key].users
            gone = sorted(users if d_requests is None else users.intersection(d_requests))
            dropped.extend((key, user) for user in gone)
            users.difference_update(gone)
            if not users:
                del self._wants[key]
                self._released[key] = None
        while len(self._released) > MAX_REMEMBERED:
            self._released.popitem(last=False)
        return tuple(dropped)
