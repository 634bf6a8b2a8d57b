"""The in-memory agent: same contract as ``agent.NixlAgent``, for tests and for trying things out.

Agents of one ``FakeNetwork`` read each other's registered memory (real addresses of this process)
and can be told to misbehave, per network:

    network.delay_reads(polls)          every read ends only at its n-th poll
    network.fail_reads(count)           the next reads end as FAILED, half written
    network.hang_reads(peer)            reads from this peer stay in flight until ``resume(peer)``
    network.lose_notifications(count)   the next notifications vanish
    network.hold_notifications()        notifications leave when their sender makes progress
    network.refuse_posts(count)         the next posts raise
    network.kill(peer)                  the peer is gone: its reads fail, messages to it raise

Bytes move at the poll that ends a read, which is the latest moment the contract allows: whoever
frees memory too early finds out.
"""

import ctypes
import itertools
import threading
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hybridpd_connector.agent_api import (
    Ids,
    Memory,
    MemoryRegion,
    Notification,
    PostedRead,
    PreparedList,
    Ranges,
    ReadState,
    ReadTelemetry,
    Rows,
)
from hybridpd_connector.errors import AgentError, PeerLostError, StateError

_Handle = TypeVar("_Handle")
Integers = npt.NDArray[np.int64]

_METADATA_TAG = b"hybridpd-fake-agent:"
_INT32_MAX = (1 << 31) - 1


class FakeNetwork:
    """What the fake agents of one test share: who exists, and what goes wrong next."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.agents: dict[str, FakeAgent] = {}
        self.read_polls = 1
        self.failing_reads = 0
        self.refused_posts = 0
        self.lost_notifications = 0
        self.notifications_wait = False
        self.hanging: set[str] = set()
        self.dead: set[str] = set()

    def delay_reads(self, polls: int) -> None:
        self.read_polls = polls

    def fail_reads(self, count: int) -> None:
        self.failing_reads = count

    def refuse_posts(self, count: int) -> None:
        self.refused_posts = count

    def lose_notifications(self, count: int) -> None:
        self.lost_notifications = count

    def hold_notifications(self) -> None:
        self.notifications_wait = True

    def hang_reads(self, peer: str) -> None:
        self.hanging.add(peer)

    def resume(self, peer: str) -> None:
        self.hanging.discard(peer)

    def kill(self, peer: str) -> None:
        with self.lock:
            self.dead.add(peer)
            self.hanging.discard(peer)

    def deliver(self, receiver: str, notification: Notification) -> None:
        if self.lost_notifications:
            self.lost_notifications -= 1
        elif receiver in self.agents:
            self.agents[receiver].inbox.append(notification)


class _FakeList:
    def __init__(self, peer: str | None, rows: Integers, memory: Memory) -> None:
        self.peer = peer
        self.memory = memory
        self.rows = rows
        self.first_ids = np.concatenate(([0], np.cumsum(rows[:, 4])))
        self.descriptor_count = int(self.first_ids[-1])
        self.reads = 0
        self.released = False

    def pieces(self, ids: Integers) -> tuple[Integers, Integers, Integers]:
        """(address, length, row if dense else a number of its own) of each id."""
        row = np.searchsorted(self.first_ids, ids, side="right") - 1
        chosen = self.rows[row]
        address = chosen[:, 0] + (ids - self.first_ids[row]) * chosen[:, 3]
        dense = chosen[:, 1] == chosen[:, 3]
        return address, chosen[:, 1], np.where(dense, row, -1 - np.arange(len(ids)))


class _FakeRead:
    def __init__(self, local: _FakeList, remote: _FakeList, notify: bytes) -> None:
        self.local = local
        self.remote = remote
        self.notify = notify
        self.copies: list[tuple[int, int, int]] = []
        self.descriptors = 0
        self.polls = 0
        self.fails = False
        self.state = ReadState.PENDING
        self.released = False


class FakeAgent:
    """``agent_api.Agent`` in memory."""

    def __init__(self, name: str, network: FakeNetwork) -> None:
        self.name = name
        self.inbox: list[Notification] = []
        self._outbox: list[tuple[str, Notification]] = []
        self._network = network
        self._regions: list[MemoryRegion] = []
        self._peers: set[str] = set()
        self._reads: list[_FakeRead] = []
        self._lists: list[_FakeList] = []
        network.agents[name] = self

    def __repr__(self) -> str:
        return (
            f"FakeAgent({self.name}, peers={len(self._peers)}, lists={len(self._lists)}, "
            f"reads={len(self._reads)})"
        )

    @property
    def open_reads(self) -> int:
        """Reads posted and not yet released."""
        return len(self._reads)

    @property
    def open_lists(self) -> int:
        """Lists prepared and not yet released."""
        return len(self._lists)

    @property
    def peers(self) -> frozenset[str]:
        return frozenset(self._peers)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._regions.extend(regions)

    def metadata(self) -> bytes:
        return _METADATA_TAG + self.name.encode()

    def add_peer(self, metadata: bytes) -> str:
        tag, _, name = metadata.partition(b":")
        if (
            tag + b":" != _METADATA_TAG
            or name.decode("utf-8", "replace") not in self._network.agents
        ):
            raise AgentError(f"agent {self.name}", "to add a peer", "unknown metadata")
        peer = name.decode()
        if peer in self._network.dead:
            raise PeerLostError(f"agent {self.name}", f"to add peer {peer}", "it is gone")
        self._peers.add(peer)
        return peer

    def remove_peer(self, name: str) -> None:
        reads = sum(r.remote.peer == name for r in self._reads if r.state is ReadState.PENDING)
        if reads:
            raise AgentError(f"peer {name}", "no read in flight", reads)
        self._peers.discard(name)

    def prepare(self, peer: str | None, rows: Rows, memory: Memory) -> PreparedList:
        array = np.array(rows, dtype=np.int64)
        if array.ndim != 2 or array.shape[1] != 5 or not len(array):
            raise AgentError("rows", "N x 5 with N > 0", array.shape)
        if peer is not None and peer not in self._peers:
            raise AgentError("peer", "a known one", peer)
        owner = self if peer is None else self._network.agents[peer]
        for address, length, device, stride, count in array.tolist():
            size = (count - 1) * stride + length
            if not owner._covers(address, size, device, memory):
                raise AgentError("row", "inside registered memory", (hex(address), size))
        prepared = _FakeList(peer, array, memory)
        self._lists.append(prepared)
        return prepared

    def release_list(self, prepared: PreparedList) -> None:
        mine = _own(prepared, _FakeList)
        if mine.released:
            raise StateError("prepared list", "released once", "released again")
        if mine.reads:
            raise AgentError("prepared list", "no read in flight", mine.reads)
        mine.released = True
        self._lists.remove(mine)

    def post_read(
        self,
        local: PreparedList,
        local_ids: Ids,
        remote: PreparedList,
        remote_ids: Ids,
        notify: bytes = b"",
    ) -> PostedRead:
        here, there = _own(local, _FakeList), _own(remote, _FakeList)
        if here.released or there.released:
            raise StateError("prepared list", "in use", "released")
        mine, theirs = _ids(here, local_ids), _ids(there, remote_ids)
        if len(mine) != len(theirs) or not len(mine):
            raise AgentError("ids", "equally many, and some", (len(mine), len(theirs)))
        read = _FakeRead(here, there, notify)
        read.copies, read.descriptors = _copies(here, mine, there, theirs)
        return self._start(read)

    def post_ranges(self, local: PreparedList, remote: PreparedList, ranges: Ranges) -> PostedRead:
        here, there = _own(local, _FakeList), _own(remote, _FakeList)
        if here.released or there.released:
            raise StateError("prepared list", "in use", "released")
        array = np.array(ranges, dtype=np.int64)
        if array.ndim != 2 or array.shape[1] != 3 or not len(array):
            raise AgentError("ranges", "N x 3 with N > 0", array.shape)
        read = _FakeRead(here, there, b"")
        for destination, source, size in array.tolist():
            for prepared, address in ((here, destination), (there, source)):
                owner = self if prepared.peer is None else self._network.agents.get(prepared.peer)
                device = int(prepared.rows[0, 2])
                if owner is not None and not owner._covers(address, size, device, prepared.memory):
                    raise AgentError("range", "inside registered memory", (hex(address), size))
            read.copies.append((source, destination, size))
        read.descriptors = len(array)
        return self._start(read)

    def _start(self, read: _FakeRead) -> PostedRead:
        peer = read.remote.peer
        with self._network.lock:
            if peer in self._network.dead:
                raise PeerLostError(f"agent {self.name}", f"to read from {peer}", "it is gone")
            if self._network.refused_posts:
                self._network.refused_posts -= 1
                raise AgentError(f"agent {self.name}", "to post a read", "told to refuse")
            if self._network.failing_reads:
                self._network.failing_reads -= 1
                read.fails = True
            self._reads.append(read)
        read.local.reads += 1
        read.remote.reads += 1
        return read

    def poll(self, read: PostedRead) -> ReadState:
        mine = _own(read, _FakeRead)
        with self._network.lock:
            if mine.state is ReadState.PENDING:
                self._progress(mine)
        return mine.state

    def telemetry(self, read: PostedRead) -> ReadTelemetry:
        mine = _own(read, _FakeRead)
        if mine.state is not ReadState.DONE or mine.released:
            raise StateError("telemetry", "of a read that is done and not released", mine.state)
        return ReadTelemetry(
            sum(length for _, _, length in mine.copies), mine.descriptors, 0.0, 0.0
        )

    def release_read(self, read: PostedRead) -> bool:
        mine = _own(read, _FakeRead)
        if mine.released:
            raise StateError("posted read", "released once", "released again")
        if mine.state is ReadState.PENDING:
            return False
        mine.released = True
        self._reads.remove(mine)
        return True

    def send_notification(self, peer: str, payload: bytes) -> None:
        with self._network.lock:
            if peer in self._network.dead:
                raise PeerLostError(f"agent {self.name}", f"to notify {peer}", "it is gone")
            if peer not in self._peers:
                raise AgentError(f"agent {self.name}", f"to notify {peer}", "unknown peer")
            self._outbox.append((peer, Notification(self.name, payload)))
            if not self._network.notifications_wait:
                self._send_waiting()

    def take_notifications(self) -> list[Notification]:
        with self._network.lock:
            self._send_waiting()
            taken, self.inbox = self.inbox, []
        return taken

    def close(self) -> None:
        self._network.agents.pop(self.name, None)

    def _send_waiting(self) -> None:
        while self._outbox:
            self._network.deliver(*self._outbox.pop(0))

    def _progress(self, read: _FakeRead) -> None:
        read.polls += 1
        peer = read.remote.peer
        if peer in self._network.hanging or read.polls < self._network.read_polls:
            return
        failed = read.fails or peer in self._network.dead
        copies = read.copies[: len(read.copies) // 2] if failed else read.copies
        for source, destination, length in copies:
            ctypes.memmove(destination, source, length)
        read.state = ReadState.FAILED if failed else ReadState.DONE
        read.local.reads -= 1
        read.remote.reads -= 1
        if read.notify and not failed and peer is not None:
            self._network.deliver(peer, Notification(self.name, read.notify))

    def _covers(self, address: int, size: int, device: int, memory: Memory) -> bool:
        return any(
            region.memory is memory
            and region.device_id == device
            and region.address <= address
            and address + size <= region.address + region.length_bytes
            for region in self._regions
        )


def _ids(prepared: _FakeList, ids: Ids) -> Integers:
    array = np.array(ids, dtype=np.int64)
    if len(array) and (array.min() < 0 or array.max() >= prepared.descriptor_count):
        raise AgentError("ids", f"from 0 to {prepared.descriptor_count - 1}", "outside")
    if prepared.descriptor_count > _INT32_MAX:
        raise AgentError("ids", "an int32 range", prepared.descriptor_count)
    return array


def _copies(
    here: _FakeList, mine: Integers, there: _FakeList, theirs: Integers
) -> tuple[list[tuple[int, int, int]], int]:
    """((source, destination, length) per id pair, number of descriptors after merging)."""
    destination, length, own_row = here.pieces(mine)
    source, remote_length, their_row = there.pieces(theirs)
    if not np.array_equal(length, remote_length):
        raise AgentError("ids", "pairs of equal length", "unequal lengths")
    merges = sum(
        bool(
            own_row[a] == own_row[b]
            and their_row[a] == their_row[b]
            and mine[b] == mine[a] + 1
            and theirs[b] == theirs[a] + 1
        )
        for a, b in itertools.pairwise(range(len(mine)))
    )
    copies = list(zip(source.tolist(), destination.tolist(), length.tolist(), strict=True))
    return copies, len(mine) - merges


def _own(handle: object, kind: type[_Handle]) -> _Handle:
    if not isinstance(handle, kind):
        raise StateError("handle", f"a {kind.__name__} of this agent", type(handle).__name__)
    return handle
