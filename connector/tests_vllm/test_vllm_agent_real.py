"""The NIXL agent keeps the agent contract, over DRAM, with two agents in one process.

The same contract class runs on the in-memory agent in ``connector/tests``. What only other
processes can show, a producer that dies before or during a read, is below.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import time

import pytest

from hybridpd_connector.agent import NixlAgent
from hybridpd_connector.agent_api import Agent, Memory, MemoryRegion, ReadState
from hybridpd_connector.errors import AgentError, PeerLostError
from hybridpd_testkit.agent_contract import PAGE_BYTES, AgentContract, Pair, Side

_DEATH_STATUS = 9
_MAX_POLLS = 5_000_000
_LARGE_BYTES = 256 << 20


class TestNixlAgent(AgentContract):
    def make_agent(self, name: str) -> Agent:
        return NixlAgent(name)

    def test_a_handle_that_nixl_does_not_take_back_is_left(self, pair: Pair) -> None:
        """The read has ended, and its load with it: nothing to raise into the engine's step."""
        consumer = pair.consumer.agent
        read = pair.post(pair.consumer.dense(), [0], pair.producer.dense(), [1])
        while consumer.poll(read) is ReadState.PENDING:
            pair.producer.agent.take_notifications()
        handle, read.handle = read.handle, _Stuck()
        assert consumer.release_read(read)
        assert read.released
        handle.release()


class _Stuck:
    def release(self) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")


class TestNixlAgentWithProgressThread(TestNixlAgent):
    """The producer's kind: the whole contract again, with NIXL's thread running beside it."""

    def make_agent(self, name: str) -> Agent:
        return NixlAgent(name, progress_thread=name.startswith("producer"))

    # Needs a producer that stands still, which only the class above has.
    test_nothing_that_a_read_uses_can_be_given_back = None

    def test_a_producer_that_calls_nothing_is_read_and_gets_its_messages(self, pair: Pair) -> None:
        consumer = pair.consumer.agent
        read = pair.post(pair.consumer.dense(), [0], pair.producer.dense(), [1], b"done")
        states = (consumer.poll(read) for _ in range(_MAX_POLLS))
        assert next(s for s in states if s is not ReadState.PENDING) is ReadState.DONE
        assert [n.payload for n in pair.wait_for(1)] == [b"done"]

    @pytest.mark.parametrize("closes", [True, False])
    def test_a_forked_child_that_destroys_its_copy_disturbs_nobody(
        self, pair: Pair, closes: bool
    ) -> None:
        """It shares the sockets and event sets: taken down there, the producer would be deaf."""
        consumer, producer = pair.consumer.agent, pair.producer.agent
        here, there = pair.consumer.dense(), pair.producer.dense()
        said = [b"before", b"after"]
        for number, payload in enumerate(said, start=1):
            read = pair.post(here, [0], there, [1], payload)
            deadline = time.monotonic() + 60
            while consumer.poll(read) is ReadState.PENDING and time.monotonic() < deadline:
                time.sleep(0.001)
            assert consumer.poll(read) is ReadState.DONE
            assert [n.payload for n in pair.wait_for(number)] == said[:number]
            child = os.fork()
            if not child:
                signal.alarm(30)
                for agent in (consumer, producer):
                    if closes:
                        agent.close()
                    vars(agent).clear()
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0


def test_the_progress_thread_sleeps_instead_of_spinning():
    agents = [NixlAgent(f"idle-{n}", progress_thread=True) for n in range(2)]
    before = time.process_time()
    time.sleep(1.0)
    # A spinning thread per agent would use a second each, or share what cores there are.
    assert time.process_time() - before < 0.2
    for agent in agents:
        agent.close()


def _producer(metadata, die):
    side = Side(NixlAgent("dying-producer"))
    side.fill()
    metadata.send((side.agent.metadata(), side.address))
    while not die.is_set():
        side.agent.take_notifications()
    os._exit(_DEATH_STATUS)


def test_a_killed_producer_fails_reads_and_is_reported_lost():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    die = context.Event()
    process = context.Process(target=_producer, args=(theirs, die))
    process.start()
    metadata, address = ours.recv()
    side = Side(NixlAgent("surviving-consumer"))
    peer = side.agent.add_peer(metadata)
    here = side.agent.prepare(None, side.dense(), Memory.DRAM)
    row = (address, *side.dense()[0][1:])
    there = side.agent.prepare(peer, [row], Memory.DRAM)

    def ended(read):
        states = (side.agent.poll(read) for _ in range(_MAX_POLLS))
        return next(state for state in states if state is not ReadState.PENDING)

    warm = side.agent.post_read(here, [0], there, [1])
    assert ended(warm) is ReadState.DONE
    assert side.agent.release_read(warm)
    die.set()
    process.join()
    assert process.exitcode == _DEATH_STATUS
    try:
        read = side.agent.post_read(here, [0], there, [1])
    except PeerLostError:
        read = None
    if read is not None:
        assert ended(read) is ReadState.FAILED
        assert side.agent.release_read(read)
    with pytest.raises(PeerLostError):
        side.agent.post_read(here, [0], there, [1])
    with pytest.raises(PeerLostError):
        side.agent.send_notification(peer, b"hello")
    side.agent.release_list(here)
    side.agent.release_list(there)
    side.agent.remove_peer(peer)
    side.agent.close()


def _large_producer(metadata):
    memory = (ctypes.c_uint8 * _LARGE_BYTES)()
    ctypes.memset(memory, 7, _LARGE_BYTES)
    agent = NixlAgent("large-producer")
    agent.register([MemoryRegion(ctypes.addressof(memory), _LARGE_BYTES)])
    metadata.send((agent.metadata(), ctypes.addressof(memory)))
    while True:
        agent.take_notifications()


def _reader_that_kills(metadata, address, producer_id, answer):
    """Kill the producer in the middle of a read; (end, bytes read by then, bytes read later)."""
    memory = (ctypes.c_uint8 * _LARGE_BYTES)()
    agent = NixlAgent("large-reader")
    agent.register([MemoryRegion(ctypes.addressof(memory), _LARGE_BYTES)])
    pieces = _LARGE_BYTES // PAGE_BYTES

    def prepare(peer, base):
        return agent.prepare(peer, [(base, PAGE_BYTES, 0, PAGE_BYTES, pieces)], Memory.DRAM)

    here = prepare(None, ctypes.addressof(memory))
    there = prepare(agent.add_peer(metadata), address)
    warm = agent.post_read(here, [0], there, [0])
    while agent.poll(warm) is ReadState.PENDING:
        pass
    # Every second page, so that neighbours are not merged into one copy.
    ids = range(1, pieces, 2)
    read = agent.post_read(here, ids, there, ids)
    for _ in range(20):
        agent.poll(read)
    os.kill(producer_id, signal.SIGKILL)
    while agent.poll(read) is ReadState.PENDING:
        pass
    by_then = bytes(memory).count(7)
    agent.release_read(read)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        agent.take_notifications()
    answer.send((agent.poll(read), by_then, bytes(memory).count(7) - by_then))


def test_no_byte_arrives_after_a_read_has_failed(monkeypatch):
    # Over TCP, where bytes of a read can be on their way when the producer dies.
    monkeypatch.setenv("UCX_TLS", "tcp")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    producer = context.Process(target=_large_producer, args=(theirs,))
    producer.start()
    reader = context.Process(target=_reader_that_kills, args=(*ours.recv(), producer.pid, theirs))
    reader.start()
    state, by_then, later = ours.recv()
    reader.join()
    producer.join()
    assert state is ReadState.FAILED
    assert by_then < _LARGE_BYTES // 2
    assert later == 0


def test_an_unknown_backend_is_refused():
    with pytest.raises(AgentError):
        NixlAgent("no-such-backend", backends=["NOPE"])
