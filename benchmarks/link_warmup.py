"""What a woken-up link saves the first request, and what the probe says of the link.

    export PYTHONPATH=connector    (with NIXL and PyTorch: the engine environment, or SITE)
    python benchmarks/link_warmup.py [--device cuda] [--own-pid-namespace] [--repeats 5]

Fresh producers in processes of their own, one reader. A request is 29 pages out of six regions
(Nemotron-3-Nano's shape at TP 1: 2.1 MB each; on a CPU 64 KiB, or the copy would hide the rest) and
then one slot of the lease board. Per row:

    first ms    from the post of a pair's first request until its end, tight polls
    later ms    median of further requests
    ratio       first / later
    waking ms   what the handshake thread spends on waking the link up and measuring it

The last pair is measured once more beside a thread that spins: a fast link must not be called slow.

With `--own-pid-namespace` producers run in one (needs root): on GPUs the link must then be slow,
and its cause named.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import pathlib
import statistics
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "connector"))

import torch

from devices import named, two_devices
from hybridpd_connector.agent import NixlAgent
from hybridpd_connector.agent_api import Memory, MemoryRegion, ReadState
from hybridpd_connector.host_facts import read_host_facts
from hybridpd_connector.lease_board import SLOT_BYTES, LeaseBoard
from hybridpd_connector.link_path import bar_of, diagnose
from hybridpd_connector.link_probe import SCRATCH_BYTES, LinkProber, ProbeTarget, Scratch
from hybridpd_connector.peer_uses import PeerUses

REGIONS = 6
PAGES = 40
GPU_PAGE_BYTES = 2_228_224
CPU_PAGE_BYTES = 65_536
REQUEST_PAGES = 29
LATER_REQUESTS = 20
WAKE_SECONDS = 30.0
CLONE_NEWPID = 0x20000000


@dataclasses.dataclass(frozen=True)
class Cache:
    """Regions of pages, registered, on one device."""

    tensors: list
    regions: list[MemoryRegion]
    page_bytes: int

    @classmethod
    def make(cls, device: str, value: int) -> "Cache":
        memory = Memory.DRAM if device == "cpu" else Memory.VRAM
        page_bytes = CPU_PAGE_BYTES if device == "cpu" else GPU_PAGE_BYTES
        size = PAGES * page_bytes
        tensors = [
            torch.full((size,), value, dtype=torch.uint8, device=device) for _ in range(REGIONS)
        ]
        index = tensors[0].device.index or 0
        regions = [MemoryRegion(t.data_ptr(), size, index, memory) for t in tensors]
        return cls(tensors, regions, page_bytes)

    def rows(self):
        size = self.page_bytes
        return [(r.address, size, r.device_id, size, PAGES) for r in self.regions]


def producer(device: str, pipe) -> None:
    cache, board = Cache.make(device, 7), LeaseBoard()
    agent = NixlAgent(f"producer-{time.monotonic_ns()}", progress_thread=True)
    agent.register([*cache.regions, board.region()])
    host = read_host_facts(os.environ, remappable=False)
    pipe.send((agent.metadata(), cache.regions, cache.rows(), board.address, host))
    pipe.recv()
    os._exit(0)


class Reader:
    """One D rank's side."""

    def __init__(self, device: str) -> None:
        self.cache = Cache.make(device, 1)
        self.agent = NixlAgent(f"reader-{time.monotonic_ns()}")
        self.slots = LeaseBoard()
        scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
        first = self.cache.regions[0]
        region = MemoryRegion(scratch.data_ptr(), SCRATCH_BYTES, first.device_id, first.memory)
        self.agent.register([*self.cache.regions, self.slots.region()])
        self.uses = PeerUses(self.agent)
        self.prober = LinkProber(self.agent, self.uses, Scratch(region, scratch))
        self.memory = first.memory
        self.local = self.agent.prepare(None, self.cache.rows(), self.memory)
        slot = (self.slots.address, SLOT_BYTES, 0, SLOT_BYTES, 1)
        self.slot = self.agent.prepare(None, [slot], Memory.DRAM)

    def measured(self, target, host, until: float) -> str:
        """What the probe says."""
        ours = read_host_facts(os.environ, remappable=False)
        bar = bar_of(ours, host, self.memory)
        measured = self.prober.measure(target, until, bar)
        found = diagnose(ours, host, measured, self.memory)
        rate = f"{'' if measured.sound else 'at least '}{measured.bytes_per_second / 1e9:.2f} GB/s"
        return f"{found.path.value}, {rate}{', slow: ' * found.slow}{found.cause}"

    def meet(self, metadata, regions, rows, board, host, wake: bool, spinning: bool):
        """(first ms, later ms, ms spent on waking up, what the probe says)."""
        peer = self.uses.add(metadata)
        remote = self.agent.prepare(peer, rows, self.memory)
        slot = self.agent.prepare(peer, [(board, SLOT_BYTES, 0, SLOT_BYTES, 1)], Memory.DRAM)
        said, spent = "", 0.0
        if wake:
            target = ProbeTarget(
                peer,
                tuple((r.address, r.length_bytes) for r in regions),
                regions[0].device_id,
                board,
            )
            started = time.perf_counter()
            until = time.monotonic() + WAKE_SECONDS
            self.prober.warm_up(target, until)
            said = self.measured(target, host, until)
            spent = (time.perf_counter() - started) * 1e3
            if spinning:
                with busy_thread():
                    said += f"\nbeside a thread that spins: {self.measured(target, host, until)}"
        seconds = [self.request(remote, slot, number) for number in range(1 + LATER_REQUESTS)]
        return seconds[0] * 1e3, statistics.median(seconds[1:]) * 1e3, spent, said

    def request(self, remote, slot, number: int) -> float:
        pages = REGIONS * PAGES
        ids = [(number * 31 + index * 8 + 1) % pages for index in range(REQUEST_PAGES)]
        started = time.perf_counter()
        self.read(self.local, ids, remote)
        self.read(self.slot, [0], slot)
        return time.perf_counter() - started

    def read(self, local, ids, remote) -> None:
        read = self.agent.post_read(local, ids, remote, ids)
        while (state := self.agent.poll(read)) is ReadState.PENDING:
            pass
        if state is not ReadState.DONE:
            raise SystemExit("a read failed")
        self.agent.release_read(read)


def start(context, device: str, own_namespace: bool):
    """A producer's process and pipe. Children of an unshared process are in its new namespace."""
    ours, theirs = context.Pipe()
    process = context.Process(target=producer, args=(device, theirs))
    if own_namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        before = os.open("/proc/self/ns/pid", os.O_RDONLY)
        if libc.unshare(CLONE_NEWPID):
            raise SystemExit(f"no PID namespace: {os.strerror(ctypes.get_errno())}")
        process.start()
        libc.setns(before, CLONE_NEWPID)
        os.close(before)
    else:
        process.start()
    return process, ours


@contextlib.contextmanager
def busy_thread():
    """An engine that is busy in Python, as bad as can be."""
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--own-pid-namespace", action="store_true")
    parser.add_argument("--repeats", type=int, default=5, help="fresh pairs per row")
    options = parser.parse_args()
    here, there = two_devices(options.device)
    context = multiprocessing.get_context("spawn")
    reader = Reader(here)
    print(
        f"{named((here, there))}, {os.cpu_count()} cores, medians of {options.repeats} fresh pairs"
    )
    print(f"{'first request':22} {'first ms':>9} {'later ms':>9} {'ratio':>7} {'waking ms':>10}")
    said = ""
    for title, wake in (("of a link never used", False), ("of a link woken up", True)):
        rows = []
        for number in range(options.repeats):
            process, pipe = start(context, there, options.own_pid_namespace)
            last = number == options.repeats - 1
            *numbers, said = reader.meet(*pipe.recv(), wake, spinning=wake and last)
            rows.append(numbers)
            pipe.send("end")
            process.join()
        first, later, spent = (statistics.median(column) for column in zip(*rows, strict=True))
        print(
            f"{title:22} {first:9.2f} {later:9.2f} {first / later:7.2f} {spent:10.1f}", flush=True
        )
    print(f"the probe says: {said}")


if __name__ == "__main__":
    main()
