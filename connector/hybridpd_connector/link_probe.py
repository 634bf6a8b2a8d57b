"""Reads that nobody needs the bytes of: they wake a link up, and tell how fast it is.

The first read of a pair costs 10 to 16 ms on GPUs: connections are made and each allocation of the
peer is mapped. ``warm_up`` pays this on a handshake thread, with one small read of every region
and one of the lease board. ``measure`` then times reads of up to 2 MiB.

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
from collections.abc import Sequence

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
from hybridpd_connector.link_path import Measurement
from hybridpd_connector.peer_uses import PeerUses

logger = logging.getLogger(__name__)

SCRATCH_BYTES = 2 << 20
PIECE_BYTES = 16 << 10
REPEATS = 4
ENOUGH_SECONDS = 0.1
"""A link that is slower than this for one piece is not asked for 2 MiB; and no more repeats."""

_TIGHT_SECONDS = 0.002
_PAUSE_SECONDS = 0.0005

Row = tuple[int, int, int, int, int]


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
class _Stray:
    """A read that did not end in time, and what it uses."""

    peer: str
    read: PostedRead
    lists: tuple[PreparedList, ...]


class LinkProber:
    """See the module. Every method may be called from any thread but the engine's: they wait."""

    def __init__(self, agent: Agent, uses: PeerUses, scratch: Scratch) -> None:
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
        self._read(target.peer, self._scratch.region, target.device_id, pieces, until)
        board = [(target.board_address, SLOT_BYTES)]
        self._read(target.peer, self._slot_region, 0, board, until)

    def measure(self, target: ProbeTarget, until: float) -> Measurement:
        """Time reads of the largest region; the best of a few counts. Errors as in ``warm_up``."""
        size = max(size for _, size in target.regions)
        small = self._best(target, min(PIECE_BYTES, size), until)
        if small.seconds > ENOUGH_SECONDS:
            return small
        return self._best(target, min(self._scratch.region.length_bytes, size), until)

    def _best(self, target: ProbeTarget, length: int, until: float) -> Measurement:
        address = max(target.regions, key=lambda region: region[1])[0]
        region, seconds = self._scratch.region, list[float]()
        while len(seconds) < REPEATS and sum(seconds) < ENOUGH_SECONDS:
            piece = [(address, length)]
            seconds.append(self._read(target.peer, region, target.device_id, piece, until))
        return Measurement(length, min(seconds))

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

    def _read(
        self,
        peer: str,
        region: MemoryRegion,
        device_id: int,
        pieces: Sequence[tuple[int, int]],
        until: float,
    ) -> float:
        """Read remote pieces of equal length into ``region``, all at once; ``device_id`` is theirs.
        Seconds from the post until the end was seen."""
        length = pieces[0][1]
        room = region.length_bytes // length
        here: Row = (region.address, length, region.device_id, length, room)
        there: list[Row] = [(address, length, device_id, length, 1) for address, _ in pieces]
        local_ids = [index % room for index in range(len(pieces))]
        with contextlib.ExitStack() as undo:
            if not self._uses.hold(peer):
                raise AgentError("peer", "one that is in use", peer)
            undo.callback(self._uses.let_go, peer)
            local = self._agent.prepare(None, [here], region.memory)
            undo.callback(self._agent.release_list, local)
            remote = self._agent.prepare(peer, there, region.memory)
            undo.callback(self._agent.release_list, remote)
            started = time.perf_counter()
            read = self._agent.post_read(local, local_ids, remote, range(len(pieces)))
            state = self._wait(read, until)
            seconds = time.perf_counter() - started
            if state is ReadState.PENDING:
                undo.pop_all()
                with self._lock:
                    self._strays.append(_Stray(peer, read, (local, remote)))
                raise _too_slow(peer)
            self._agent.release_read(read)
        if state is ReadState.FAILED:
            raise AgentError(f"first read from {peer}", "its bytes", "a failed read")
        return seconds

    def _wait(self, read: PostedRead, until: float) -> ReadState:
        """Poll without a pause at first: a good link needs 20 microseconds."""
        tight_until = time.monotonic() + _TIGHT_SECONDS
        while True:
            state = self._agent.poll(read)
            now = time.monotonic()
            if state is not ReadState.PENDING or now >= until or self._closing.is_set():
                return state
            if now >= tight_until:
                time.sleep(_PAUSE_SECONDS)

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
        "the side channel answers and the data path does not: look at what lies between the pods",
    )
