"""Remote P engines as one D rank sees them: who is ready, who is being asked, who is left alone.

``peer_state`` has the states. An evicted peer is gone from the book; what its handshake made (agent
entries, prepared lists) is handed to ``discard`` until it is given back. A result that arrives for
a peer that was evicted meanwhile is discarded too: every attempt has a number.

``PeerBook`` decides and is pure. ``PeerManager`` adds the threads: one handshake per peer at a
time, on a small bounded pool, so that one dead peer does not delay the others; nothing in it waits.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from hybridpd_connector.errors import ConnectorError, RefusedError, StateError, VersionError
from hybridpd_connector.handshake_pool import Ended, HandshakePool
from hybridpd_connector.peer_state import TRANSITIONS, PeerEvent, PeerState

logger = logging.getLogger(__name__)

V = TypeVar("V")

_STATES = tuple(state.value for state in PeerState)
MAX_ADDRESSES = 8
"""Silent addresses of one engine that are tried without a pause. Some may be made up."""
MAX_TRIED = 64
"""Addresses of one engine that are remembered as tried."""


class Address(NamedTuple):
    """Where a peer's side channel listens."""

    host: str
    port: int


@dataclasses.dataclass(frozen=True)
class PeerLimits:
    """Bounds of a peer book. Pauses double from the first to the longest."""

    max_peers: int = 512
    max_handshakes: int = 512
    first_pause_seconds: float = 1.0
    longest_pause_seconds: float = 30.0
    refused_pause_seconds: float = 30.0
    idle_seconds: float = 600.0


@dataclasses.dataclass
class _Peer(Generic[V]):
    engine_id: str
    address: Address
    state: PeerState = PeerState.UNKNOWN
    value: V | None = None
    attempt: int = 0
    failures: int = 0
    failed_at: float = 0.0
    retry_at: float = 0.0
    used_at: float = 0.0
    reason: str = ""
    idle_seconds: float | None = None
    tried: set[Address] = dataclasses.field(default_factory=set)

    def move(self, event: PeerEvent) -> None:
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise StateError(
                f"peer {self.engine_id}", f"an event allowed in {self.state.value}", event.value
            )
        self.state = following

    def state_at(self, address: Address) -> PeerState:
        if self.state is PeerState.REFUSED and self.address != address:
            # Whoever lives there is another engine; this one may live where it is asked for.
            return PeerState.BACKING_OFF
        return self.state


class Verdict(NamedTuple, Generic[V]):
    """How a peer stands for a request that wants it.

    READY: ``value`` is usable. HANDSHAKING: wait. BACKING_OFF, REFUSED: ``reason`` says why; fail
    the request or wait for ``retry_at``. ``attempt``: set when the caller must start a handshake.
    ``crowded``: it would be set, but too many others run or wait.
    """

    state: PeerState
    value: V | None = None
    reason: str = ""
    retry_at: float = 0.0
    attempt: int | None = None
    crowded: bool = False


class PeerBook(Generic[V]):
    """All peers of one rank, by engine id. Pure: ``now`` is an argument. Not thread-safe."""

    def __init__(self, limits: PeerLimits) -> None:
        self._limits = limits
        self._peers: dict[str, _Peer[V]] = {}
        self._discarded: list[V] = []
        self._attempts = 0
        self.evicted = 0

    def __repr__(self) -> str:
        states = ", ".join(f"{state}={n}" for state, n in self.counts().items() if n)
        return f"PeerBook({states})"

    def want(self, engine_id: str, address: Address, now: float, running: int = 0) -> Verdict[V]:
        """A request needs this engine. Starts a handshake when one is due (``attempt`` set), unless
        too many are ``running``. An engine id names one process: while it is ready or is being
        asked, another address for it changes nothing.
        """
        crowded = running >= self._limits.max_handshakes
        peer = self._peers.get(engine_id)
        if crowded and peer is None:
            reason = f"{running} handshakes are running"
            return Verdict(PeerState.BACKING_OFF, reason=reason, crowded=True)
        if peer is None:
            self._make_room()
            peer = self._peers[engine_id] = _Peer(engine_id, address)
        peer.used_at = now
        attempt = None
        waiting = peer.state in (PeerState.BACKING_OFF, PeerState.REFUSED)
        # An address of its own does not wait for the pauses that others have earned.
        few = peer.failures < MAX_ADDRESSES
        new = address not in peer.tried and (
            few or now >= peer.failed_at + self._limits.first_pause_seconds
        )
        due = peer.state is PeerState.UNKNOWN or (waiting and (new or peer.retry_at <= now))
        if due and not crowded:
            peer.move(PeerEvent.START)
            peer.address = address
            if len(peer.tried) >= MAX_TRIED:
                peer.tried.clear()
            peer.tried.add(address)
            self._attempts += 1
            attempt = peer.attempt = self._attempts
        return Verdict(
            peer.state_at(address),
            peer.value,
            peer.reason,
            peer.retry_at,
            attempt,
            crowded=due and crowded,
        )

    def succeeded(self, engine_id: str, attempt: int, value: V) -> bool:
        """A handshake ended well. False: nobody waits for it any more, its value is discarded.

        Other engines known at the address are evicted: they were replaced.
        """
        peer = self._current(engine_id, attempt)
        if peer is None:
            self._discarded.append(value)
            return False
        peer.move(PeerEvent.SUCCEEDED)
        peer.value, peer.failures, peer.reason = value, 0, ""
        for other in [*self._peers.values()]:
            if other is not peer and other.address == peer.address:
                self._drop(other)
        return True

    def failed(self, engine_id: str, attempt: int, reason: str, now: float) -> None:
        """A handshake failed in a way that a retry may mend: back off, twice as long each time."""
        peer = self._current(engine_id, attempt)
        if peer is None:
            return
        peer.move(PeerEvent.FAILED)
        pause = self._limits.first_pause_seconds * 2 ** min(peer.failures, 30)
        peer.failures += 1
        peer.failed_at = now
        peer.reason = reason
        peer.retry_at = now + min(pause, self._limits.longest_pause_seconds)

    def refused(self, engine_id: str, attempt: int, reason: str, now: float) -> None:
        """A handshake said no (another geometry, version, engine): ask again much later."""
        peer = self._current(engine_id, attempt)
        if peer is None:
            return
        peer.move(PeerEvent.REFUSED)
        peer.reason = reason
        peer.retry_at = now + self._limits.refused_pause_seconds

    def lost(self, engine_id: str) -> bool:
        """A read or a message failed: evict. The next request starts over with a handshake."""
        peer = self._peers.get(engine_id)
        if peer is None:
            return False
        self._drop(peer)
        return True

    def expire(self, now: float) -> tuple[str, ...]:
        """Evict peers that no request wanted for ``idle_seconds``; returns their engine ids."""
        longest = self._limits.idle_seconds
        idle: list[str] = []
        for engine_id, peer in self._peers.items():
            bound = longest if peer.idle_seconds is None else peer.idle_seconds
            if now - peer.used_at >= bound:
                idle.append(engine_id)
        for engine_id in idle:
            self._drop(self._peers[engine_id])
        return tuple(idle)

    def ready(self) -> dict[str, V]:
        """Values of all ready peers by engine id."""
        return {
            engine_id: peer.value
            for engine_id, peer in self._peers.items()
            if peer.state is PeerState.READY and peer.value is not None
        }

    def state(self, engine_id: str, address: Address) -> PeerState:
        """As it is for who wants the engine there. UNKNOWN also of a peer that was evicted."""
        peer = self._peers.get(engine_id)
        return PeerState.UNKNOWN if peer is None else peer.state_at(address)

    def hasten(self, engine_id: str, idle_seconds: float) -> None:
        """From now on the peer goes when it was idle for so long."""
        peer = self._peers.get(engine_id)
        if peer is not None:
            peer.idle_seconds = idle_seconds

    def touch(self, engine_id: str, now: float) -> None:
        """The peer is in use (a read in flight, a lease held): not idle."""
        peer = self._peers.get(engine_id)
        if peer is not None:
            peer.used_at = now

    def counts(self) -> dict[str, int]:
        """Peers by state; "evicted" counts all evictions so far."""
        counts = dict.fromkeys(_STATES, 0)
        for peer in self._peers.values():
            counts[peer.state.value] += 1
        counts[PeerState.EVICTED.value] = self.evicted
        return counts

    def take_discarded(self) -> list[V]:
        """Values to give back, each handed out once."""
        discarded, self._discarded = self._discarded, []
        return discarded

    def _current(self, engine_id: str, attempt: int) -> _Peer[V] | None:
        peer = self._peers.get(engine_id)
        if peer is None or peer.attempt != attempt or peer.state is not PeerState.HANDSHAKING:
            return None
        return peer

    def _drop(self, peer: _Peer[V]) -> None:
        peer.move(PeerEvent.DROPPED)
        del self._peers[peer.engine_id]
        self.evicted += 1
        if peer.value is not None:
            self._discarded.append(peer.value)
            peer.value = None

    def _make_room(self) -> None:
        """The longest unused goes, one that has proved itself last: names can be made up."""
        if len(self._peers) >= self._limits.max_peers:
            ready = PeerState.READY
            self._drop(min(self._peers.values(), key=lambda p: (p.state is ready, p.used_at)))


class PeerManager(Generic[V]):
    """A peer book with its handshake threads. All methods are for the owner's thread; none waits.

    ``handshake(engine_id, address)`` runs on a pool thread and returns the peer's value, or raises:
    ``RefusedError`` (unless retryable) and ``VersionError`` mean refused, others mean failed.
    ``discard(value)`` is called on the owner's thread until it says True: False means that reads of
    this peer are still in flight, and what they use must not be given back yet.
    """

    def __init__(
        self,
        handshake: Callable[[str, Address], V],
        discard: Callable[[V], bool],
        limits: PeerLimits | None = None,
        workers: int = 16,
    ) -> None:
        limits = limits or PeerLimits()
        self._discard = discard
        self._book: PeerBook[V] = PeerBook(limits)
        self._pool = HandshakePool(handshake, workers)
        self._discarding: list[V] = []

    def __repr__(self) -> str:
        return (
            f"PeerManager({self._book!r}, handshakes_running={self._pool.running}, "
            f"discarding={len(self._discarding)})"
        )

    def want(self, engine_id: str, address: Address, now: float) -> Verdict[V]:
        """See ``PeerBook.want``; a due handshake is started on the pool."""
        verdict = self._book.want(engine_id, address, now, self._pool.running)
        last = self._pool.make_room(engine_id, address) if verdict.crowded else None
        if last is not None:
            # Its place is taken at once: whoever asks first in the next step would have it else.
            self._settle(last, now)
            verdict = self._book.want(engine_id, address, now, self._pool.running)
        if verdict.attempt is not None:
            self._pool.start(engine_id, address, verdict.attempt)
        return verdict

    def trust(self, addresses: Iterable[Address]) -> None:
        """Addresses that an operator has named, all of them: their handshakes come first."""
        self._pool.queue.configure(addresses)

    def count_request(self, engine_id: str) -> None:
        """One more request asks for this engine: that decides whose handshake comes first."""
        self._pool.queue.count_request(engine_id)

    def collect(self, now: float) -> tuple[str, ...]:
        """Take what handshakes brought, expire idle peers, discard. Once per step.

        Returns the engine ids whose handshake ended, well or not, since the last call.
        """
        ended: list[str] = []
        for result in self._pool.take_ended():
            ended.append(result.engine_id)
            self._settle(result, now)
        self._book.expire(now)
        self._discard_all()
        return tuple(ended)

    def lost(self, engine_id: str, reason: str) -> None:
        """Evict a peer that failed in use."""
        if self._book.lost(engine_id):
            logger.warning("peer %s dropped: %s", engine_id, reason)
        self._discard_all()

    def ready(self) -> dict[str, V]:
        return self._book.ready()

    def state(self, engine_id: str, address: Address) -> PeerState:
        return self._book.state(engine_id, address)

    def touch(self, engine_id: str, now: float) -> None:
        self._book.touch(engine_id, now)

    def hasten(self, engine_id: str, idle_seconds: float) -> None:
        self._book.hasten(engine_id, idle_seconds)

    def counts(self) -> dict[str, int]:
        return self._book.counts()

    def close(self) -> None:
        """Evict everybody, wait for handshakes that run (bounded by their timeouts), discard."""
        for engine_id in [*self._book.ready()]:
            self._book.lost(engine_id)
        self._discarding.extend(self._pool.close())
        self._discard_all()

    def _settle(self, result: Ended[V], now: float) -> None:
        if result.value is not None:
            self._book.succeeded(result.engine_id, result.attempt, result.value)
            return
        error = result.error
        reason = str(error) if isinstance(error, ConnectorError) else repr(error)
        final = isinstance(error, VersionError) or (
            isinstance(error, RefusedError) and not error.retryable
        )
        if final:
            self._book.refused(result.engine_id, result.attempt, reason, now)
        else:
            self._book.failed(result.engine_id, result.attempt, reason, now)
        logger.warning("handshake with engine %s failed: %s", result.engine_id, reason)

    def _discard_all(self) -> None:
        waiting = self._discarding + self._book.take_discarded()
        if not waiting:
            return
        self._discarding = [value for value in waiting if not self._discarded(value)]

    def _discarded(self, value: V) -> bool:
        try:
            return self._discard(value)
        except ConnectorError as error:
            logger.warning("a dropped peer was not given back cleanly: %s", error)
            return True
