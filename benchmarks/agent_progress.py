"""What keeps a producer's transfer agent moving while its engine is busy, and what that costs.

    python benchmarks/agent_progress.py [--tls tcp] [--sleep-seconds 3]

For each way of making progress on the producer, in a process of its own whose main thread sleeps:

    first read ms   first read of a fresh pair (wire-up included), from post until done
    later read ms   median of further small reads
    bulk ms         64 MiB in 4,096 descriptors
    idle CPU %      CPU time of the producer's process while nobody reads, of one core

The reader polls tightly and uses no progress thread. With shared memory only first contact needs
the producer; over TCP every read does (``--tls tcp``: pods that share neither IPC nor PID
namespaces).
"""

import argparse
import ctypes
import dataclasses
import multiprocessing
import os
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "connector"))

from hybridpd_connector import agent as connector_agent
from hybridpd_connector.agent import NixlAgent
from hybridpd_connector.agent_api import Memory, MemoryRegion, ReadState
from hybridpd_connector.progress import Pump

PIECE_BYTES = 16 * 1024
PIECES = 8192
BULK_IDS = range(0, PIECES, 2)
LATER_READS = 30
_GIVE_UP_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of making progress: NIXL's thread with a delay, or ours with an interval."""

    title: str
    nixl_delay_us: int | None = None
    pump_seconds: float | None = None


WAYS = (
    Way("nothing"),
    Way("NIXL thread, delay 0 (its default)", nixl_delay_us=0),
    Way("NIXL thread, delay 1 ms", nixl_delay_us=1_000),
    Way("NIXL thread, delay 100 ms", nixl_delay_us=100_000),
    Way("pump every 0.2 ms", pump_seconds=0.0002),
    Way("pump every 1 ms", pump_seconds=0.001),
    Way("pump every 2 ms", pump_seconds=0.002),
    Way("pump every 5 ms", pump_seconds=0.005),
    Way("pump every 20 ms", pump_seconds=0.020),
)


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def producer(way: Way, sleep_seconds: float, pipe) -> None:
    memory = (ctypes.c_uint8 * (PIECE_BYTES * PIECES))()
    ctypes.memset(memory, 7, len(memory))
    if way.nixl_delay_us is not None:
        connector_agent._PROGRESS_DELAY_MICROSECONDS = way.nixl_delay_us
    agent = NixlAgent(f"producer-{os.getpid()}", progress_thread=way.nixl_delay_us is not None)
    agent.register([MemoryRegion(ctypes.addressof(memory), len(memory))])
    pump = None if way.pump_seconds is None else Pump(agent, way.pump_seconds)
    before = cpu_seconds()
    time.sleep(2.0)
    idle = (cpu_seconds() - before) / 2.0
    pipe.send((agent.metadata(), ctypes.addressof(memory), idle))
    # The engine step: the main thread is away. Afterwards it looks, as an idle engine does.
    time.sleep(sleep_seconds)
    while not pipe.poll(0.001):
        agent.take_notifications()
    if pump is not None:
        pump.close()
    os._exit(0)


class Reader:
    def __init__(self, metadata: bytes, address: int) -> None:
        self.memory = (ctypes.c_uint8 * (PIECE_BYTES * PIECES))()
        ctypes.memset(self.memory, 1, len(self.memory))
        self.agent = NixlAgent(f"reader-{time.monotonic_ns()}")
        self.agent.register([MemoryRegion(ctypes.addressof(self.memory), len(self.memory))])
        peer = self.agent.add_peer(metadata)
        here = (ctypes.addressof(self.memory), PIECE_BYTES, 0, PIECE_BYTES, PIECES)
        there = (address, PIECE_BYTES, 0, PIECE_BYTES, PIECES)
        self.local = self.agent.prepare(None, [here], Memory.DRAM)
        self.remote = self.agent.prepare(peer, [there], Memory.DRAM)

    def read_ms(self, ids) -> float:
        started = time.perf_counter()
        read = self.agent.post_read(self.local, list(ids), self.remote, list(ids))
        while self.agent.poll(read) is ReadState.PENDING:
            if time.perf_counter() - started > _GIVE_UP_SECONDS:
                raise SystemExit("a read did not end")
        milliseconds = (time.perf_counter() - started) * 1e3
        self.agent.release_read(read)
        return milliseconds


def measure(way: Way, sleep_seconds: float) -> tuple[float, float, float, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=producer, args=(way, sleep_seconds, theirs))
    process.start()
    metadata, address, idle = ours.recv()
    reader = Reader(metadata, address)
    first = reader.read_ms([0])
    later = statistics.median(reader.read_ms([n]) for n in range(1, LATER_READS + 1))
    bulk = reader.read_ms(BULK_IDS)
    ours.send("end")
    process.join()
    return first, later, bulk, idle * 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tls", default="", help="UCX_TLS of both sides, e.g. tcp")
    parser.add_argument("--sleep-seconds", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3, help="medians of so many fresh pairs")
    options = parser.parse_args()
    if options.tls:
        os.environ["UCX_TLS"] = options.tls
    print(f"UCX_TLS={options.tls or 'default'}, producer's main thread sleeps", end=" ")
    print(f"{options.sleep_seconds:g} s, {os.cpu_count()} cores, medians of {options.repeats}")
    print(f"{'progress on the producer':36} {'first read ms':>14} {'later read ms':>14}", end="")
    print(f" {'bulk ms':>10} {'idle CPU %':>11}")
    for way in WAYS:
        rows = [measure(way, options.sleep_seconds) for _ in range(options.repeats)]
        first, later, bulk, idle = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{way.title:36} {first:14.2f} {later:14.3f} {bulk:10.1f} {idle:11.1f}", flush=True)


if __name__ == "__main__":
    main()
