"""Reads in flight: one load is a read from each of several source ranks, and one verdict.

    part:  reading --DONE--> checking (lease board) --held--> good
              |                  |--ended--> bad "lease_ended"
              +--FAILED--> bad   +--FAILED--> bad

Parts whose reads end at the same look ask a board together, in one read posted after that look.

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
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hybridpd_connector.agent_api import Agent, PostedRead, PreparedList, Ranges, ReadState
from hybridpd_connector.errors import AgentError, PeerLostError, StateError
from hybridpd_connector.lease_board import BoardCheck, BoardProbe, BoardReader, BoardView
from hybridpd_connector.patience import Patience, Watch

logger = logging.getLogger(__name__)

POST_FAILED = "post_failed"
READ_FAILED = "read_failed"
LEASE_ENDED = "lease_ended"
LEASE_CHECK_FAILED = "lease_check_failed"
DEADLINE = "deadline"
ABORTED = "aborted"

_PENDING, _DONE = ReadState.PENDING, ReadState.DONE


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
    """A part that has not ended: ``read`` is its own, ``watch`` since the first look at that. Of
    its ``SourceRead`` only what is still needed: ranges are many, and so may be the parts."""

    load: Outcome
    peer: str
    check: BoardCheck | None
    read: PostedRead
    watch: Watch | None = None


@dataclasses.dataclass(slots=True)
class _Asked:
    """One question to a lease board, about parts whose reads have ended at the same look."""

    peer: str
    parts: Sequence[_Part]
    probe: BoardProbe
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
        self._asked: list[_Asked] = []
        self._over: list[Outcome] = []
        # No load ends its time before this.
        self._earliest_deadline = math.inf

    def __repr__(self) -> str:
        checking = sum(len(asked.parts) for asked in self._asked)
        return (
            f"Transfers(loads={len(self._loads)}, reading={len(self._open)}, checking={checking})"
        )

    @property
    def in_flight(self) -> int:
        """Loads whose outcome has not been given out."""
        return len(self._loads)

    def is_in_flight(self, request: str) -> bool:
        return request in self._loads

    def busy(self, peer: str) -> bool:
        """Does a read in flight use this peer? Nothing of it may be given back then."""
        return any(part.peer == peer for part in self._parts())

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
        if self._open:
            self._look_at_reads(now)
        if self._asked:
            self._asked = [asked for asked in self._asked if not self._is_answered(asked, now)]
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
        peers = (part.peer for part in self._parts() if now >= part.load.deadline)
        return tuple(dict.fromkeys(peers))

    def _fail_late(self, now: float) -> None:
        """Every load that is open now has an open part; the first one is named."""
        for part in self._parts():
            if now >= part.load.deadline:
                part.load.fail(DEADLINE, part.peer)
        self._earliest_deadline = min(
            (load.deadline for load in self._loads.values()), default=math.inf
        )

    def _parts(self) -> Iterator[_Part]:
        """All that have not ended."""
        yield from self._open
        for asked in self._asked:
            yield from asked.parts

    def _look_at_reads(self, now: float) -> None:
        """Once at each; the leases of those that have ended are asked for together."""
        agent, still_open = self._agent, []
        ended: dict[BoardView, list[_Part]] = {}
        for part in self._open:
            state = agent.poll(part.read)
            if state is _PENDING:
                self._wait(part, False, now)
                still_open.append(part)
                continue
            load, check = part.load, part.check
            if part.watch is not None:
                self._patience.end(part.watch, now)
            else:
                self._patience.ended_at_once((part.peer, False))
            if state is _DONE:
                self._count(load, part.read)
            else:
                load.fail(READ_FAILED, part.peer, broken=True)
            if not agent.release_read(part.read):
                raise _still_in_flight(load.request)
            # A load that has failed already needs no proof that its bytes are good.
            if check is None or load.reason:
                self._close((part,))
            elif check.view in ended:
                ended[check.view].append(part)
            else:
                ended[check.view] = [part]
        self._open = still_open
        for view, parts in ended.items():
            self._ask(view, parts)

    def _wait(self, item: _Part | _Asked, asking: bool, now: float) -> None:
        """It goes on: is a look in this very step worth it?"""
        watch = item.watch
        if watch is None:
            watch = item.watch = self._patience.begin((item.peer, asking), now)
        if watch.worth and self._patience.lasts(watch, now):
            self._hopeful = True

    def _close(self, parts: Iterable[_Part]) -> None:
        """These have ended."""
        for part in parts:
            load = part.load
            load.parts -= 1
            if not load.parts:
                self._over.append(load)

    def _ask(self, view: BoardView, parts: list[_Part]) -> None:
        """Post the question: are the leases of these parts still held?"""
        most = self._boards.room if len(parts) > 1 else 1
        while parts:
            together, parts = parts[:most], parts[most:]
            sequences = [part.check.sequence for part in together if part.check is not None]
            try:
                probe = self._boards.start(view, sequences)
            except AgentError as error:
                broken = isinstance(error, PeerLostError)
                self._fail_check(together, broken=broken, detail=str(error))
            else:
                self._asked.append(_Asked(view.peer, together, probe))

    def _is_answered(self, asked: _Asked, now: float) -> bool:
        """One look at a question; True when its parts have ended."""
        state = self._agent.poll(asked.probe.read)
        if state is _PENDING:
            self._wait(asked, True, now)
            return False
        if asked.watch is not None:
            self._patience.end(asked.watch, now)
        else:
            self._patience.ended_at_once((asked.peer, True))
        parts = asked.parts
        if state is _DONE:
            for at in self._boards.ended(asked.probe):
                parts[at].load.fail(LEASE_ENDED, parts[at].peer)
            self._close(parts)
        else:
            self._fail_check(parts, broken=True)
        if not self._boards.finish(asked.probe):
            raise _still_in_flight(parts[0].load.request)
        return True

    def _fail_check(self, parts: Sequence[_Part], *, broken: bool, detail: str = "") -> None:
        for part in parts:
            part.load.fail(LEASE_CHECK_FAILED, part.peer, broken=broken, detail=detail)
        self._close(parts)

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


def _still_in_flight(request: str) -> StateError:
    return StateError(f"load {request}", "to release an ended read", "still in flight")
