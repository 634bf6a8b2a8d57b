"""The boundary to the transfer library: what the connector needs of NIXL, and nothing else.

Memory
    ``register`` hands address ranges to the agent; they must stay mapped until ``close``. An agent
    reads *into* registered local memory *from* registered memory of a peer. Nothing is copied or
    allocated here: an address that was not registered is an ``AgentError``, not a fault.

    A prepared list numbers descriptors of equal standing: row ``(address, length, device, stride,
    count)`` stands for ``count`` pieces of ``length`` bytes, ``stride`` bytes apart, and rows are
    numbered one after the other. Worked example: rows ``(A, 64, 0, 64, 10)`` and
    ``(B, 128, 0, 4096, 3)`` give ids 0-9 in A (dense) and ids 10-12 at B, B+4096, B+8192.

Lifecycle
    register -> metadata -> [peer side: add_peer] -> prepare (once per side) -> post_read -> poll
    until it is not PENDING -> release_read -> release_list -> remove_peer -> close.
    Every handle has one owner, who releases it exactly once. Nothing a read in flight uses may be
    given back: ``release_read`` says False (call again), ``release_list`` of its lists and
    ``remove_peer`` of its peer raise. There is no cancelling. NIXL 1.5.1 offers it, and so does
    removing the peer, but both only forget the read: with a paused peer over TCP the destination
    was still written after either (benchmarks/late_write.py shows it). A read ends when the peer
    answers, or when the transport declares it gone.

Failure
    A *call* that fails raises ``AgentError`` (``PeerLostError`` when the peer is known to be gone)
    and leaves nothing behind. A *read* that fails is reported by ``poll`` as FAILED; FAILED means
    ended: no byte of the destination is written after it. What was written before is undefined.
    A notification may be lost with its peer; it is never delivered twice or in part, and those of
    one sender arrive in order. ``send_notification`` returning is not proof of arrival.

Threads
    Every method may be called from any thread; calls exclude each other. No method waits for a
    peer. A peer's read of our memory can need our side to make progress (first contact always
    does), and so can our own messages before they leave: ``poll`` and ``take_notifications`` make
    progress. A producer cannot wait for its engine to call them, so its agent must make progress
    by itself (``agent.NixlAgent(progress_thread=True)``, or ``progress.Pump`` over any agent).
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Memory(enum.Enum):
    """Kind of memory behind an address."""

    DRAM = "DRAM"
    VRAM = "VRAM"


class ReadState(enum.Enum):
    """How a posted read stands. DONE and FAILED are final: the agent touches no byte afterwards."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class MemoryRegion:
    """One address range of this process: ``[address, address + length_bytes)`` on a device."""

    address: int
    length_bytes: int
    device_id: int = 0
    memory: Memory = Memory.DRAM


@dataclasses.dataclass(frozen=True)
class Notification:
    """One message from ``sender`` (the peer's agent name, as the agent reports it: unverified)."""

    sender: str
    payload: bytes


class ReadTelemetry(NamedTuple):
    """What the transfer library itself counted for one finished read.

    ``descriptors`` is after its own merging of neighbours. ``post_seconds`` was spent inside the
    post; ``noticed_seconds`` runs from the post until the poll that noticed the end.
    """

    total_bytes: int
    descriptors: int
    post_seconds: float
    noticed_seconds: float


class IntArray(Protocol):
    """A numpy integer array, named without importing numpy here."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...


Ids = IntArray | Sequence[int]
"""Descriptor ids: an int32 array (used as it is) or any sequence of ints."""

Rows = IntArray | Sequence[tuple[int, int, int, int, int]]
"""Descriptor rows (address, length, device, stride, count), addresses and sizes in bytes."""

Ranges = IntArray | Sequence[tuple[int, int, int]]
"""Pieces of a read: (our address, the peer's address, length in bytes)."""


class PreparedList(Protocol):
    """Handle of one prepared descriptor list."""

    @property
    def peer(self) -> str | None:
        """Peer whose memory the list describes; None for our own."""

    @property
    def descriptor_count(self) -> int:
        """Ids run from 0 up to this, exclusive."""


class PostedRead(Protocol):
    """Handle of one posted read."""

    @property
    def released(self) -> bool:
        """True once ``release_read`` has said True."""


class Agent(Protocol):
    """One transfer agent of one rank. See the module for memory, lifecycle, failure, threads."""

    @property
    def name(self) -> str:
        """Unique name; peers see it as the sender of our notifications."""

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make the ranges readable by peers and usable as destinations. Only grows."""

    def metadata(self) -> bytes:
        """What a peer needs to read our registered memory. Secret: it grants access to it."""

    def add_peer(self, metadata: bytes) -> str:
        """Learn a peer from its ``metadata``; returns its name. Adding it again changes nothing."""

    def remove_peer(self, name: str) -> None:
        """Forget a peer and close its connections. Unknown names are ignored.

        ``AgentError`` while a read from it is in flight.
        """

    def prepare(self, peer: str | None, rows: Rows, memory: Memory) -> PreparedList:
        """Number descriptors of our memory (``peer`` None) or of a peer's.

        ``rows``: N x 5 integers (address, length, device, stride, count), see the module.
        """

    def release_list(self, prepared: PreparedList) -> None:
        """Give a list back, exactly once. ``AgentError`` while a read in flight uses it."""

    def post_read(
        self,
        local: PreparedList,
        local_ids: Ids,
        remote: PreparedList,
        remote_ids: Ids,
        notify: bytes = b"",
    ) -> PostedRead:
        """Start one read: ``local[local_ids[i]] <- remote[remote_ids[i]]`` for every i.

        Ids have equal, non-zero length; paired descriptors have equal length.
        ``notify`` (if any) reaches the peer after the last byte has been read, not before.
        """

    def post_ranges(self, local: PreparedList, remote: PreparedList, ranges: Ranges) -> PostedRead:
        """Start one read of plain ranges, each of them one descriptor, whatever its length.

        The lists say whose memory it is, of which kind and on which device, and cannot be given
        back before the read has ended. ``ranges``: N x 3 integers with N > 0. A range outside
        registered memory is an ``AgentError``.
        """

    def poll(self, read: PostedRead) -> ReadState:
        """Make progress and say how the read stands. Never waits."""

    def telemetry(self, read: PostedRead) -> ReadTelemetry:
        """Counts of a read that is DONE and not yet released."""

    def release_read(self, read: PostedRead) -> bool:
        """Give the handle back, after poll said DONE or FAILED. False: still in flight."""

    def send_notification(self, peer: str, payload: bytes) -> None:
        """Send one message to a known peer, outside any read."""

    def take_notifications(self) -> list[Notification]:
        """Make progress and take everything that arrived since the last call."""

    def close(self) -> None:
        """Release everything that is left. Idempotent."""
