"""Checksums on their way: the board of a P rank, and how a D rank reads it.

P sums a prefill when it is pinned, in order with the engine's work and without being asked, and
its sums go to a board that peers can read, one slot a prefill, all words of 64 bits::

    slot   [ mark | sequence | words | seal ][ word 0, word 1, ... ]

D reads the slot once its pages are here, sums its own pages and compares (see ``verifier``). Which
words belong together is geometry (``SumPair``).

Which prefills are summed follows from the lease's sequence number, so both sides know without
asking: those that ``every`` divides. The seal sums words and sequence. D looks at it only when
something differs, to tell a wrong byte from a slot that is being written.
"""

import array
import ctypes
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from hybridpd_connector.agent_api import (
    Agent,
    Memory,
    MemoryRegion,
    PostedRead,
    PreparedList,
    ReadState,
)
from hybridpd_connector.errors import SumError
from hybridpd_geometry import CacheLayout, RankSums, RequestBlocks, SumRequest
from hybridpd_geometry.checksums import MASK, weight

logger = logging.getLogger(__name__)

MODES: Mapping[str, int] = MappingProxyType({"off": 0, "sample": 128, "all": 1})
"""Mode -> of how many prefills one is summed, 0 for none. Fewer than 1 in 100, so that waiting for
P's sums stays out of a 99th percentile."""

MARK = 0x48504453_00000001
"""``HPDS``, and the version of what a sum is."""

HEADER_WORDS = 4
WORD_BYTES = 8
PAGE_BYTES = 4096
ALL_SLOTS = 1024
"""More than prefills wait for a reader: in mode "all" a load whose slot was reused fails."""
SAMPLE_SLOTS = 32
MAX_SLOTS = 65536
MAX_EVERY = 1 << 20
SCRATCH_PAGES = 2048


def mode_of(every: int) -> str:
    """The name of a rate."""
    names = {rate: mode for mode, rate in MODES.items()}
    return names.get(every, f"1 of {every}")


class PendingSums(Protocol):
    """Sums that a device is computing."""

    def words(self) -> Sequence[int] | None:
        """The row, 64-bit words without sign; None while it is not finished. Never waits."""


class Summer(Protocol):
    """Sums this rank's cache where it is; ``device_sums`` does it with the engine's device."""

    def allocate(self, size_bytes: int) -> int:
        """Address of zeroed host memory that lives as long as the summer."""

    def publish(self, request: SumRequest, sequence: int, address: int) -> None:
        """Fill the slot at ``address`` (in memory from ``allocate``), in order with the engine's
        work and perhaps later. ``SumError`` when the device cannot."""

    def start(self, request: SumRequest) -> PendingSums:
        """Sum, in order with the engine's work. ``SumError`` when the device cannot."""


def seal_of(sequence: int, words: Sequence[int]) -> int:
    """The seal of a row: changes with every word and with the sequence."""
    total = sum(weight(index) * word for index, word in enumerate(words))
    return (total + weight(len(words)) * sequence) & MASK


def slot_pages(sums: RankSums) -> int:
    """Pages of ``PAGE_BYTES`` of a slot that takes the longest row."""
    return -(-(HEADER_WORDS + sums.capacity) * WORD_BYTES // PAGE_BYTES)


def slot_of(sequence: int, every: int, slots: int) -> int:
    """The slot of a prefill that is summed."""
    return sequence // every % slots


class SumBoard:
    """P rank's board: ``slots`` slots, zero at first."""

    def __init__(self, summer: Summer, layout: CacheLayout, every: int) -> None:
        self._summer = summer
        self._sums = RankSums(layout, layout.tp_size)
        self._slot_bytes = slot_pages(self._sums) * PAGE_BYTES
        self._warned = False
        self.every = every
        self.slots = ALL_SLOTS if every == MODES["all"] else SAMPLE_SLOTS
        self.address = summer.allocate(self.slots * self._slot_bytes)

    def region(self) -> MemoryRegion:
        """What the rank's agent must register before its metadata is handed out."""
        return MemoryRegion(self.address, self.slots * self._slot_bytes)

    def state(self, sequence: int, tokens: int, blocks: tuple[tuple[int, ...], ...]) -> None:
        """Sum a finished prefill, if its number says so. A failure leaves the slot as it is."""
        if sequence % self.every or not blocks:
            return
        chunk_tokens = self._sums.chunk_tokens(tokens)
        request = SumRequest(tokens, RequestBlocks(blocks), self._sums.pieces_tp, chunk_tokens)
        slot = slot_of(sequence, self.every, self.slots)
        try:
            self._summer.publish(request, sequence, self.address + slot * self._slot_bytes)
        except SumError as error:
            if not self._warned:
                self._warned = True
                logger.warning("prefills are not summed (told once): %s", error)


class SlotHeader(NamedTuple):
    """The first words of a slot."""

    mark: int
    sequence: int
    words: int
    seal: int


@dataclasses.dataclass(frozen=True)
class SumView:
    """A peer rank's board as this rank can read it; owned by whoever attached it."""

    peer: str
    slots: int
    every: int
    pages: int
    remote: PreparedList


@dataclasses.dataclass
class SlotRead:
    """One slot on its way; ends with ``SumReader.finish``."""

    view: SumView
    pages: list[int]
    words: int
    read: PostedRead


class SumReader:
    """D rank's side: reads slots of peers' boards into scratch pages of its own."""

    def __init__(self, agent: Agent, pages: int = SCRATCH_PAGES, *, required: bool = False) -> None:
        """``required``: a load that cannot be compared is not used (mode "all")."""
        self.required = required
        self._agent = agent
        self._scratch = (ctypes.c_uint64 * (pages * PAGE_BYTES // WORD_BYTES))()
        self._free = list(range(pages))
        self._pages = pages
        address = ctypes.addressof(self._scratch)
        agent.register([MemoryRegion(address, pages * PAGE_BYTES)])
        self._local = agent.prepare(
            None, [(address, PAGE_BYTES, 0, PAGE_BYTES, pages)], Memory.DRAM
        )

    def __repr__(self) -> str:
        return f"SumReader(pages_used={self.pages_used}, pages={self._pages})"

    @property
    def pages_used(self) -> int:
        return self._pages - len(self._free)

    def attach(self, peer: str, address: int, slots: int, every: int, sums: RankSums) -> SumView:
        """Prepare a peer's board for reading; give it back with ``detach``."""
        pages = slot_pages(sums)
        row = (address, PAGE_BYTES, 0, PAGE_BYTES, slots * pages)
        return SumView(peer, slots, every, pages, self._agent.prepare(peer, [row], Memory.DRAM))

    def detach(self, view: SumView) -> None:
        self._agent.release_list(view.remote)

    def start(self, view: SumView, sequence: int, words: int) -> SlotRead | None:
        """Post the read of a slot with ``words`` sums; None while too many are being read.

        ``AgentError`` when it cannot be posted.
        """
        count = min(view.pages, -(-(HEADER_WORDS + words) * WORD_BYTES // PAGE_BYTES))
        if len(self._free) < count:
            return None
        pages = [self._free.pop() for _ in range(count)]
        first = slot_of(sequence, view.every, view.slots) * view.pages
        try:
            read = self._agent.post_read(
                self._local, pages, view.remote, list(range(first, first + count))
            )
        except BaseException:
            self._free.extend(pages)
            raise
        return SlotRead(view, pages, words, read)

    def poll(self, slot: SlotRead) -> ReadState:
        return self._agent.poll(slot.read)

    def take(self, slot: SlotRead) -> tuple[SlotHeader, "array.array[int]"]:
        """Header and sums of a slot whose read is DONE; as many sums as were asked for."""
        words = array.array("Q")
        first = ctypes.addressof(self._scratch)
        for page in slot.pages:
            # Whole pages: word by word it would hold a step up for milliseconds.
            words.frombytes(ctypes.string_at(first + page * PAGE_BYTES, PAGE_BYTES))
        header = SlotHeader(*words[:HEADER_WORDS])
        return header, words[HEADER_WORDS : HEADER_WORDS + slot.words]

    def finish(self, slot: SlotRead) -> bool:
        """Give a read back; False while it is still in flight (call again)."""
        if not self._agent.release_read(slot.read):
            return False
        self._free.extend(slot.pages)
        return True
