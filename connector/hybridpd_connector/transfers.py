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
import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

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

_PENDING = ReadState.PENDING


class SourceRead(NamedTuple):
    """The part of a load that one source rank has: ``ranges`` of the memory of both lists.

    ``check``: the lease to look at once the bytes are here; None only where no lease exists.
    """

    peer: str
    local: PreparedList
    remote: PreparedList
    ranges: Ranges
    check: BoardCheck | None


@dataclasses.dataclass(slots=True)
class Outcome:
    """A load, and how it has ended once ``poll`` gives it out: nothing changes after that.

    ``parts``: how many are open. Bytes and descriptors are the transfer library's own counts.
    ``reason`` is "" for a good load, ``detail`` what is known beyond it. ``peer``: whose fault it
    was, "" when nobody's. ``peer_broken``: the connection to it failed, drop it. ``post_seconds``
    is the sum over parts, ``transfer_seconds`` the longest part, from its post until the poll that
    noticed its end.
    """

    request: str
    deadline: float
    parts: int = 0
    reason: str = ""
    detail: str = ""
    peer: str = ""
    peer_broken: bool = False
    bytes: int = 0
    descriptors: int = 0
    post_seconds: float = 0.0
    transfer_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.reason

    def fail(self, reason: str, peer: str = "", *, broken: bool = False, detail: str = "") -> None:
        """The first reason stays; a broken peer is remembered whenever it shows."""
        if not self.reason:
            self.reason, self.peer, self.detail = reason, peer, detail
        if broken:
            self.peer, self.peer_broken = peer, True


@dataclasses.dataclass(slots=True)
class _Part:
    """A part that has not ended. ``read``: what it waits for, its own read or, when ``probe`` is
    set, that of the question to the lease board; ``watch``: since the first look at that. Of its
    ``SourceRead`` only what is still needed: ranges are many, and so may be the parts."""

    load: Outcome
    peer: str
    check: BoardCheck | None
    read: PostedRead
    probe: BoardProbe | None = None
    watch: Watch | None = None


class Transfers:
    """All loads in flight of one D rank. Not thread-safe: the engine thread owns it."""

    def __init__(self, agent: Agent, boards: BoardReader, patience: Patience | None = None) -> None:
        self._agent = agent
        self._boards = boards
        self._patience = patience or Patience(0.0)
        self._hopeful = False
        self._loads: dict[str, Outcome] = {}
        # Looked at in every step, maybe hundreds of them: flat, and without the ended ones.
        self._open: list[_Part] = []
        self._over: list[Outcome] = []
        # No load ends its time before this.
        self._earliest_deadline = math.inf

    def __repr__(self) -> str:
        checking = sum(part.probe is not None for part in self._open)
        return (
            f"Transfers(loads={len(self._loads)}, reading={len(self._open) - checking}, "
            f"checking={checking})"
        )

    @property
    def in_flight(self) -> int:
        """Loads whose outcome has not been given out."""
        return len(self._loads)

    def is_in_flight(self, request: str) -> bool:
        return request in self._loads

    def busy(self, peer: str) -> bool:
        """Does a read in flight use this peer? Nothing of it may be given back then."""
        return any(part.peer == peer for part in self._open)

    def submit(self, request: str, sources: Sequence[SourceRead], deadline: float) -> None:
        """Post every part of a load. Never raises for a peer's sake: failures become the outcome.

        After a part that cannot be posted no further one is posted.
        """
        if request in self._loads:
            raise StateError(f"load {request}", "submitted once until it ends", "submitted again")
        load = self._loads[request] = Outcome(request, deadline)
        self._earliest_deadline = min(self._earliest_deadline, deadline)
        for source in sources:
            try:
                read = self._agent.post_ranges(source.local, source.remote, source.ranges)
            except AgentError as error:
                broken = isinstance(error, PeerLostError)
                load.fail(POST_FAILED, source.peer, broken=broken, detail=str(error))
                break
            self._open.append(_Part(load, source.peer, source.check, read))
            load.parts += 1
        if not load.parts:
            self._over.append(load)

    def abort(self, request: str) -> None:
        """The request is not wanted any more. Its outcome still comes, when its reads have ended.

        Unknown requests are ignored: their outcome has been given out.
        """
        load = self._loads.get(request)
        if load is not None:
            load.fail(ABORTED)

    def poll(self, now: float) -> list[Outcome]:
        """One look at everything pending; the outcomes of loads that have ended."""
        self._hopeful = False
        if not self._loads:
            return []
        self._open = [part for part in self._open if self._look(part, now)]
        over, self._over = self._over, []
        for load in over:
            del self._loads[load.request]
        if now >= self._earliest_deadline:
            self._fail_late(now)
        return over

    @property
    def hopeful(self) -> bool:
        """Is anything in flight that was begun just now and may well end within this step?"""
        return self._hopeful

    def overdue(self, now: float) -> tuple[str, ...]:
        """Peers whose reads are still in flight after the deadline of their load."""
        if now < self._earliest_deadline:
            return ()
        peers = (part.peer for part in self._open if now >= part.load.deadline)
        return tuple(dict.fromkeys(peers))

    def _fail_late(self, now: float) -> None:
        """Every load that is open now has an open part; the first one is named."""
        for part in self._open:
            if now >= part.load.deadline:
                part.load.fail(DEADLINE, part.peer)
        self._earliest_deadline = min(
            (load.deadline for load in self._loads.values()), default=math.inf
        )

    def _look(self, part: _Part, now: float) -> bool:
        """Once at a part; twice when its read has just ended and its lease is asked for.

        True while it is open.
        """
        while True:
            watch = part.watch
            state = self._agent.poll(part.read)
            if state is _PENDING:
                if watch is None:
                    key = part.peer, part.probe is not None
                    watch = part.watch = self._patience.begin(key, now)
                if watch.worth and self._patience.lasts(watch, now):
                    self._hopeful = True
                return True
            if watch is None:
                self._patience.ended_at_once((part.peer, part.probe is not None))
            else:
                self._patience.end(watch, now)
            if part.probe is not None:
                self._end_check(part, part.probe, state)
            elif self._end_read(part, state):
                continue
            part.load.parts -= 1
            if not part.load.parts:
                self._over.append(part.load)
            return False

    def _end_read(self, part: _Part, state: ReadState) -> bool:
        """True: its lease is asked for now."""
        load, peer = part.load, part.peer
        if state is ReadState.DONE:
            self._count(load, part.read)
        else:
            load.fail(READ_FAILED, peer, broken=True)
        if not self._agent.release_read(part.read):
            raise StateError(f"load {load.request}", "to release an ended read", "still in flight")
        # A load that has failed already needs no proof that its bytes are good.
        if load.reason or part.check is None:
            return False
        try:
            part.probe = self._boards.start(part.check)
        except AgentError as error:
            broken = isinstance(error, PeerLostError)
            load.fail(LEASE_CHECK_FAILED, peer, broken=broken, detail=str(error))
            return False
        part.read, part.watch = part.probe.read, None
        return True

    def _end_check(self, part: _Part, probe: BoardProbe, state: ReadState) -> None:
        load, peer = part.load, part.peer
        if state is ReadState.FAILED:
            load.fail(LEASE_CHECK_FAILED, peer, broken=True)
        elif not self._boards.held(probe):
            load.fail(LEASE_ENDED, peer)
        if not self._boards.finish(probe):
            raise StateError(f"load {load.request}", "to finish an ended probe", "still in flight")

    def _count(self, load: Outcome, read: PostedRead) -> None:
        try:
            telemetry = self._agent.telemetry(read)
        except AgentError as error:
            logger.warning("load %s is not counted: %s", load.request, error)
            return
        total_bytes, descriptors, post_seconds, noticed_seconds = telemetry
        load.bytes += total_bytes
        load.descriptors += descriptors
        load.post_seconds += post_seconds
        if noticed_seconds > load.transfer_seconds:
            load.transfer_seconds = noticed_seconds
