"""The worker half of one rank: both sides of the transfer behind the calls of vLLM's runner.

``absorb`` takes a step's orders before the model runs, ``start_loads`` posts reads after the model
was launched, ``poll`` reports. Nothing here imports vLLM or waits for a peer.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hybridpd_connector import stats
from hybridpd_connector.agent_api import Agent, Memory, MemoryRegion
from hybridpd_connector.consumer import ConsumerRank, ReadTools, Timeouts
from hybridpd_connector.failure_reasons import LEASE_EXPIRED, join
from hybridpd_connector.handshake import Asker, HostFacts, RankHello, who_is_there
from hybridpd_connector.lease_board import BoardReader, LeaseBoard
from hybridpd_connector.leases import ProducerLeases
from hybridpd_connector.link_probe import LinkProber, Scratch
from hybridpd_connector.link_watch import LinkRules, LinkWatch
from hybridpd_connector.meetings import Meetings
from hybridpd_connector.metadata import (
    NO_RESULTS,
    NOTHING_ENDED,
    LateReads,
    Pin,
    StepOrders,
    TransferResults,
)
from hybridpd_connector.named_peers import PeerName
from hybridpd_connector.notifications import decode_all
from hybridpd_connector.patience import Patience
from hybridpd_connector.peer_link import LinkBuilder, LocalCache
from hybridpd_connector.peers import Address
from hybridpd_connector.progress import Pump
from hybridpd_connector.stalls import Progress
from hybridpd_connector.sum_board import SumBoard, Summer, SumReader
from hybridpd_connector.tail_zeros import Tail
from hybridpd_connector.transfers import Transfers
from hybridpd_connector.verifier import Verifier
from hybridpd_geometry import CacheLayout, RankPlacement

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RankCache:
    """This rank's cache. ``zero``: tails of requests, in order with the engine's work.
    ``scratch``: memory of the same kind, for waking links up; without it that is left out.
    ``summer`` sums it; None where nothing does, then no checksums are stated or compared.
    """

    layout: CacheLayout
    placement: RankPlacement
    regions: tuple[MemoryRegion, ...]
    zero: Callable[[Iterable[Tail]], None]
    scratch: Scratch | None = None
    summer: Summer | None = None

    @property
    def memory(self) -> Memory:
        return self.regions[0].memory


@dataclasses.dataclass(frozen=True)
class RankSettings:
    """Seconds, and who this rank is. ``role``: producer, consumer or both.

    ``step_wait_seconds``: how long a step may wait for reads it has just begun, in all.
    ``checksum_every``: every n-th prefill is summed and compared, 0 for none;
    ``checksum_required``: a load that cannot be compared is not used.
    ``prefill_peers``: where engines live that are met before a request names them.
    """

    engine_id: str
    role: str
    lease_seconds: float
    poll_interval_seconds: float
    renew_interval_seconds: float
    timeouts: Timeouts
    host: HostFacts = dataclasses.field(default_factory=HostFacts)
    require_fast_link: bool = False
    step_wait_seconds: float = 0.0
    checksum_every: int = 0
    checksum_required: bool = False
    prefill_peers: tuple[PeerName, ...] = ()


class Ticker:
    """Calls ``tick`` every ``interval_seconds`` on a thread of its own until ``close``.

    ``prepare`` runs first on that thread: a tick moves reads along, and a GPU needs its device set.
    """

    def __init__(
        self,
        tick: Callable[[], None],
        interval_seconds: float,
        name: str,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._prepare = prepare
        self._tick = tick
        self._interval_seconds = interval_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop and wait for the last tick. Idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        self._try(self._prepare)
        while not self._stop.wait(self._interval_seconds):
            self._try(self._tick)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            # Without renewals every lease is lost, silently: go on, whatever it was.
            logger.exception("%s: tick failed, going on", threading.current_thread().name)


class ProducerRank:
    """One P rank: the leases of its prefills, and the progress that readers need of it."""

    def __init__(self, agent: Agent, settings: RankSettings, cache: RankCache) -> None:
        self.board = LeaseBoard()
        agent.register([self.board.region()])
        self.sums: SumBoard | None = None
        if settings.checksum_every and cache.summer is not None:
            self.sums = SumBoard(cache.summer, cache.layout, settings.checksum_every)
            agent.register([self.sums.region()])
        self._leases = ProducerLeases(settings.lease_seconds, self.board)
        self._pump = Pump(agent, settings.poll_interval_seconds)

    @property
    def held(self) -> int:
        return self._leases.held

    def pin(self, pins: Iterable[Pin], now: float) -> None:
        for request_id, sequence, tokens, block_ids in pins:
            self._leases.pin(request_id, sequence, now)
            if self.sums is not None:
                self.sums.state(sequence, tokens, block_ids)

    def poll(self, now: float) -> tuple[frozenset[str], Mapping[str, str]]:
        """(requests whose lease ended, reasons of those that expired). Notifications count before
        anything expires."""
        arrived = self._pump.take()
        if not arrived and self._leases.quiet(now):
            return NOTHING_ENDED
        received = decode_all(arrived)
        if received.errors:
            count, first = len(received.errors), received.errors[0]
            logger.warning("%d messages from readers ignored; the first: %s", count, first)
        ended = self._leases.tick(received.messages, now)
        for reason, count in ended.problems.items():
            logger.warning("readers: %s (%d times)", reason, count)
        expired = {name: join(LEASE_EXPIRED, note) for name, note in ended.notes.items()}
        return frozenset(ended.released) | frozenset(ended.expired), expired

    def close(self) -> None:
        self._pump.close()


class WorkerHalf:
    """One rank: a producer side, a consumer side, or both, over one agent."""

    def __init__(
        self,
        cache: RankCache,
        agent: Agent,
        asker: Asker,
        settings: RankSettings,
        prepare_thread: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._agent = agent
        self._asker = asker
        self._prepare_thread = prepare_thread
        self._clock = clock
        self._stats = stats.Stats()
        self._step = 0
        self._progress = Progress(settings.timeouts.read, clock())
        self._step_wait_seconds = settings.step_wait_seconds
        self._refused: dict[str, str] = {}
        self._peers: dict[str, int] = {}
        self._told_peers = self._peers
        agent.register(cache.regions)
        self._producer: ProducerRank | None = None
        self._consumer: ConsumerRank | None = None
        self._ticker: Ticker | None = None
        self._links: LinkWatch | None = None
        self._meetings: Meetings | None = None
        self._host = settings.host
        if settings.role in ("producer", "both"):
            self._producer = ProducerRank(agent, settings, cache)
        if settings.role in ("consumer", "both"):
            self._consumer = self._build_consumer(asker, settings, prepare_thread)
            if settings.prefill_peers:
                self._meetings = _build_meetings(asker, settings)
            self._ticker = Ticker(
                self.renew, settings.renew_interval_seconds, "hybridpd-renewals", prepare_thread
            )

    def _build_consumer(
        self, asker: Asker, settings: RankSettings, prepare_thread: Callable[[], None]
    ) -> ConsumerRank:
        cache = self._cache
        local = LocalCache(
            settings.engine_id, cache.layout, cache.placement, cache.memory, cache.zero
        )
        boards = BoardReader(self._agent)
        sums = verifier = None
        if settings.checksum_every and cache.summer is not None:
            sums = SumReader(self._agent, required=settings.checksum_required)
            verifier = Verifier(
                sums, cache.summer, cache.placement, settings.checksum_every, self._stats
            )
        builder = LinkBuilder(
            local, self._agent, boards, asker, settings.timeouts.attempt, prepare_thread, sums
        )
        if cache.scratch is not None:
            rules = LinkRules(settings.timeouts.handshake, require_fast=settings.require_fast_link)
            prober = LinkProber(self._agent, builder.uses, cache.scratch)
            self._links = LinkWatch(prober, settings.host, rules, prepare_thread, self._clock)
            builder.watch = self._links
        return ConsumerRank(
            local,
            self._agent,
            ReadTools(
                builder,
                Transfers(self._agent, boards, Patience(settings.step_wait_seconds)),
                verifier,
            ),
            self._stats,
            settings.timeouts,
            # A producer's pump does it, and owns what arrives.
            (lambda: None) if self._producer else self._agent.take_notifications,
        )

    def hello(self) -> RankHello:
        """What readers must know of this rank; the board of a pure consumer is never asked."""
        board = self._producer.board if self._producer else None
        sums = self._producer.sums if self._producer else None
        return RankHello(
            rank=self._cache.placement.rank,
            placement=self._cache.placement.to_dict(),
            agent_metadata=self._agent.metadata(),
            board_address=board.address if board else 0,
            board_slots=board.slots if board else 1,
            host=self._host,
            sums_address=sums.address if sums else 0,
            sums_slots=sums.slots if sums else 1,
            sums_every=sums.every if sums else 0,
        )

    def warmed_up(self) -> None:
        """The engine runs no trial steps any more: peers may be met. Idempotent."""
        if self._meetings is not None:
            self._meetings.begin()

    @property
    def layout(self) -> CacheLayout:
        return self._cache.layout

    @property
    def reading(self) -> bool:
        """Is any read in flight?"""
        return self._consumer is not None and self._consumer.reading

    def peers(self) -> dict[str, int]:
        """Remote engines by state."""
        return self._consumer.gauges() if self._consumer else {}

    def absorb(self, orders: StepOrders) -> None:
        """Everything of a step but its loads. The same step may come twice; it counts once."""
        if orders.step <= self._step:
            return
        self._step = orders.step
        self.warmed_up()
        now = self._clock()
        self._progress.stepped(now, moved=bool(orders.pins or orders.loads))
        if self._producer is not None:
            self._producer.pin(orders.pins, now)
        if self._consumer is not None:
            self._consumer.absorb(orders.interests, orders.leaves, now)
            self._consumer.abort(orders.aborts, now)
            self._consumer.order(orders.loads, now)
            self._consumer.abandon(orders.abandons, now)
        else:
            self._refused.update((load.request_id, load.refusal) for load in orders.loads)

    def start_loads(self) -> None:
        """Post the reads that were ordered and whose peer is ready."""
        if self._consumer is not None:
            self._consumer.start(self._clock())

    def renew(self) -> None:
        """Send the renewals that are due, and count the peers for ``take_stats``. The ticker's
        work; harmless at any other time."""
        if self._consumer is not None:
            now = self._clock()
            holding = self._producer is not None and self._producer.held > 0
            self._consumer.renew(now, self._progress.stall(now, holding=holding))
            if self._meetings is not None:
                self._meetings.tick(self._clock())
                self._consumer.attend(self._meetings, self._clock())
            self._peers = self._consumer.gauges()
        if self._links is not None:
            self._links.tick()

    def poll(self, *, ended: bool = False) -> tuple[TransferResults, dict[str, str]]:
        """What ended since the last call, and why loads failed and leases expired. One pass.
        ``ended``: requests of any kind have, in this engine."""
        now = self._clock()
        self._progress.stepped(now, moved=ended)
        (sent, expired), (received, reasons) = NOTHING_ENDED, NOTHING_ENDED
        if self._refused:
            received, reasons, self._refused = frozenset(self._refused), self._refused, {}
        if self._producer is not None:
            sent, expired = self._producer.poll(now)
        if self._consumer is not None:
            if self._consumer.waiting:
                self._consumer.start(now)
            received, reasons = self._consumer.report(self._look(self._consumer, now))
        if not (sent or received or reasons or expired):
            return NO_RESULTS, {}
        return TransferResults(sent, received, frozenset(reasons)), {**expired, **reasons}

    def take_late(self) -> LateReads:
        """Late reads and abandoned loads that have landed, up to the last ``poll``."""
        return self._consumer.take_late() if self._consumer is not None else LateReads()

    def _look(self, consumer: ConsumerRank, begun: float) -> float:
        """Reads begun in this step may end in it: their requests then run in the next one.

        When the last look was.
        """
        now = begun
        while consumer.look(now) and now - begun < self._step_wait_seconds:
            # Lets the other threads of this process have the interpreter.
            time.sleep(0)
            now = self._clock()
        return now

    def take_stats(self) -> dict[str, Any] | None:
        """``Stats`` data since the last call; None when nothing has happened."""
        peers = self._peers  # the ticker may set it meanwhile
        if peers != self._told_peers:
            self._told_peers = peers
            self._stats.set_peers(peers)
        if self._links is not None:
            self._stats.set_links(self._links.take_changes())
        return None if self._stats.is_empty() else self._stats.take()

    def close(self) -> None:
        """Stop threads, then end transfers, then the agent. Idempotent.

        No question and no probe is waited for: what is on its way is ended.
        """
        self._prepare_thread()
        if self._ticker is not None:
            self._ticker.close()
        if self._meetings is not None:
            self._meetings.close()
        if self._links is not None:
            self._links.close()
        self._asker.hang_up()
        if self._consumer is not None:
            self._consumer.close()
        if self._producer is not None:
            self._producer.close()
        self._agent.close()


def _build_meetings(asker: Asker, settings: RankSettings) -> Meetings:
    ours = settings.engine_id

    def ask(address: Address) -> str:
        return who_is_there(
            asker, address, our_engine_id=ours, timeout_seconds=settings.timeouts.attempt
        )

    # An engine's id is its configured name with a part of its own behind it.
    both = settings.role == "both"
    return Meetings(
        settings.prefill_peers,
        ask,
        lambda named: both and ours in (named, named.rpartition("-")[0]),
    )
