"""What a probe says of a link when its thread does not get to look: never the wrong thing."""

import ctypes
import random

import pytest
from connector_engines import host_scratch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpd_connector.agent_api import Memory, MemoryRegion, ReadState, ReadTelemetry
from hybridpd_connector.agent_fake import FakeAgent, FakeNetwork
from hybridpd_connector.errors import AgentError
from hybridpd_connector.handshake import HostFacts
from hybridpd_connector.lease_board import SLOT_BYTES
from hybridpd_connector.link_path import bar_of, diagnose
from hybridpd_connector.link_probe import Clocks, LinkProber, ProbeTarget
from hybridpd_connector.link_samples import (
    ENOUGH_SECONDS,
    Bar,
    Measurement,
    Sample,
    Verdict,
    judge,
    summary,
)
from hybridpd_connector.peer_uses import PeerUses

HERE, NEIGHBOUR, OTHER_HOST = HostFacts("a", 1), HostFacts("a", 2), HostFacts("b", 3)
BAR = bar_of(HERE, HERE, Memory.VRAM)
SPIN_SECONDS = 0.005
"""What a thread of Python that spins takes from another one at each look."""


class Machine:
    """A clock, and what the probing thread loses of it each time it wants the interpreter back.
    ``copies``: the thread itself moves the bytes, and is at work until they are here."""

    def __init__(self, latency, rate, losses, *, copies=False, telemetry=False):
        self.latency, self.rate, self.losses = latency, rate, losses
        self.copies, self.telemetry = copies, telemetry
        self.passed = self.worked = 0.0
        self.reads = []

    def work(self, seconds):
        self.passed += seconds
        self.worked += seconds

    def lose(self):
        self.passed += next(self.losses)

    def sleep(self, seconds):
        self.passed += seconds
        self.lose()

    def clocks(self):
        return Clocks(lambda: self.passed, lambda: self.worked, self.sleep)


class TimedAgent(FakeAgent):
    """Its reads take the time of the machine's link."""

    def __init__(self, name, network, machine):
        super().__init__(name, network)
        self._machine = machine

    def post_read(self, local, local_ids, remote, remote_ids, notify=b""):
        machine = self._machine
        size = int(remote.rows[:, 1].sum())
        machine.reads.append(size)
        machine.work(5e-6)
        read = super().post_read(local, local_ids, remote, remote_ids, notify)
        read.copies = []
        read.began, needed = machine.passed, machine.latency + size / machine.rate
        read.ends = machine.passed + needed
        if machine.copies:
            machine.work(needed)
        read.noticed = machine.passed - read.began if machine.copies else None
        machine.lose()
        return read

    def poll(self, read):
        machine = self._machine
        machine.work(2e-6)
        state = ReadState.PENDING if machine.passed < read.ends else super().poll(read)
        if state is not ReadState.PENDING and read.noticed is None:
            read.noticed = machine.passed - read.began
        machine.lose()
        return state

    def telemetry(self, read):
        return ReadTelemetry(0, 0, 0.0, read.noticed if self._machine.telemetry else 0.0)


def measure(machine, bar=BAR, region=3 << 20):
    """What a probe finds out on this machine. The region is smaller than the longest reads."""
    network = FakeNetwork()
    producer, consumer = FakeAgent("p", network), TimedAgent("d", network, machine)
    memory = (ctypes.c_uint8 * region)()
    address = ctypes.addressof(memory)
    producer.register([MemoryRegion(address, region)])
    uses = PeerUses(consumer)
    prober = LinkProber(consumer, uses, host_scratch(2 << 20), machine.clocks())
    peer = uses.add(producer.metadata())
    target = ProbeTarget(peer, ((address, region),), 0, address + region - SLOT_BYTES)
    prober.warm_up(target, until=machine.passed + 60)
    measured = prober.measure(target, until=machine.passed + 60, bar=bar)
    uses.let_go(peer)
    assert (consumer.open_reads, consumer.open_lists, consumer.peers) == (0, 0, frozenset())
    return measured


def nothing():
    while True:
        yield 0.0


def spinning(seconds=SPIN_SECONDS):
    while True:
        yield seconds


def bursts(seed):
    """Mostly let alone, sometimes not for up to 20 ms."""
    chance = random.Random(seed)
    while True:
        yield chance.uniform(0.0005, 0.02) if chance.random() < 0.3 else 0.0


FAST = {"nvlink": (15e-6, 150e9), "pcie": (25e-6, 25e9)}
SLOW = {"tcp": (1e-4, 0.4e9), "staged": (5e-5, 3e9), "delayed": (0.2, 1e9), "dead slow": (0.5, 1e6)}
LOSSES = {
    "idle": nothing, "spinning": spinning,
    **{f"bursts-{seed}": lambda seed=seed: bursts(seed) for seed in range(8)},
}  # fmt: skip


def said(measured, theirs=HERE):
    found = diagnose(HERE, theirs, measured, Memory.VRAM)
    return "unsure" if found.unsure else "slow" if found.slow else "fast"


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("link", FAST)
@pytest.mark.parametrize("telemetry", [False, True])
def test_a_fast_link_is_called_fast_whatever_this_process_does(link, losses, telemetry):
    measured = measure(Machine(*FAST[link], LOSSES[losses](), telemetry=telemetry))
    assert said(measured) == "fast"
    assert measured.sound
    assert 12.5e9 < measured.bytes_per_second <= FAST[link][1] or measured.bytes == 2 << 20


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("link", SLOW)
@pytest.mark.parametrize("copies", [False, True])
def test_a_slow_link_is_called_slow_whatever_this_process_does(link, losses, copies):
    measured = measure(Machine(*SLOW[link], LOSSES[losses](), copies=copies, telemetry=copies))
    assert said(measured, NEIGHBOUR) == "slow"
    assert measured.bytes_per_second < 12.5e9


@pytest.mark.parametrize("losses", LOSSES)
def test_rdma_between_hosts_is_never_called_slow(losses):
    bar = bar_of(HERE, OTHER_HOST, Memory.VRAM)
    assert said(measure(Machine(5e-6, 12e9, LOSSES[losses]()), bar), OTHER_HOST) == "fast"
    assert said(measure(Machine(5e-5, 0.6e9, LOSSES[losses]()), bar), OTHER_HOST) == "slow"


def test_a_process_that_never_gets_to_look_says_that_it_does_not_know():
    measured = measure(Machine(*FAST["nvlink"], spinning(0.05)))
    assert said(measured) == "unsure"
    assert not measured.sound
    assert measured.bytes_per_second > 1e9
    assert said(measure(Machine(*SLOW["delayed"], spinning(0.05))), NEIGHBOUR) == "slow"


def test_an_idle_process_makes_few_and_short_reads():
    machine = Machine(*FAST["nvlink"], nothing())
    assert measure(machine).bytes == 2 << 20
    assert max(machine.reads) == 2 << 20
    assert machine.passed < 0.002


def test_a_link_that_needs_long_for_little_is_not_asked_for_much():
    machine = Machine(*SLOW["dead slow"], nothing())
    assert measure(machine).bytes == 16 << 10
    assert max(machine.reads) == 16 << 10


def test_host_memory_is_never_read_in_bulk():
    machine = Machine(1e-5, 0.1e9, nothing())
    measure(machine, bar_of(HERE, HERE, Memory.DRAM))
    assert max(machine.reads) == 2 << 20


def test_a_process_that_does_not_get_to_look_does_not_call_a_host_link_tcp():
    unsure = Measurement(2 << 20, 0.05, sound=False)
    assert diagnose(HERE, OTHER_HOST, unsure, Memory.DRAM).path.value == "unknown"
    sound = Measurement(2 << 20, 0.05)
    assert diagnose(HERE, OTHER_HOST, sound, Memory.DRAM).path.value == "tcp"


@settings(max_examples=60, deadline=None)
@given(
    losses=st.lists(st.floats(0, 0.03), min_size=1, max_size=40),
    link=st.sampled_from([*FAST.items(), *SLOW.items()]),
)
def test_no_pattern_of_losses_turns_a_link_into_its_opposite(losses, link):
    def again():
        while True:
            yield from losses

    name, facts = link
    assert said(measure(Machine(*facts, again()))) in (
        ("fast", "unsure") if name in FAST else ("slow", "unsure")
    )


def test_a_read_that_fails_or_never_ends_is_no_sample():
    machine = Machine(1e3, 1e9, nothing())
    with pytest.raises(AgentError, match="an end before"):
        measure(machine)


def sample(least, most, size=2 << 20):
    return Sample(size, least, most)


@pytest.mark.parametrize(
    ("samples", "verdict"),
    [
        ([sample(0, 0.001)], Verdict.FAST),
        ([sample(0.1, 0.2), sample(0, 0.001)], Verdict.FAST),
        ([sample(0, 0.02)] * 9, Verdict.UNSURE),
        ([sample(0.01, 0.02)] * 3, Verdict.UNSURE),
        ([sample(0.01, 0.02)] * 4, Verdict.SLOW),
        ([sample(0.01, 0.02)] * 8 + [sample(0, 0.02)], Verdict.UNSURE),
        ([sample(ENOUGH_SECONDS, 0.2)], Verdict.SLOW),
    ],
)
def test_what_reads_prove_together(samples, verdict):
    bar = Bar(0.0, (2 << 20) / 0.001)
    assert judge(samples, bar) is verdict
    shown = summary(samples, bar, verdict)
    assert shown.sound == (verdict is not Verdict.UNSURE)
    assert shown.seconds == min(item.at_most_seconds for item in samples)
