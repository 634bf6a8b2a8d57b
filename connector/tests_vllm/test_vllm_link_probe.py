"""The link probe over two real NIXL agents in one process: what it reads, and what it leaves.

Here a link is fast or slow by the bar that it is held against: memory of one process is read at a
few GB/s, which is far above the lower bar and far below the upper one on any machine.
"""

import ctypes
import itertools
import threading
import time

import pytest

from hybridpd_connector.agent import NixlAgent
from hybridpd_connector.agent_api import Memory, MemoryRegion
from hybridpd_connector.errors import AgentError
from hybridpd_connector.lease_board import LeaseBoard
from hybridpd_connector.link_probe import SCRATCH_BYTES, LinkProber, ProbeTarget, Scratch
from hybridpd_connector.link_samples import Bar
from hybridpd_connector.peer_uses import PeerUses

REGION_BYTES = 3 << 20
REGIONS = 3
LOW = Bar(0.0, 0.4e9, (32 << 20, 64 << 20))
HIGH = Bar(0.0, 500e9, (32 << 20,))
_serial = itertools.count()


class Ends:
    """A producer with three regions and a lease board, and a consumer's prober."""

    def __init__(self):
        serial = next(_serial)
        self.producer = NixlAgent(f"probed-{serial}", progress_thread=True)
        self.memory = [(ctypes.c_uint8 * REGION_BYTES)(*b"\x07" * 64) for _ in range(REGIONS)]
        self.regions = [MemoryRegion(ctypes.addressof(m), REGION_BYTES) for m in self.memory]
        self.board = LeaseBoard()
        self.producer.register([*self.regions, self.board.region()])
        self.consumer = NixlAgent(f"prober-{serial}")
        self.uses = PeerUses(self.consumer)
        self.scratch = (ctypes.c_uint8 * SCRATCH_BYTES)()
        region = MemoryRegion(ctypes.addressof(self.scratch), SCRATCH_BYTES)
        self.prober = LinkProber(self.consumer, self.uses, Scratch(region, self.scratch))
        self.peer = self.uses.add(self.producer.metadata())

    def target(self, regions=None):
        known = tuple((r.address, r.length_bytes) for r in self.regions)
        return ProbeTarget(self.peer, regions or known, 0, self.board.address)


@pytest.fixture
def ends():
    ends = Ends()
    yield ends
    ends.consumer.close()
    ends.producer.close()


def test_vllm_link_probe_wakes_up_and_measures_and_leaves_nothing(ends):
    assert ends.prober.memory is Memory.DRAM
    until = time.monotonic() + 60
    ends.prober.warm_up(ends.target(), until)
    assert bytes(ends.scratch[:64]) == b"\x07" * 64
    measured = ends.prober.measure(ends.target(), until, LOW)
    assert measured.bytes_per_second > 1e6
    assert bytes(ends.scratch[:64]) == b"\x07" * 64
    assert ends.prober.strays == 0
    ends.uses.let_go(ends.peer)
    assert "peers=0, lists=0, reads=0" in repr(ends.consumer)


@pytest.fixture
def spinning():
    """Other threads of this process that never wait: each look at a read costs a turn of theirs."""
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            pass

    threads = [threading.Thread(target=spin) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join()


def test_vllm_link_probe_of_a_good_link_beside_spinning_threads_is_good(ends, spinning):
    ends.prober.warm_up(ends.target(), time.monotonic() + 60)
    for _ in range(5):
        measured = ends.prober.measure(ends.target(), time.monotonic() + 60, LOW)
        assert measured.sound
        assert measured.bytes_per_second > LOW.bytes_per_second
    assert ends.prober.strays == 0


def test_vllm_link_probe_of_a_slow_link_beside_spinning_threads_is_slow(ends, spinning):
    ends.prober.warm_up(ends.target(), time.monotonic() + 60)
    for _ in range(5):
        measured = ends.prober.measure(ends.target(), time.monotonic() + 60, HIGH)
        assert measured.sound
        assert measured.bytes_per_second < HIGH.bytes_per_second


def test_vllm_link_probe_of_memory_that_is_not_registered_fails(ends):
    outside = ((ends.regions[0].address, REGION_BYTES), (1 << 40, REGION_BYTES))
    with pytest.raises(AgentError):
        ends.prober.warm_up(ends.target(outside), time.monotonic() + 60)
    ends.uses.let_go(ends.peer)
    assert "peers=0, lists=0, reads=0" in repr(ends.consumer)


def test_vllm_link_probe_of_a_peer_that_nobody_uses_is_refused(ends):
    target = ends.target()
    ends.uses.let_go(ends.peer)
    with pytest.raises(AgentError, match="in use"):
        ends.prober.measure(target, time.monotonic() + 60, LOW)
