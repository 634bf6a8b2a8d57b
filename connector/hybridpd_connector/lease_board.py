"""The lease board: how a reader knows, without clocks, that what it read had not been freed.

P numbers its leases 1, 2, 3, ... (``sequence``). Every P rank keeps an array of 64-bit slots in
memory that peers can read. When a rank ends a lease, released or expired, it writes the lease's
sequence into slot ``sequence % slots`` *before* it reports the blocks as free. A reader that has
all its pages then reads that one slot: a value below its own sequence means that the lease was
still held after the last page had arrived, so no page can have been reused under the read. A value
equal or above means ended, and the load fails.

    P:  end lease 7 -> board[7] = 7 -> report -> blocks reused
    D:  read pages -> DONE -> read board[7] -> 0: the pages are those of lease 7
                                            -> 7: too late, whatever the pages hold

No clock, no message, nothing to lose: it holds across paused processes, cut links and clocks that
are minutes apart. (Across restarts of P it is the engine id that tells: it names one process.)

Sequences only grow, so a slot used by a later lease reads as "ended" for the earlier one. With
``slots`` far above the number of leases held at once this costs nothing, and if it ever happens it
fails a load and never passes a bad one.
"""

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from hybridpd_connector.agent_api import (
    Agent,
    Memory,
    MemoryRegion,
    PostedRead,
    PreparedList,
)
from hybridpd_connector.errors import AgentError

SLOTS = 65536
SLOT_BYTES = 8
_SCRATCH_CELLS = 4096
_UNREAD = (1 << 64) - 1
MAX_TOGETHER = 256
"""Leases that one read asks about: those of loads that have ended at the same look."""


class LeaseBoard:
    """P rank's board: ``slots`` 64-bit words, all zero at first."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.slots = slots
        self._words = (ctypes.c_uint64 * slots)()

    @property
    def address(self) -> int:
        return ctypes.addressof(self._words)

    def region(self) -> MemoryRegion:
        """What the rank's agent must register before its metadata is handed out."""
        return MemoryRegion(self.address, self.slots * SLOT_BYTES)

    def end(self, sequence: int) -> None:
        """Publish the end of a lease. Must come before its blocks are reported as free."""
        slot = sequence % self.slots
        if self._words[slot] < sequence:
            self._words[slot] = sequence

    def ended(self, sequence: int) -> bool:
        """The same question as a reader asks it."""
        return self._words[sequence % self.slots] >= sequence


@dataclasses.dataclass(frozen=True, eq=False)
class BoardView:
    """A peer rank's board as this rank can read it; owned by whoever attached it. Each equals
    itself only."""

    peer: str
    slots: int
    remote: PreparedList


class BoardCheck(NamedTuple):
    """The question to ask after a read: does this board still hold this lease?"""

    view: BoardView
    sequence: int


class BoardProbe(NamedTuple):
    """One question about several leases in flight: ``read`` is polled; ends with
    ``BoardReader.finish``. ``cells``: where the answer to each of ``sequences`` arrives."""

    sequences: Sequence[int]
    cells: list[int]
    read: PostedRead


class BoardReader:
    """D rank's side: reads single slots of peers' boards into scratch cells of its own."""

    def __init__(self, agent: Agent, cells: int = _SCRATCH_CELLS) -> None:
        self._agent = agent
        self._scratch = (ctypes.c_uint64 * cells)()
        self._free_cells = list(range(cells))
        address = ctypes.addressof(self._scratch)
        agent.register([MemoryRegion(address, cells * SLOT_BYTES)])
        row = (address, SLOT_BYTES, 0, SLOT_BYTES, cells)
        self._local = agent.prepare(None, [row], Memory.DRAM)

    def __repr__(self) -> str:
        used = len(self._scratch) - len(self._free_cells)
        return f"BoardReader(cells_used={used}, cells={len(self._scratch)})"

    @property
    def cells_used(self) -> int:
        return len(self._scratch) - len(self._free_cells)

    def attach(self, peer: str, board_address: int, slots: int) -> BoardView:
        """Prepare a peer's board for reading; give it back with ``detach``."""
        row = (board_address, SLOT_BYTES, 0, SLOT_BYTES, slots)
        return BoardView(peer, slots, self._agent.prepare(peer, [row], Memory.DRAM))

    def detach(self, view: BoardView) -> None:
        self._agent.release_list(view.remote)

    @property
    def room(self) -> int:
        """How many leases one question may be about now; 1 when there is no room at all, for
        ``start`` to say so."""
        return min(len(self._free_cells), MAX_TOGETHER) or 1

    def start(self, view: BoardView, sequences: Sequence[int]) -> BoardProbe:
        """Post one read of the slots of these leases. ``AgentError`` when it cannot be posted."""
        free, scratch, board_slots = self._free_cells, self._scratch, view.slots
        if len(sequences) > len(free):
            raise AgentError("lease board", "a free scratch cell", "none", "too many reads at once")
        cells, slots = [], []
        for sequence in sequences:
            cell = free.pop()
            # A slot that was never written by the read counts as ended.
            scratch[cell] = _UNREAD
            cells.append(cell)
            slots.append(sequence % board_slots)
        try:
            read = self._agent.post_read(self._local, cells, view.remote, slots)
        except AgentError:
            free += cells
            raise
        return BoardProbe(sequences, cells, read)

    def ended(self, probe: BoardProbe) -> list[int]:
        """For a probe that is DONE: which of its leases, as places in ``sequences``, were not held
        any more."""
        scratch, ended = self._scratch, []
        for at, cell in enumerate(probe.cells):
            if scratch[cell] >= probe.sequences[at]:
                ended.append(at)
        return ended

    def finish(self, probe: BoardProbe) -> bool:
        """Give the probe back; False while its read is still in flight (call again)."""
        if not self._agent.release_read(probe.read):
            return False
        self._free_cells += probe.cells
        return True

    def close(self) -> None:
        self._agent.release_list(self._local)
