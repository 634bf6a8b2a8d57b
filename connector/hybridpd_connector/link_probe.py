"""Reads that nobody needs the bytes of: they wake a link up, and tell how fast it is.

The first read of a pair costs 10 to 16 ms on GPUs: connections are made and each allocation of the
peer is mapped. ``warm_up`` pays this on a handshake thread, with one small read of every region
and one of the lease board. ``measure`` then times reads of up to 2 MiB, and longer ones only where
this process is too busy to tell a fast link from a slow one by those (see ``link_samples``).

What is read may belong to anybody or be half written: it goes to scratch memory and is never
looked at. Several threads may use one scratch at once, for the same reason.

Reads cannot be cancelled (see ``agent_api``). One that does not end in time keeps its lists and its
peer; ``collect`` gives them back when it has ended.
"""

import contextlib
import ctypes
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hybridpd_connector.agent_api import (
    Agent,
    Memory,
    MemoryRegion,
    PostedRead,
    PreparedList,
    ReadState,
)
from hybridpd_connector.errors import AgentError
from hybridpd_connector.lease_board import SLOT_BYTES
from hybridpd_connector.link_samples import (
    ENOUGH_SECONDS,
    Bar,
    Measurement,
    Sample,
    Verdict,
    enough,
    judge,
    summary,
)
from hybridpd_connector.peer_uses import PeerUses

logger = logging.getLogger(__name__)

SCRATCH_BYTES = 2 << 20
PIECE_BYTES = 16 << 10
SMALL_READS = 4
FAST_READS = 16
"""A fast link is read so often: the best of them is its speed. They take about a millisecond."""
MAX_PIECES = 256
"""Of one read: posting them takes the agent from others for a few microseconds each."""

_TIGHT_SECONDS = 0.002
_PAUSE_SECONDS = 0.0005

Row = tuple[int, int, int, int, int]


class Clocks(NamedTuple):
    """Seconds: what passes, and what this thread was at work; and how it waits."""

    passed: Callable[[], float] = time.monotonic
    worked: Callable[[], float] = time.thread_time
    sleep: Callable[[float], None] = time.sleep


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Registered memory of the cache's own kind, written by probes; ``owner`` keeps it alive."""

    region: MemoryRegion
    owner: object


@dataclasses.dataclass(frozen=True)
class ProbeTarget:
    """One remote rank. ``regions``: (address, readable bytes) of each of its regions."""

    peer: str
    regions: tuple[tuple[int, int], ...]
    device_id: int
    board_address: int


@dataclasses.dataclass(frozen=True)
class _Course:
    """A read that can be made again and again, ``bytes`` long in all. ``undo`` gives its lists and
    its peer back."""

    peer: str
    bytes: int
    local: PreparedList
    local_ids: list[int]
    remote: PreparedList
    remote_ids: range
    undo: contextlib.ExitStack


@dataclasses.dataclass(frozen=True)
class _Stray:
    """A read that did not end in time, and what it uses."""

    peer: str
    read: PostedRead
    lists: tuple[PreparedList, ...]


class LinkProber:
    """See the module. Every method may be called from any thread but the engine's: they wait."""

    def __init__(
        self, agent: Agent, uses: PeerUses, scratch: Scratch, clocks: Clocks | None = None
    ) -> None:
        self._clocks = clocks or Clocks()
        self._agent = agent
        self._uses = uses
        self._scratch = scratch
        self._slot = ctypes.c_uint64()
        self._slot_region = MemoryRegion(ctypes.addressof(self._slot), SLOT_BYTES)
        self._lock = threading.Lock()
        self._strays: list[_Stray] = []
        self._closing = threading.Event()
        agent.register([scratch.region, self._slot_region])

    def __repr__(self) -> str:
        return f"LinkProber(strays={len(self._strays)})"

    @property
    def memory(self) -> Memory:
        return self._scratch.region.memory

    @property
    def strays(self) -> int:
        """Reads that did not end in time and have not ended since."""
        return len(self._strays)

    def warm_up(self, target: ProbeTarget, until: float) -> None:
        """Read a little of every region and of the board. ``AgentError`` when it fails or takes
        longer than ``until`` (``time.monotonic``)."""
        length = min(PIECE_BYTES, *(size for _, size in target.regions))
        pieces = [(address, length) for address, _ in target.regions]
        board = [(target.board_address, SLOT_BYTES)]
        with contextlib.ExitStack() as undo:
            cache = self._course(undo, target, self._scratch.region, pieces)
            self._read(cache, until)
        with contextlib.ExitStack() as undo:
            on_host = dataclasses.replace(target, device_id=0)
            self._read(self._course(undo, on_host, self._slot_region, board), until)

    def measure(self, target: ProbeTarget, until: float, bar: Bar) -> Measurement:
        """Time reads of the largest region until they prove something. Errors as in ``warm_up``."""
        size = max(size for _, size in target.regions)
        small = self._series(target, min(PIECE_BYTES, size), 1, bar, until)
        if min(sample.at_least_seconds for sample in small) >= ENOUGH_SECONDS:
            # Not asked for 2 MiB: nobody has the time.
            return summary(small, bar, judge(small, bar))
        piece = min(self._scratch.region.length_bytes, size)
        samples = self._series(target, piece, 1, bar, until)
        verdict = judge(samples, bar)
        for bulk in bar.bulk_bytes:
            if verdict is not Verdict.UNSURE or self._closing.is_set():
                break
            longer = self._series(target, piece, min(MAX_PIECES, -(-bulk // piece)), bar, until)
            verdict = judge(longer, bar)
            samples += longer
        return summary(samples, bar, verdict)

    def _series(
        self, target: ProbeTarget, length: int, pieces: int, bar: Bar, until: float
    ) -> list[Sample]:
        """Reads of ``pieces`` times ``length`` bytes, a tenth of a second of them; no more than a
        good figure needs where they are short, or fast."""
        address, size = max(target.regions, key=lambda region: region[1])
        room = size // length
        places = [(address + index % room * length, length) for index in range(pieces)]
        short = length <= PIECE_BYTES
        wanted = SMALL_READS if short else FAST_READS if pieces == 1 else 1
        samples: list[Sample] = []
        with contextlib.ExitStack() as undo:
            course = self._course(undo, target, self._scratch.region, places)
            ended = self._clocks.passed() + ENOUGH_SECONDS
            while True:
                samples.append(self._read(course, until))
                done = len(samples) >= wanted and (short or any(map(bar.fast, samples)))
                if (
                    done
                    or self._closing.is_set()
                    or (self._clocks.passed() >= ended and enough(samples))
                ):
                    return samples

    def collect(self) -> None:
        """Give back what strays used, of those that have ended. Never waits."""
        with self._lock:
            strays, self._strays = self._strays, []
        for stray in strays:
            if self._agent.poll(stray.read) is ReadState.PENDING:
                with self._lock:
                    self._strays.append(stray)
            else:
                self._give_back(stray)

    def close(self) -> None:
        """Let nobody wait any longer. Strays stay: their memory may still be written."""
        self._closing.set()

    def _course(
        self,
        undo: contextlib.ExitStack,
        target: ProbeTarget,
        region: MemoryRegion,
        pieces: Sequence[tuple[int, int]],
    ) -> _Course:
        """Remote pieces of equal length, read into ``region``, all at once."""
        peer, length = target.peer, pieces[0][1]
        room = region.length_bytes // length
        here: Row = (region.address, length, region.device_id, length, room)
        there: list[Row] = [(address, length, target.device_id, length, 1) for address, _ in pieces]
        if not self._uses.hold(peer):
            raise AgentError("peer", "one that is in use", peer)
        undo.callback(self._uses.let_go, peer)
        local = self._agent.prepare(None, [here], region.memory)
        undo.callback(self._agent.release_list, local)
        remote = self._agent.prepare(peer, there, region.memory)
        undo.callback(self._agent.release_list, remote)
        local_ids = [index % room for index in range(len(pieces))]
        return _Course(
            *(peer, length * len(pieces), local, local_ids, remote, range(len(pieces)), undo)
        )

    def _read(self, course: _Course, until: float) -> Sample:
        """Make a read once, and wait for its end."""
        passed, worked = self._clocks.passed, self._clocks.worked
        began, work = passed(), worked()
        read = self._agent.post_read(
            course.local, course.local_ids, course.remote, course.remote_ids
        )
        posted = passed()
        state, open_until = self._wait(read, posted, until)
        work, most = worked() - work, passed() - began
        if state is ReadState.PENDING:
            course.undo.pop_all()
            with self._lock:
                self._strays.append(_Stray(course.peer, read, (course.local, course.remote)))
            raise _too_slow(course.peer)
        if state is ReadState.DONE:
            most = self._until_noticed(read, most)
        self._agent.release_read(read)
        if state is ReadState.FAILED:
            raise AgentError(f"first read from {course.peer}", "its bytes", "a failed read")
        return Sample(course.bytes, min(max(open_until - posted, work), most), most)

    def _until_noticed(self, read: PostedRead, seconds: float) -> float:
        """The transfer library looks too, before it waits for the interpreter: what it says is a
        bound as well, and may be the better one."""
        try:
            noticed = self._agent.telemetry(read).noticed_seconds
        except AgentError:
            return seconds
        return min(seconds, noticed) if noticed > 0 else seconds

    def _wait(self, read: PostedRead, posted: float, until: float) -> tuple[ReadState, float]:
        """(how the read ended, when it was looked at and had not). Polls without a pause at first:
        a good link needs 20 microseconds."""
        open_until = posted
        while True:
            now = self._clocks.passed()
            state = self._agent.poll(read)
            if state is not ReadState.PENDING:
                return state, open_until
            open_until = now
            if now >= until or self._closing.is_set():
                return state, open_until
            # Where others take their time at every look, they need no pause as well.
            if now >= posted + _TIGHT_SECONDS and self._clocks.passed() - now < _PAUSE_SECONDS:
                self._clocks.sleep(_PAUSE_SECONDS)

    def _give_back(self, stray: _Stray) -> None:
        """Whoever collects has a link of its own in mind: an error here is only told."""
        try:
            self._agent.release_read(stray.read)
            for prepared in stray.lists:
                self._agent.release_list(prepared)
            self._uses.let_go(stray.peer)
        except AgentError as error:
            logger.warning("a probe of %s was not given back cleanly: %s", stray.peer, error)


def _too_slow(peer: str) -> AgentError:
    return AgentError(
        f"first read from {peer}",
        "an end before the handshake's timeout",
        "none",
        "the side channel answers and the data path does not: look at what lies between the pods, "
        "and whether a network interface there has gone (UCX_NET_DEVICES names those to use)",
    )
