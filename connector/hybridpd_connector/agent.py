"""The transfer agent over NIXL, the only module that imports it. Contract: ``agent_api``.

Facts of NIXL 1.5.1 this relies on, each held by ``connector/tests_vllm/test_vllm_agent_real.py``:
- ``prep_xfer_dlist`` takes N x 5 strided rows; ids are checked against them by ``makeXferReq``.
- Neighbouring ids of dense rows are merged by NIXL; telemetry counts descriptors after that.
- A prepared list outside the registered memory is refused when it is prepared.
- Its progress thread waits for events when ``pthrDelay`` is above 0, and spins at 0.
- The agent is not thread-safe by itself: every call here is made under one lock.
- Releasing a handle in flight, or invalidating its peer, does not end the read: neither is done.
- ``getXferStatus`` answers "not found" for a peer whose metadata was loaded again, whatever the
  read does: a known peer's metadata is never loaded twice.
"""

import contextlib
import hashlib
import importlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

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
from hybridpd_connector.agent_call import AgentCall
from hybridpd_connector.agent_forks import outlive_forks
from hybridpd_connector.agent_readers import outlive_readers
from hybridpd_connector.agent_resets import SILENCE_SECONDS
from hybridpd_connector.errors import AgentError, StateError

_Handle = TypeVar("_Handle")

logger = logging.getLogger(__name__)

_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
_OURSELVES = "NIXL_INIT_AGENT"
_MICROSECONDS = 1e-6
# An agent's metadata begins with its name; what follows is opaque here.
_HEAD_BYTES = 4096
# Names of our agents are as long and random. A short one may stand in anybody's bytes by chance.
_TELLING = 16
_PROGRESS_DELAY_MICROSECONDS = 100_000
_MAKING_AGENTS = threading.Lock()


def load_nixl() -> Any:
    """NIXL's Python API module, whichever build is installed."""
    failures = []
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            failures.append(f"{name}: {error}")
    way_out = "install nixl>=1.5 in the engine image"
    raise AgentError("nixl", "an importable NIXL 1.5", "; ".join(failures), way_out)


class _NixlList:
    """Prepared list of NIXL; ``reads`` counts the reads in flight that use it."""

    def __init__(
        self, handle: Any, peer: str | None, descriptor_count: int, place: tuple[str, int]
    ) -> None:
        """``place``: kind of memory and device of its rows."""
        self.handle = handle
        self.peer = peer
        self.descriptor_count = descriptor_count
        self.place = place
        self.reads = 0
        self.released = False

    def __repr__(self) -> str:
        return (
            f"PreparedList(peer={self.peer}, descriptors={self.descriptor_count}, "
            f"reads={self.reads}, released={self.released})"
        )


class _NixlRead:
    """Posted read of NIXL, with the lists it uses."""

    def __init__(self, handle: Any, local: _NixlList, remote: _NixlList) -> None:
        self.handle = handle
        self.local = local
        self.remote = remote
        self.state = ReadState.PENDING
        self.released = False

    def __repr__(self) -> str:
        return f"PostedRead(peer={self.remote.peer}, {self.state.value}, released={self.released})"


class NixlAgent:
    """``agent_api.Agent`` over one NIXL agent.

    ``progress_thread``: for producers. NIXL's thread then answers readers, whatever this process
    is doing; it sleeps until something arrives (``benchmarks/agent_progress.py`` has the figures).
    Readers do without: polling makes their progress, and the thread would only be in its way.
    ``outlives``: readers that it answers, and that are silent for so many seconds; 0: UCX alone.
    """

    def __init__(
        self,
        name: str,
        backends: Sequence[str] = ("UCX",),
        *,
        progress_thread: bool = False,
        outlives: float = SILENCE_SECONDS,
    ) -> None:
        nixl = load_nixl()
        self.name = name
        self._lock = threading.RLock()
        self._registered: list[Any] = []
        self._peers: dict[str, bytes] = {}
        self._reads_of_peer: dict[str, int] = {}
        self._lists = 0
        self._closed = False
        making, outlives = self._call("create the agent"), outlives if progress_thread else 0
        with making, _progress_delay(nixl.nixlBind), outlive_readers(outlives):
            config = nixl.nixl_agent_config(
                enable_prog_thread=progress_thread,
                enable_listen_thread=False,
                capture_telemetry=True,
                backends=list(backends),
            )
            self._nixl = nixl.nixl_agent(name, config)
        outlive_forks(self._nixl)
        self._process = os.getpid()
        missing = [backend for backend in backends if backend not in self._nixl.backends]
        if missing:
            raise AgentError("backends", f"all of {list(backends)}", f"no {missing}")

    def __repr__(self) -> str:
        return (
            f"NixlAgent({self.name}, peers={len(self._peers)}, lists={self._lists}, "
            f"reads={sum(self._reads_of_peer.values())}, closed={self._closed})"
        )

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        for memory in Memory:
            rows = [
                (region.address, region.length_bytes, region.device_id)
                for region in regions
                if region.memory is memory
            ]
            if rows:
                with self._call(f"register {len(rows)} {memory.value} regions"):
                    array = np.array(rows, dtype=np.uint64)
                    self._registered.append(self._nixl.register_memory(array, memory.value))

    def metadata(self) -> bytes:
        with self._call("read the agent's metadata"):
            return bytes(self._nixl.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        digest = hashlib.sha256(metadata).digest()
        with self._call("add a peer"):
            for known, known_digest in self._peers.items():
                if known_digest == digest:
                    return known
                if len(known) >= _TELLING and known.encode() in metadata[:_HEAD_BYTES]:
                    # NIXL would mix it into the one we read from, or take that one down.
                    raise AgentError("peer", "an agent with a name of its own", known)
            loaded = self._nixl.add_remote_agent(metadata)
            name = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
            self._peers[name] = digest
            return name

    def remove_peer(self, name: str) -> None:
        with self._call(f"remove peer {name}"):
            if reads := self._reads_of_peer.get(name, 0):
                raise AgentError(f"peer {name}", "no read in flight", reads)
            if self._peers.pop(name, None) is not None:
                self._nixl.remove_remote_agent(name)

    def prepare(self, peer: str | None, rows: Rows, memory: Memory) -> PreparedList:
        array = np.ascontiguousarray(rows, dtype=np.uint64)
        if array.ndim != 2 or array.shape[1] != 5 or not len(array):
            raise AgentError("rows", "N x 5 with N > 0", array.shape)
        with self._call(f"prepare {len(array)} rows of {peer or 'our memory'}"):
            handle = self._nixl.prep_xfer_dlist(peer or _OURSELVES, array, memory.value)
            self._lists += 1
            return _NixlList(handle, peer, int(array[:, 4].sum()), (memory.value, int(array[0, 2])))

    def release_list(self, prepared: PreparedList) -> None:
        mine = _own(prepared, _NixlList)
        with self._call("release a prepared list"):
            if mine.released:
                raise StateError("prepared list", "released once", "released again")
            if mine.reads:
                raise AgentError("prepared list", "no read in flight", mine.reads)
            mine.released = True
            self._lists -= 1
            mine.handle.release()

    def post_read(
        self,
        local: PreparedList,
        local_ids: Ids,
        remote: PreparedList,
        remote_ids: Ids,
        notify: bytes = b"",
    ) -> PostedRead:
        here, there = _own(local, _NixlList), _own(remote, _NixlList)
        with self._call(f"post a read from {there.peer}"):
            if here.released or there.released:
                raise StateError("prepared list", "in use", "released")
            handle = self._nixl.make_prepped_xfer(
                "READ", here.handle, _int32(local_ids), there.handle, _int32(remote_ids), notify
            )
            return self._start(_NixlRead(handle, here, there))

    def post_ranges(self, local: PreparedList, remote: PreparedList, ranges: Ranges) -> PostedRead:
        here, there = _own(local, _NixlList), _own(remote, _NixlList)
        with self._call(f"post a read from {there.peer}"):
            if here.released or there.released:
                raise StateError("prepared list", "in use", "released")
            (kind, device), (their_kind, their_device) = here.place, there.place
            ours, theirs = _described(ranges, device, their_device)
            handle = self._nixl.initialize_xfer(
                "READ",
                self._nixl.get_xfer_descs(ours, kind),
                self._nixl.get_xfer_descs(theirs, their_kind),
                there.peer or self.name,
            )
            return self._start(_NixlRead(handle, here, there))

    def _start(self, read: _NixlRead) -> PostedRead:
        try:
            status = self._nixl.transfer(read.handle)
        except Exception:
            read.handle.release()
            raise
        self._count(read, +1)
        self._settle(read, status)
        return read

    def poll(self, read: PostedRead) -> ReadState:
        mine = _own(read, _NixlRead)
        with self._lock:
            if mine.state is ReadState.PENDING:
                self._settle(mine, self._status(mine))
            return mine.state

    def telemetry(self, read: PostedRead) -> ReadTelemetry:
        mine = _own(read, _NixlRead)
        with self._call("read a transfer's telemetry"):
            if mine.state is not ReadState.DONE or mine.released:
                raise StateError("telemetry", "of a read that is done and not released", mine)
            counted = self._nixl.get_xfer_telemetry(mine.handle)
            return ReadTelemetry(
                total_bytes=int(counted.totalBytes),
                descriptors=int(counted.descCount),
                post_seconds=float(counted.postDuration) * _MICROSECONDS,
                noticed_seconds=float(counted.xferDuration) * _MICROSECONDS,
            )

    def release_read(self, read: PostedRead) -> bool:
        mine = _own(read, _NixlRead)
        with self._call("release a read"):
            if mine.released:
                raise StateError("posted read", "released once", "released again")
            if mine.state is ReadState.PENDING:
                return False
            mine.released = True
            try:
                mine.handle.release()
            except Exception as error:
                logger.warning("a handle of %s stays with NIXL: %r", mine.remote.peer, error)
            return True

    def send_notification(self, peer: str, payload: bytes) -> None:
        with self._call(f"notify {peer}"):
            self._nixl.send_notif(peer, payload)

    def take_notifications(self) -> list[Notification]:
        with self._call("take notifications"):
            arrived = self._nixl.get_new_notifs()
        return [
            Notification(_text(sender), bytes(payload))
            for sender, payloads in arrived.items()
            for payload in payloads
        ]

    def close(self) -> None:
        if self._process != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for name in [name for name in self._peers if not self._reads_of_peer.get(name)]:
                with contextlib.suppress(AgentError):
                    self.remove_peer(name)
            # With a read in flight the memory stays registered: it may still be written.
            if not any(self._reads_of_peer.values()):
                for registered in self._registered:
                    try:
                        self._nixl.deregister_memory(registered)
                    except Exception as error:
                        logger.warning("agent %s: memory stays registered: %r", self.name, error)
            self._registered.clear()

    def _status(self, read: _NixlRead) -> str:
        try:
            return str(self._nixl.check_xfer_state(read.handle))
        except Exception as error:
            if type(error).__name__ == "nixlNotFoundError":
                # Says nothing about the read itself: keep what it writes to until it ends.
                logger.warning("read from %s: its peer is unknown to NIXL", read.remote.peer)
                return "PROC"
            # Who needed it says so; under a dead peer there may be many.
            logger.info("read from %s failed: %s", read.remote.peer, error)
            return "ERR"

    def _settle(self, read: _NixlRead, status: str) -> None:
        if status == "PROC":
            return
        read.state = ReadState.DONE if status == "DONE" else ReadState.FAILED
        self._count(read, -1)

    def _count(self, read: _NixlRead, change: int) -> None:
        read.local.reads += change
        read.remote.reads += change
        peer = read.remote.peer or self.name
        self._reads_of_peer[peer] = self._reads_of_peer.get(peer, 0) + change
        if not self._reads_of_peer[peer]:
            del self._reads_of_peer[peer]

    def _call(self, what: str) -> AgentCall:
        return AgentCall(self.name, self._lock, what)


@contextlib.contextmanager
def _progress_delay(bindings: Any) -> Iterator[None]:
    """Agents made in here get a progress thread that sleeps instead of spinning.

    NIXL's core waits up to ``pthrDelay`` microseconds for an event, but its Python API fixes that
    at 0, a busy loop. The configuration object is reachable only where the agent is made from it.
    """
    with _MAKING_AGENTS:
        make_agent = bindings.nixlAgent

        def with_delay(name: str, config: Any) -> Any:
            config.pthrDelay = _PROGRESS_DELAY_MICROSECONDS
            return make_agent(name, config)

        bindings.nixlAgent = with_delay
        try:
            yield
        finally:
            bindings.nixlAgent = make_agent


def _text(name: Any) -> str:
    """A name that a peer has chosen."""
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def _described(ranges: Ranges, device: int, their_device: int) -> tuple[Any, Any]:
    """(address, length, device) of both sides: as tuples where ranges come as such, which are few,
    else as arrays."""
    if isinstance(ranges, Sequence):
        if not ranges:
            raise AgentError("ranges", "N x 3 with N > 0", "none")
        return (
            [(at, length, device) for at, _, length in ranges],
            [(at, length, their_device) for _, at, length in ranges],
        )
    table = np.asarray(ranges, dtype=np.uint64)
    if table.ndim != 2 or table.shape[1] != 3 or not len(table):
        raise AgentError("ranges", "N x 3 with N > 0", table.shape)
    described = np.empty((2, len(table), 3), dtype=np.uint64)
    described[:, :, 0] = table[:, :2].T
    described[:, :, 1] = table[:, 2]
    described[0, :, 2], described[1, :, 2] = device, their_device
    return described[0], described[1]


def _int32(ids: Ids) -> Any:
    """Ids as NIXL takes them; plain lists are few and go as they are."""
    return ids if isinstance(ids, list) else np.ascontiguousarray(ids, dtype=np.int32)


def _own(handle: object, kind: type[_Handle]) -> _Handle:
    if not isinstance(handle, kind):
        raise StateError("handle", f"a {kind.__name__} of this agent", type(handle).__name__)
    return handle
