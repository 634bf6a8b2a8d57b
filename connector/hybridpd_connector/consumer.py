"""One D rank: the reads it makes, and when. Which prefills it wants is kept by ``wants``.

A load waits until its peer is ready (with a deadline), is read once, and is reported once:

    ordered --peer ready--> reading --outcome--> reported
       |                       |--late, abandoned--> reported --outcome--> landed
       |---- refused, peer refused, deadline, abort ----^

A read that outlasts its deadline is told of; once its blocks are held (see ``held_blocks``) its
load is abandoned: reported as failed while it goes on, and told of again when it has ended.

The engine's thread gives orders and polls; a ticker thread calls ``renew``. One lock keeps them
apart; nothing that holds it waits for a peer, so neither can the engine.
"""

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterable, Mapping

from hybridpd_connector import stats
from hybridpd_connector.agent_api import Agent
from hybridpd_connector.errors import RefusedError, VersionError
from hybridpd_connector.failure_reasons import join
from hybridpd_connector.lease_board import BoardCheck
from hybridpd_connector.loading import Loading, moved, read_request
from hybridpd_connector.meetings import Meetings
from hybridpd_connector.metadata import NOTHING_ENDED, Interest, LateReads, Load
from hybridpd_connector.mispredictions import Mispredictions
from hybridpd_connector.peer_link import LinkBuilder, LocalCache, PeerLink
from hybridpd_connector.peer_state import PeerState
from hybridpd_connector.peers import Address, PeerManager
from hybridpd_connector.seals import is_sealed
from hybridpd_connector.tail_zeros import Tail, TailZeros
from hybridpd_connector.transfers import (
    ABORTED,
    DEADLINE,
    READ_FAILED,
    Outcome,
    SourceRead,
    Transfers,
)
from hybridpd_connector.verifier import Verifier
from hybridpd_connector.wants import PEER_REFUSED, Wants
from hybridpd_geometry import GeometryError

PEER_UNREACHABLE = "peer_unreachable"
BAD_BLOCKS = "bad_blocks"
CHANGED_PARAMS = "changed_params"
UNKNOWN_REQUEST = "unknown_request"
NOTHING_LATE = LateReads()


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Seconds. ``handshake``: how long a load waits for its peer; ``attempt``: how long one
    question to it may take; ``read``: how long a posted read may take before its peer is given up.
    """

    handshake: float = 30.0
    attempt: float = 5.0
    read: float = 60.0


@dataclasses.dataclass(frozen=True)
class ReadTools:
    """What a rank reads with. ``verifier`` compares checksums, None when they are off."""

    builder: LinkBuilder
    transfers: Transfers
    verifier: Verifier | None = None


class ConsumerRank:
    """See the module."""

    def __init__(
        self,
        local: LocalCache,
        agent: Agent,
        tools: ReadTools,
        recorder: stats.Stats,
        timeouts: Timeouts,
        progress: Callable[[], object],
    ) -> None:
        """``progress`` moves the agent's connections along while nothing polls."""
        self._local = local
        self._agent = agent
        self._builder = tools.builder
        self._transfers = tools.transfers
        self._verifier = tools.verifier
        self._stats = recorder
        self._timeouts = timeouts
        self._progress = progress
        self._lock = threading.RLock()
        self._peers: PeerManager[PeerLink] = PeerManager(self._shake_hands, self._discard)
        self._wants = Wants(local, agent, self._peers)
        self._loading: dict[str, Loading] = {}
        self._waiting: dict[str, Loading] = {}
        self._tail_zeros = TailZeros(local.layout, local.placement)
        self._tails: list[Tail] = []
        self._received: set[str] = set()
        self._failed: dict[str, str] = {}
        self._mispredictions = Mispredictions()
        self._late: set[str] = set()
        self._landed: list[str] = []
        self._refusals: queue.SimpleQueue[tuple[str, Address, str]] = queue.SimpleQueue()

    def absorb(self, interests: Iterable[Interest], leaves: Iterable[str], now: float) -> None:
        """Requests that have arrived, and requests that need their prefill no longer."""
        with self._lock:
            for interest in interests:
                self._wants.arrive(interest, now)
            for request_id in leaves:
                self._wants.let_go(request_id, now)

    def abort(self, request_ids: Iterable[str], now: float) -> None:
        """Requests that ended while loading. One that is not read yet ends at once."""
        with self._lock:
            for request_id in request_ids:
                loading = self._loading.get(request_id)
                if loading is None:
                    continue
                if loading.link is None:
                    self._end(loading, ABORTED, now)
                else:
                    self._transfers.abort(request_id)

    def abandon(self, request_ids: Iterable[str], now: float) -> None:
        """Loads that are late on some rank, and whose blocks are held: report them as failed."""
        with self._lock:
            for request_id in request_ids:
                loading = self._loading.get(request_id)
                if loading is None:
                    self._landed.append(request_id)
                    continue
                loading.abandoned = True
                if loading.link is None:
                    self._fail(loading, DEADLINE, "another rank's read", now)
                else:
                    self._report(loading, self._told(loading, DEADLINE, "", now), now)

    def order(self, loads: Iterable[Load], now: float) -> None:
        """Loads that ``start`` will post; refused ones end here."""
        with self._lock:
            for load in loads:
                self._begin(load, now)

    def start(self, now: float) -> None:
        """Post the reads whose peer is ready; the others wait."""
        with self._lock:
            self._collect(now)
            for loading in [*self._waiting.values()]:
                self._try_post(loading, now)
            if self._tails:
                # While the bytes are on their way: no read touches what is zeroed here.
                self._local.zero(self._tails)
                self._tails = []
            self._wants.drop_left(now)

    def look(self, now: float) -> bool:
        """One look at the reads. True: another look in this very step may see one end."""
        with self._lock:
            self._finish(self._transfers.poll(now), now)
            if self._verifier is None:
                return self._transfers.hopeful
            self._take_verdicts(self._verifier, now)
            return self._transfers.hopeful or self._verifier.hopeful(now)

    def report(self, now: float) -> tuple[frozenset[str], Mapping[str, str]]:
        """(requests whose load ended, reasons of those that failed), each named once. A reason may
        have a detail, see ``failure_reasons``."""
        with self._lock:
            self._give_up_overdue(now)
            if self._verifier is not None:
                self._verifier.end_step()
            if not self._received:  # every failed one is also in there
                return NOTHING_ENDED
            received, failed = frozenset(self._received), self._failed
            self._received, self._failed = set(), {}
            return received, failed

    def take_late(self) -> LateReads:
        """Late reads and abandoned loads that have landed, since the last call."""
        with self._lock:
            if not self._late and not self._landed:
                return NOTHING_LATE
            late, landed, self._late, self._landed = self._late, self._landed, set(), []
            return LateReads(frozenset(late), tuple(landed))

    def renew(self, now: float, stall: str = "") -> None:
        """Send the renewals that are due; called by the ticker, whatever the engine is doing.
        ``stall``: why none are to be sent, see ``stalls``."""
        with self._lock:
            if self._wants.idle(now):
                return
            self._collect(now)
            self._wants.drop_left(now)
            self._wants.send_due(now, stall)
            self._progress()

    def attend(self, meetings: Meetings, now: float) -> None:
        """Keep the peers that are named ahead of requests; called by the ticker."""
        with self._lock:
            self._collect(now)
            meetings.attend(self._peers, now)
            # What a handshake has begun to say to ranks that are not read from leaves with this.
            self._progress()

    def _shake_hands(self, engine_id: str, address: Address) -> PeerLink:
        """On a handshake thread. A refusal is noted apart from the peer book: there the engine may
        have been replaced already by the one that lives at its address now."""
        try:
            return self._builder.build(engine_id, address)
        except (RefusedError, VersionError) as error:
            if isinstance(error, VersionError) or not error.retryable:
                self._refusals.put((engine_id, address, str(error)))
            raise

    def _collect(self, now: float) -> None:
        """Take what handshakes brought."""
        self._peers.collect(now)
        while not self._refusals.empty():
            self._wants.give_up(*self._refusals.get_nowait())

    @property
    def waiting(self) -> bool:
        """Is any load not posted yet?"""
        return bool(self._waiting)

    @property
    def reading(self) -> bool:
        """Is any read in flight?"""
        with self._lock:
            checks = self._verifier.in_flight if self._verifier else 0
            return self._transfers.in_flight + checks > 0

    def gauges(self) -> dict[str, int]:
        """Peers by state."""
        with self._lock:
            return self._peers.counts()

    def close(self) -> None:
        with self._lock:
            self._peers.close()

    def _begin(self, order: Load, now: float) -> None:
        want = self._wants.find(order.request_id)
        # An id that comes again while a late read of its first life goes on: vLLM makes none.
        again = order.request_id in self._loading
        if order.refusal or want is None or again:
            self._received.add(order.request_id)
            self._failed[order.request_id] = order.refusal or UNKNOWN_REQUEST
            self._wants.let_go(order.request_id, now)
            return
        loading = Loading(order, want, now + self._timeouts.handshake)
        self._loading[order.request_id] = self._waiting[order.request_id] = loading
        if want.refusal:
            self._fail(loading, want.refusal, want.detail, now)

    def _try_post(self, loading: Loading, now: float) -> None:
        want = loading.want
        if want.refusal:
            self._fail(loading, want.refusal, want.detail, now)
            return
        verdict = self._peers.want(want.key.engine_id, want.address, now)
        if verdict.state is PeerState.READY and verdict.value is not None:
            self._post(loading, verdict.value, now)
        elif verdict.state is PeerState.REFUSED:
            self._fail(loading, PEER_REFUSED, verdict.reason, now)
        elif now >= loading.deadline:
            self._fail(loading, PEER_UNREACHABLE, verdict.reason, now)

    def _post(self, loading: Loading, link: PeerLink, now: float) -> None:
        order, remote = loading.order, loading.want.remote
        if not is_sealed(link.seal_key, remote):
            self._fail(loading, CHANGED_PARAMS, "not what that engine has offered", now)
            return
        loading.want.sealed = True
        request = read_request(loading)
        reads: list[SourceRead] = []
        try:
            for source in link.sources:
                ranges, size = source.ranges.of(request)
                loading.predicted_bytes += size
                loading.predicted_descriptors += len(ranges)
                check = BoardCheck(source.board, remote.sequence)
                reads.append(SourceRead(source.peer, source.local, source.remote, ranges, check))
        except GeometryError as error:
            self._fail(loading, BAD_BLOCKS, str(error), now)
            return
        del self._waiting[order.request_id]
        loading.link, loading.read_by = link, now + self._timeouts.read
        self._transfers.submit(order.request_id, reads, loading.read_by)
        self._stats.observe(stats.QUEUE_SECONDS, now - loading.want.arrived_at)
        self._tails += self._tail_zeros.of(remote.tokens, order.block_ids)

    def _finish(self, outcomes: Iterable[Outcome], now: float) -> None:
        """Loads whose reads have ended."""
        loads: list[stats.Moved] = []
        verifier = self._verifier
        for outcome in outcomes:
            loading = self._loading[outcome.request]
            if outcome.reason or (link := loading.link) is None:
                self._finish_bad(outcome, loading, now)
                continue
            load = moved(loading, outcome)
            loads.append(load)
            if load[0] != load[2] and load[0]:  # 0: the library could not say
                self._stats.count(stats.MISPREDICTED_LOADS)
                self._mispredictions.tell(outcome.request, link.engine_id, load[:2], load[2:4])
            if verifier is not None and verifier.looks_at(sequence := loading.want.key.sequence):
                request = read_request(loading)
                if verifier.begin(outcome.request, link, request, sequence, now):
                    continue
            if loading.reported:
                self._end(loading, "", now)
            else:  # the same of most of them, in fewer calls
                del self._loading[outcome.request]
                self._received.add(outcome.request)
                self._wants.let_go(outcome.request, now)
        if loads:
            self._stats.loads(loads)

    def _finish_bad(self, outcome: Outcome, loading: Loading, now: float) -> None:
        if outcome.peer_broken and loading.link is not None:
            self._lose(loading.link, outcome.reason)
        detail = " ".join(filter(None, (outcome.peer, outcome.detail)))
        self._fail(loading, outcome.reason or READ_FAILED, detail, now)

    def _take_verdicts(self, verifier: Verifier, now: float) -> None:
        """Loads whose checksums were compared."""
        for verdict in verifier.poll(now):
            loading = self._loading[verdict.request_id]
            if verdict.reason:
                self._fail(loading, verdict.reason, verdict.detail, now)
            else:
                self._end(loading, "", now)

    def _fail(self, loading: Loading, reason: str, detail: str, now: float) -> None:
        self._end(loading, self._told(loading, reason, detail, now), now)

    def _told(self, loading: Loading, reason: str, detail: str, now: float) -> str:
        """What this rank knows; the scheduler's side writes the line, once for all ranks."""
        waited = f"rank {self._local.placement.rank} after {now - loading.want.arrived_at:.1f} s"
        return join(reason, ", ".join(filter(None, (waited, detail))))

    def _end(self, loading: Loading, reason: str, now: float) -> None:
        """The load is over and no byte of it can be written any more."""
        request_id = loading.order.request_id
        del self._loading[request_id]
        self._waiting.pop(request_id, None)
        if not loading.reported:
            self._report(loading, reason, now)
        if loading.abandoned:
            self._landed.append(request_id)

    def _report(self, loading: Loading, reason: str, now: float) -> None:
        """What vLLM is to know, once, and what P is to know."""
        request_id = loading.order.request_id
        loading.reported = True
        self._received.add(request_id)
        if reason:
            self._failed[request_id] = reason
        self._wants.let_go(request_id, now)

    def _give_up_overdue(self, now: float) -> None:
        overdue = frozenset(self._transfers.overdue(now))
        if not overdue:
            return
        # The link that such a read uses, and not its successor, which may be good.
        late: dict[str, PeerLink] = {}
        for request_id, item in self._loading.items():
            if item.link is None or item.read_by > now:
                continue
            if overdue.intersection(item.link.peers):
                late[item.link.engine_id] = item.link
            if not item.late and self._transfers.is_in_flight(request_id):
                item.late = True
                self._late.add(request_id)
        ready = self._peers.ready()
        for engine_id, link in late.items():
            if ready.get(engine_id) is link:
                self._peers.lost(engine_id, "a read did not end in time")

    def _lose(self, link: PeerLink, reason: str) -> None:
        """Drop the peer, unless that was done: every read of a broken link ends with this, and
        must not end the handshake, or the new link, that has followed it."""
        if self._peers.ready().get(link.engine_id) is link:
            self._peers.lost(link.engine_id, reason)

    def _discard(self, link: PeerLink) -> bool:
        """Give a dropped link back, once none of its reads is in flight."""
        if any(loading.link is link for loading in self._loading.values()):
            return False
        if self._verifier is not None and self._verifier.uses(link):
            return False
        self._builder.take_apart(link)
        return True
