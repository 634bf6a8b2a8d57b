"""What one D rank needs to read from one P engine: made by a handshake, given back when dropped.

``LinkBuilder.build`` runs on a handshake thread and may take seconds: it asks the side channel,
compares both layouts, adds every P rank as a peer (renewals and releases go to all of them),
prepares descriptor lists for those ranks that this rank reads from, and wakes the link up, so that
no request pays for it.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from hybridpd_connector.agent_api import Agent, Memory, PreparedList
from hybridpd_connector.errors import RefusedError, shorten
from hybridpd_connector.handshake import Asker, Hello, RankHello, describe, fetch
from hybridpd_connector.lease_board import BoardReader, BoardView
from hybridpd_connector.link_probe import ProbeTarget
from hybridpd_connector.link_watch import LinkEnd, LinkWatch, Met
from hybridpd_connector.notifications import Renew, encode
from hybridpd_connector.peer_uses import PeerUses
from hybridpd_connector.peers import Address
from hybridpd_connector.read_tables import row_array
from hybridpd_connector.request_ranges import RequestRanges
from hybridpd_connector.sum_board import MODES, SumReader, SumView, mode_of
from hybridpd_connector.tail_zeros import Tail
from hybridpd_geometry import (
    CacheLayout,
    DescriptorTable,
    GeometryError,
    PairPlan,
    RankPlacement,
    SumPair,
    build_table,
    compare,
    plan_pair,
)

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SourceLink:
    """One P rank that this rank reads from. The prepared lists belong to the link."""

    rank: int
    peer: str
    table: DescriptorTable
    ranges: RequestRanges
    local: PreparedList
    remote: PreparedList
    board: BoardView


@dataclasses.dataclass(frozen=True)
class LinkSums:
    """What is needed to compare checksums with a P engine: ``views`` by source rank, and the rate
    at which it states them (0: never, and there are no views)."""

    pair: SumPair
    every: int
    views: Mapping[int, SumView]


@dataclasses.dataclass(frozen=True)
class PeerLink:
    """A P engine as this rank uses it. ``peers``: agent names of all its ranks, in rank order.
    ``met``: what is known of its speed, where that is measured. ``sums`` is None when checksums
    are off here, or cannot be compared. ``seal_key``: what its offers are sealed with.
    """

    engine_id: str
    lease_seconds: int
    plan: PairPlan
    peers: tuple[str, ...]
    sources: tuple[SourceLink, ...]
    met: Met | None = None
    sums: LinkSums | None = None
    seal_key: bytes = dataclasses.field(default=b"", repr=False)


@dataclasses.dataclass(frozen=True)
class LocalCache:
    """This rank's own side of every link. ``zero`` zeroes tails of it."""

    engine_id: str
    layout: CacheLayout
    placement: RankPlacement
    memory: Memory
    zero: Callable[[Iterable[Tail]], None]


class LinkBuilder:
    """Builds links on handshake threads and takes them apart on the owner's thread."""

    def __init__(
        self,
        local: LocalCache,
        agent: Agent,
        boards: BoardReader,
        asker: Asker,
        timeout_seconds: float,
        prepare_thread: Callable[[], None] = lambda: None,
        sums: SumReader | None = None,
    ) -> None:
        """``prepare_thread`` runs first on each handshake thread (a GPU needs its device set).

        ``watch`` may be set before the first handshake: links are then woken up and measured.
        ``sums`` reads checksums; None when they are off.
        """
        self._local = local
        self._agent = agent
        self._boards = boards
        self._asker = asker
        self._timeout_seconds = timeout_seconds
        self._prepare_thread = prepare_thread
        self.uses = PeerUses(agent)
        self.watch: LinkWatch | None = None
        self._sums = sums

    def build(self, engine_id: str, address: Address) -> PeerLink:
        """Shake hands with ``engine_id`` at ``address``; raises a ``ConnectorError`` if it fails.

        A difference between the engines is a ``RefusedError`` that names every difference.
        """
        self._prepare_thread()
        hello = fetch(
            self._asker,
            address,
            engine_id=engine_id,
            our_engine_id=self._local.engine_id,
            timeout_seconds=self._timeout_seconds,
        )
        plan, placements = self._plan(hello)
        with contextlib.ExitStack() as undo:
            peers = tuple(self._add_peer(rank.agent_metadata, undo) for rank in hello.ranks)
            sources = tuple(
                self._source(hello.ranks[rank], plan, placements[rank], peers[rank], undo)
                for rank in plan.sources
            )
            sums = self._link_sums(hello, plan, peers, undo)
            self._greet(peers)
            met = self._meet(hello, address, placements, sources)
            undo.pop_all()
        logger.info("ready to read from %s (ranks %s)", describe(hello), plan.sources)
        return PeerLink(
            *(hello.engine_id, hello.lease_seconds, plan, peers, sources, met, sums),
            seal_key=hello.seal_key,
        )

    def take_apart(self, link: PeerLink) -> None:
        """Give back everything of a link that no read uses any more."""
        if self.watch is not None and link.met is not None:
            self.watch.forget(link.met)
        # What cannot be given back must not keep the rest: the last one in the list goes first.
        with contextlib.ExitStack() as rest:
            for peer in link.peers:
                rest.callback(self.uses.let_go, peer)
            if link.sums is not None and self._sums is not None:
                for view in link.sums.views.values():
                    rest.callback(self._sums.detach, view)
            for source in link.sources:
                rest.callback(self._agent.release_list, source.local)
                rest.callback(self._agent.release_list, source.remote)
                rest.callback(self._boards.detach, source.board)

    def _add_peer(self, metadata: bytes, undo: contextlib.ExitStack) -> str:
        peer = self.uses.add(metadata)
        undo.callback(self.uses.let_go, peer)
        return peer

    def _greet(self, peers: Sequence[str]) -> None:
        """The first message to a rank connects to it, which takes milliseconds: not later, on the
        engine's thread. It renews nothing, and leaves while the link is woken up."""
        message = encode(Renew(self._local.engine_id, ()))
        for peer in peers:
            self._agent.send_notification(peer, message)

    def _meet(
        self,
        hello: Hello,
        address: Address,
        placements: Sequence[RankPlacement],
        sources: Sequence[SourceLink],
    ) -> Met | None:
        if self.watch is None:
            return None
        page_bytes = int(sources[0].table.plan.source.page_bytes)
        ends = [
            LinkEnd(
                ProbeTarget(
                    source.peer,
                    readable_regions(placements[source.rank], page_bytes),
                    placements[source.rank].device_id,
                    hello.ranks[source.rank].board_address,
                ),
                hello.ranks[source.rank].host,
            )
            for source in sources
        ]
        return self.watch.meet(hello.engine_id, f"{address.host}:{address.port}", ends)

    def _plan(self, hello: Hello) -> tuple[PairPlan, tuple[RankPlacement, ...]]:
        if hello.role == "consumer":
            raise RefusedError("role", "a producer", hello.role, "set kv_role on that engine")
        try:
            theirs = CacheLayout.from_dict(hello.layout)
            placements = tuple(RankPlacement.from_dict(rank.placement) for rank in hello.ranks)
        except GeometryError as error:
            raise RefusedError("hello", "a valid layout and placements", str(error)) from error
        fatal = [item for item in compare(self._local.layout, theirs) if item.fatal]
        if fatal:
            differences = "; ".join(
                f"{item.field} is {shorten(item.ours)} here and {shorten(item.theirs)} there: "
                f"{item.reason} {item.hint}"
                for item in fatal
            )
            raise RefusedError(
                "layout", "an engine that fits this one", f"{len(fatal)} differences", differences
            )
        if theirs.tp_size != hello.tp_size:
            raise RefusedError("layout.tp_size", str(hello.tp_size), theirs.tp_size)
        try:
            plan = plan_pair(theirs, self._local.layout, self._local.placement.rank)
        except GeometryError as error:
            raise RefusedError("layout", "an engine that fits this one", str(error)) from error
        return plan, placements

    def _link_sums(
        self, hello: Hello, plan: PairPlan, peers: tuple[str, ...], undo: contextlib.ExitStack
    ) -> LinkSums | None:
        if self._sums is None:
            return None
        try:
            pair = SumPair(plan)
        except GeometryError as error:
            if self._sums.required:
                raise RefusedError("checksum", "sums of all loads", str(error)) from error
            logger.warning("no checksums between %s and here: %s", hello.engine_id, error)
            return None
        rates = [hello.ranks[rank].sums_every for rank in plan.sources]
        every = min(rates)
        if self._sums.required and any(rate != MODES["all"] for rate in rates):
            there = max(rates) if every else 0
            raise RefusedError(
                "checksum",
                "all on the prefill engine, as here",
                mode_of(there),
                "set checksum to all on the prefill engine, or to sample here",
            )
        views: dict[int, SumView] = {}
        for rank in plan.sources if every else ():
            theirs = hello.ranks[rank]
            views[rank] = self._sums.attach(
                peers[rank], theirs.sums_address, theirs.sums_slots, every, pair.source
            )
            undo.callback(self._sums.detach, views[rank])
        return LinkSums(pair, every, views)

    def _source(
        self,
        hello: RankHello,
        plan: PairPlan,
        placement: RankPlacement,
        peer: str,
        undo: contextlib.ExitStack,
    ) -> SourceLink:
        try:
            table = build_table(plan, hello.rank, self._local.placement, placement)
        except GeometryError as error:
            raise RefusedError("placement", "one that fits its layout", str(error)) from error
        memory = self._local.memory
        local = self._agent.prepare(None, row_array(table.local_rows), memory)
        undo.callback(self._agent.release_list, local)
        remote = self._agent.prepare(peer, row_array(table.remote_rows), memory)
        undo.callback(self._agent.release_list, remote)
        board = self._boards.attach(peer, hello.board_address, hello.board_slots)
        undo.callback(self._boards.detach, board)
        return SourceLink(hello.rank, peer, table, RequestRanges(table), local, remote, board)


def readable_regions(placement: RankPlacement, page_bytes: int) -> tuple[tuple[int, int], ...]:
    """(address, bytes that surely belong to the cache) of each region: to its last page's end."""
    return tuple(
        (base, stride * (placement.num_blocks - 1) + page_bytes)
        for base, stride in zip(placement.region_bases, placement.block_strides, strict=True)
    )
