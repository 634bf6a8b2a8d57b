"""Reads in flight: one load is a read from each of several source ranks, and one verdict.

    part:  reading --DONE--> checking (lease board) --held--> good
              |                  |--ended--> bad "lease_ended"
              +--FAILED--> bad   +--FAILED--> bad

A load ends when all its parts have ended: good when all are, else failed with the first reason.
Its outcome is given out exactly once, and only when the agent touches no byte of it any more, so
that blocks may be freed on it. An abort or a passed deadline changes the verdict at once and the
end not at all: a read in flight cannot be stopped (see ``agent_api``). ``overdue`` names the peers
that keep a load past its deadline.

Every handle is owned by its part, which releases it when it ends.
"""

import dataclasses
import enum
import logging
from collections.abc import Iterator, Sequence

from hybridpd_connector.agent_api import Agent, PostedRead, PreparedList, Ranges, ReadState
from hybridpd_connector.errors import AgentError, PeerLostError, StateError
from hybridpd_connector.lease_board import BoardCheck, BoardProbe, BoardReader
from hybridpd_connector.patience import Patience, Watch

logger = logging.getLogger(__name__)

POST_FAILED = "post_failed"
READ_FAILED = "read_failed"
LEASE_ENDED = "lease_ended"
LEASE_CHECK_FAILED = "lease_check_failed"
DEADLINE = "deadline"
ABORTED = "aborted"


@dataclasses.dataclass(frozen=True)
class SourceRead:
    """The part of a load that one source rank has: ``ranges`` of the memory of both lists.

    ``check``: the lease to look at once the bytes are here; None only where no lease exists.
    """

    peer: str
    local: PreparedList
    remote: PreparedList
    ranges: Ranges
    check: BoardCheck | None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one load ended. Bytes and descriptors are the transfer library's own counts.

    ``reason`` is "" for a good load, ``detail`` what is known beyond it. ``peer``: whose fault it
    was, "" when nobody's. ``peer_broken``: the connection to it failed, drop it. ``post_seconds``
    is the sum over parts, ``transfer_seconds`` the longest part, from its post until the poll that
    noticed its end.
    """

    request: str
    ok: bool
    reason: str
    peer: str
    peer_broken: bool
    bytes: int
    descriptors: int
    post_seconds: float
    transfer_seconds: float
    detail: str = ""


class _Stage(enum.Enum):
    READING = "reading"
    CHECKING = "checking"
    ENDED = "ended"


@dataclasses.dataclass
class _Part:
    source: SourceRead
    stage: _Stage
    read: PostedRead | None = None
    probe: BoardProbe | None = None
    watch: Watch | None = None


@dataclasses.dataclass
class _Load:
    request: str
    deadline: float
    parts: list[_Part] = dataclasses.field(default_factory=list)
    reason: str = ""
    detail: str = ""
    peer: str = ""
    peer_broken: bool = False
    bytes: int = 0
    descriptors: int = 0
    post_seconds: float = 0.0
    transfer_seconds: float = 0.0

    def fail(self, reason: str, peer: str = "", *, broken: bool = False, detail: str = "") -> None:
        """The first reason stays; a broken peer is remembered whenever it shows."""
        if not self.reason:
            self.reason, self.peer, self.detail = reason, peer, detail
        if broken:
            self.peer, self.peer_broken = peer, True

    def outcome(self) -> Outcome:
        return Outcome(
            request=self.request,
            ok=not self.reason,
            reason=self.reason,
            peer=self.peer,
            peer_broken=self.peer_broken,
            bytes=self.bytes,
            descriptors=self.descriptors,
            post_seconds=self.post_seconds,
            transfer_seconds=self.transfer_seconds,
            detail=self.detail,
        )


class Transfers:
    """All loads in flight of one D rank. Not thread-safe: the engine thread owns it."""

    def __init__(self, agent: Agent, boards: BoardReader, patience: Patience | None = None) -> None:
        self._agent = agent
        self._boards = boards
        self._patience = patience or Patience(0.0)
        self._hopeful = self._late = False
        self._loads: dict[str, _Load] = {}

    def __repr__(self) -> str:
        stages = [part.stage for load in self._loads.values() for part in load.parts]
        return (
            f"Transfers(loads={len(self._loads)}, reading={stages.count(_Stage.READING)}, "
            f"checking={stages.count(_Stage.CHECKING)})"
        )

    @property
    def in_flight(self) -> int:
        """Loads whose outcome has not been given out."""
        return len(self._loads)

    def is_in_flight(self, request: str) -> bool:
        return request in self._loads

    def busy(self, peer: str) -> bool:
        """Does a read in flight use this peer? Nothing of it may be given back then."""
        return any(part.source.peer == peer for _, part in self._open_parts())

    def submit(self, request: str, sources: Sequence[SourceRead], deadline: float) -> None:
        """Post every part of a load. Never raises for a peer's sake: failures become the outcome.

        After a part that cannot be posted no further one is posted.
        """
        if request in self._loads:
            raise StateError(f"load {request}", "submitted once until it ends", "submitted again")
        load = _Load(request, deadline)
        self._loads[request] = load
        for source in sources:
            try:
                read = self._agent.post_ranges(source.local, source.remote, source.ranges)
            except AgentError as error:
                broken = isinstance(error, PeerLostError)
                load.fail(POST_FAILED, source.peer, broken=broken, detail=str(error))
                break
            load.parts.append(_Part(source, _Stage.READING, read))

    def abort(self, request: str) -> None:
        """The request is not wanted any more. Its outcome still comes, when its reads have ended.

        Unknown requests are ignored: their outcome has been given out.
        """
        load = self._loads.get(request)
        if load is not None:
            load.fail(ABORTED)

    def poll(self, now: float) -> list[Outcome]:
        """One look at everything pending; the outcomes of loads that have ended."""
        ended = []
        self._hopeful = self._late = False
        for request, load in list(self._loads.items()):
            is_open = False
            for part in load.parts:
                is_open |= part.stage is not _Stage.ENDED and self._look(load, part, now)
            if not is_open:
                del self._loads[request]
                ended.append(load.outcome())
            elif now >= load.deadline:
                self._late = True
                load.fail(DEADLINE, self._slowest(load))
        return ended

    @property
    def hopeful(self) -> bool:
        """Is anything in flight that was begun just now and may well end within this step?"""
        return self._hopeful

    def overdue(self, now: float) -> tuple[str, ...]:
        """Peers whose reads are still in flight after the deadline of their load."""
        if not self._late:
            return ()
        peers = (part.source.peer for load, part in self._open_parts() if now >= load.deadline)
        return tuple(dict.fromkeys(peers))

    def _look(self, load: _Load, part: _Part, now: float) -> bool:
        """Once at a part; twice when its read has just ended and its lease is asked for.

        True while it is open.
        """
        for stage, look in (
            (_Stage.READING, self._poll_read),
            (_Stage.CHECKING, self._poll_check),
        ):
            if part.stage is not stage:
                continue
            watch = part.watch
            if watch is None:
                watch = part.watch = self._patience.begin((part.source.peer, stage), now)
            look(load, part)
            if part.stage is stage:
                self._hopeful |= watch.worth and self._patience.lasts(watch, now)
            else:
                self._patience.end(watch, now)
                part.watch = None
        return part.stage is not _Stage.ENDED

    def _open_parts(self) -> Iterator[tuple[_Load, _Part]]:
        for load in self._loads.values():
            for part in load.parts:
                if part.stage is not _Stage.ENDED:
                    yield load, part

    def _slowest(self, load: _Load) -> str:
        return next(part.source.peer for part in load.parts if part.stage is not _Stage.ENDED)

    def _poll_read(self, load: _Load, part: _Part) -> None:
        read = part.read
        if read is None:
            raise StateError(f"load {load.request}", "a posted read in stage reading", "none")
        state = self._agent.poll(read)
        if state is ReadState.PENDING:
            return
        if state is ReadState.DONE:
            self._count(load, read)
        else:
            load.fail(READ_FAILED, part.source.peer, broken=True)
        if not self._agent.release_read(read):
            raise StateError(f"load {load.request}", "to release an ended read", "still in flight")
        part.read = None
        part.stage = _Stage.ENDED
        # A load that has failed already needs no proof that its bytes are good.
        if not load.reason and part.source.check is not None:
            self._start_check(load, part, part.source.check)

    def _count(self, load: _Load, read: PostedRead) -> None:
        try:
            telemetry = self._agent.telemetry(read)
        except AgentError as error:
            logger.warning("load %s is not counted: %s", load.request, error)
            return
        load.bytes += telemetry.total_bytes
        load.descriptors += telemetry.descriptors
        load.post_seconds += telemetry.post_seconds
        load.transfer_seconds = max(load.transfer_seconds, telemetry.noticed_seconds)

    def _start_check(self, load: _Load, part: _Part, check: BoardCheck) -> None:
        try:
            part.probe = self._boards.start(check)
        except AgentError as error:
            broken = isinstance(error, PeerLostError)
            load.fail(LEASE_CHECK_FAILED, part.source.peer, broken=broken, detail=str(error))
        else:
            part.stage = _Stage.CHECKING

    def _poll_check(self, load: _Load, part: _Part) -> None:
        probe = part.probe
        if probe is None:
            raise StateError(f"load {load.request}", "a probe in stage checking", "none")
        state = self._boards.poll(probe)
        if state is ReadState.PENDING:
            return
        if state is ReadState.FAILED:
            load.fail(LEASE_CHECK_FAILED, part.source.peer, broken=True)
        elif not self._boards.held(probe):
            load.fail(LEASE_ENDED, part.source.peer)
        if not self._boards.finish(probe):
            raise StateError(f"load {load.request}", "to finish an ended probe", "still in flight")
        part.probe = None
        part.stage = _Stage.ENDED
