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


@dataclasses.dataclass(frozen=True)
class BoardView:
    """A peer rank's board as this rank can read it; owned by whoever attached it."""

    peer: str
    slots: int
    remote: PreparedList


class BoardCheck(NamedTuple):
    """The question to ask after a read: does this board still hold this lease?"""

    view: BoardView
    sequence: int


@dataclasses.dataclass(slots=True)
class BoardProbe:
    """One question in flight: ``read`` is polled; ends with ``BoardReader.finish``."""

    check: BoardCheck
    cell: int
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

    def start(self, check: BoardCheck) -> BoardProbe:
        """Post the read of one slot. ``AgentError`` when it cannot be posted."""
        if not self._free_cells:
            raise AgentError("lease board", "a free scratch cell", "none", "too many reads at once")
        cell = self._free_cells.pop()
        # All ones: a slot that was never written by the read counts as ended.
        self._scratch[cell] = (1 << 64) - 1
        slot = check.sequence % check.view.slots
        try:
            read = self._agent.post_read(self._local, [cell], check.view.remote, [slot])
        except AgentError:
            self._free_cells.append(cell)
            raise
        return BoardProbe(check, cell, read)

    def held(self, probe: BoardProbe) -> bool:
        """For a probe that is DONE: was the lease still held?"""
        return self._scratch[probe.cell] < probe.check.sequence

    def finish(self, probe: BoardProbe) -> bool:
        """Give the probe back; False while its read is still in flight (call again)."""
        if not self._agent.release_read(probe.read):
            return False
        self._free_cells.append(probe.cell)
        return True

    def close(self) -> None:
        self._agent.release_list(self._local)
