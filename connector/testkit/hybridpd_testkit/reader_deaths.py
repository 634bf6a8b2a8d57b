"""A producer that answers readers over TCP, in a process of its own, and readers that die.

``Producer`` runs until it is ended or UCX ends it: ``exit_code``. ``Reader`` reads every second of
its pieces, so that neighbours are not merged into one: many requests, each with an answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from hybridpd_connector import agent_readers
from hybridpd_connector.agent import NixlAgent
from hybridpd_connector.agent_api import Memory, MemoryRegion, ReadState
from hybridpd_connector.agent_resets import ignore_resets
from hybridpd_testkit.processes import enter_namespace

PIECE_BYTES = 16 * 1024
PIECES = 2048
FILL = 7
# UCX's requests lie in memory from malloc, which has anything in it. This has every byte of it
# 0xBA: as a UCX datatype, a list of buffers.
_FILLED, _FILLED_WITH = "MALLOC_PERTURB_", str(0xBA ^ 0xFF)
_PRODUCERS = multiprocessing.get_context("spawn")
# Readers are many: forked from a process that has imported all they need.
_READERS = multiprocessing.get_context("forkserver")
_READERS.set_forkserver_preload([__name__])
_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Where:
    """The network namespace of a process, and what its UCX is told."""

    namespace: str = ""
    ucx: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    )

    def enter(self) -> None:
        """Move this process, which has done nothing yet."""
        os.environ.update(self.ucx)
        if self.namespace:
            enter_namespace(self.namespace)


@dataclasses.dataclass(frozen=True)
class Mends:
    """Which of the agent's mends the producer has, and how long it bears silence."""

    resets: bool = True
    deregistration: bool = True
    silence_seconds: float = 180.0

    def apply(self) -> None:
        """To agents that this process makes from now on."""

        def ignore(listening: list[int], silence_seconds: float) -> None:
            if self.resets:
                ignore_resets(listening, silence_seconds)

        mock.patch.object(agent_readers, "ignore_resets", ignore).start()
        if not self.deregistration:
            mock.patch.object(agent_readers, "leave_out_deregistration", list).start()


def _memory() -> tuple[Any, int]:
    memory = (ctypes.c_uint8 * (PIECE_BYTES * PIECES))()
    return memory, ctypes.addressof(memory)


def _produce(pipe: Connection, mends: Mends, where: Where) -> None:
    where.enter()
    mends.apply()
    memory, address = _memory()
    ctypes.memset(memory, FILL, len(memory))
    name, silence_seconds = f"producer-of-deaths-{os.getpid()}", mends.silence_seconds
    agent = NixlAgent(name, progress_thread=True, outlives=silence_seconds)
    agent.register([MemoryRegion(address, len(memory))])
    pipe.send((agent.metadata(), address))
    pipe.recv()
    agent.close()
    pipe.send("closed")


@dataclasses.dataclass(frozen=True)
class _Order:
    """What a reader is told: whom to read, from where, and whether to stop itself then."""

    name: str
    metadata: bytes
    address: int
    where: Where
    stops: bool


def _read(pipe: Connection, order: _Order) -> None:
    order.where.enter()
    memory, here_at = _memory()
    agent = NixlAgent(order.name)
    agent.register([MemoryRegion(here_at, len(memory))])

    def prepare(peer: str | None, base: int) -> Any:
        return agent.prepare(peer, [(base, PIECE_BYTES, 0, PIECE_BYTES, PIECES)], Memory.DRAM)

    here, there = prepare(None, here_at), prepare(agent.add_peer(order.metadata), order.address)
    warm = agent.post_read(here, [0], there, [0])
    while agent.poll(warm) is ReadState.PENDING:
        pass
    pipe.send("met")
    pipe.recv()
    ids = list(range(1, PIECES, 2))
    read = agent.post_read(here, ids, there, ids)
    pipe.send("posted")
    if order.stops:
        os.kill(os.getpid(), signal.SIGSTOP)
    while agent.poll(read) is ReadState.PENDING:
        pass
    pipe.send((agent.poll(read), bytes(memory).count(FILL)))


def _hear(pipe: Connection) -> Any:
    """What the other process says; ``EOFError``: it has ended, its standard error says why."""
    if not pipe.poll(_SECONDS):
        raise TimeoutError(f"the other process said nothing for {_SECONDS:.0f} s")
    return pipe.recv()


class Reader:
    """A process that has met the producer and reads when told to."""

    def __init__(self, producer: Producer, where: Where = Where(), *, stops: bool = False) -> None:
        """``stops``: it stops itself when it has sent its requests."""
        self._pipe, theirs = _READERS.Pipe()
        name = f"reader-of-deaths-{time.monotonic_ns()}"
        order = _Order(name, producer.metadata, producer.address, where, stops)
        self._process = _READERS.Process(target=_read, args=(theirs, order), daemon=True)
        self._process.start()
        theirs.close()
        _hear(self._pipe)

    def post(self) -> None:
        """Send the requests."""
        self._pipe.send("read")
        _hear(self._pipe)

    def finish(self) -> tuple[ReadState, int]:
        """How the read ended, and the producer's bytes that have arrived."""
        state, count = _hear(self._pipe)
        self._process.join()
        return state, count

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class Producer:
    """Use ``producer()``."""

    def __init__(self, mends: Mends, where: Where) -> None:
        self._pipe, theirs = _PRODUCERS.Pipe()
        told = (theirs, mends, where)
        self._process = _PRODUCERS.Process(target=_produce, args=told, daemon=True)
        before = os.environ.get(_FILLED)
        os.environ[_FILLED] = _FILLED_WITH  # read when a process starts
        try:
            self._process.start()
        finally:
            del os.environ[_FILLED]
            if before is not None:
                os.environ[_FILLED] = before
        theirs.close()
        self.metadata, self.address = _hear(self._pipe)

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def settle(self, seconds: float) -> int | None:
        """Give it time to notice a death; its exit code when that ended it."""
        self._process.join(seconds)
        return self.exit_code

    def files(self) -> int:
        """Open files."""
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def resident_bytes(self) -> int:
        """Memory in use."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> int | None:
        """End it in order; its exit code."""
        if self.exit_code is None:
            self._pipe.send("close")
            assert _hear(self._pipe) == "closed"
            self._process.join()
        return self.exit_code

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextlib.contextmanager
def producer(mends: Mends = Mends(), where: Where = Where()) -> Iterator[Producer]:
    """A producer, dead after the block."""
    made = Producer(mends, where)
    try:
        yield made
    finally:
        made.kill()


def die_with_unread_requests(made: Producer) -> None:
    """The producer is busy elsewhere when the requests arrive, and then their reader dies."""
    reader = Reader(made)
    with made.stopped():
        reader.post()
        time.sleep(0.3)
        reader.kill()
        time.sleep(0.3)


def die_with_waiting_answers(made: Producer) -> None:
    """The reader takes no bytes; answers fill the socket, and more wait, when it dies."""
    reader = Reader(made, stops=True)
    reader.post()
    time.sleep(0.5)
    reader.kill()


def die_during_a_read(made: Producer) -> None:
    """Nobody stands still: a reader is killed while it reads."""
    reader = Reader(made)
    reader.post()
    reader.kill()
