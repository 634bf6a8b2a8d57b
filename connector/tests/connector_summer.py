"""A summer for engines in one process: the reference, with the delays and failures of a device."""

import array
import types

import numpy as np

from hybridpd_connector.errors import SumError
from hybridpd_connector.sum_board import MARK, seal_of
from hybridpd_geometry import RankSums, row_of


class SlowSummer:
    """Sums with the reference, and like a device: later (``hold``), or never (``broken``)."""

    def __init__(self, memory):
        self.memory = memory
        self.broken = self.held = False
        self._boards, self._waiting = [], []

    def allocate(self, size_bytes):
        board = np.zeros(size_bytes // 8, dtype=np.uint64)
        self._boards.append(board)
        return board.ctypes.data

    def publish(self, request, sequence, address):
        row = self._row(request)
        head = [MARK, sequence, len(row), seal_of(sequence, row)]
        self._waiting.append((address, [*head, *row]))
        if not self.held:
            self.let_go()

    def let_go(self, words=None):
        """Write what waits, or only so many words of it."""
        for address, slot in self._waiting:
            for board in self._boards:
                at = (address - board.ctypes.data) // 8
                if 0 <= at < len(board):
                    board[at : at + len(slot)][:words] = slot[:words]
        if words is None:
            self._waiting.clear()

    def overwrite(self, word, value):
        """Change one word of the header of every slot that is written."""
        for board in self._boards:
            for at in np.flatnonzero(board == MARK):
                board[at + word] = value

    def start(self, request):
        row = array.array("Q", self._row(request))
        return types.SimpleNamespace(words=lambda: None if self.held else row)

    def _row(self, request):
        if self.broken:
            raise SumError("checksums", "a device that sums", "out of memory")
        memory = self.memory

        def read(name, block, offset, length):
            at = memory.page_at(memory.layout.by_name[name], block) + offset
            return memory.bytes[at : at + length].tobytes()

        return row_of(RankSums(memory.layout, request.pieces_tp), request, read)
