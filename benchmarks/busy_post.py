"""What a post costs when other threads of its process want the interpreter, as an engine core's do.

An engine core decodes what comes in and encodes what goes out on threads of its own (msgpack over
ZeroMQ). Whoever gives the interpreter away, which every call into torch does, may find it taken.
Here two threads decode a request of 3000 ids three times every 0.2 ms, while both connectors post
loads of a published model as in `connector_cpu.py`: vLLM's calls on made-up requests, a transfer
agent that does nothing. Ours zeroes the tails too, as shipped, in memory of its own and in small;
vLLM's connector zeroes none. Between two posts the thread sleeps, as an idle engine's does.

Told are microseconds per load: p50, p90 and mean of the time passed, p50 of the CPU time, and how
often per load the thread gave its core away of its own accord (it waited for the interpreter).

    python benchmarks/busy_post.py [--prompt 2000]
"""

from __future__ import annotations

import contextlib
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import torch

from connector_cpu import Meter, Ours, Theirs, parse, round_of_ours, round_of_theirs
from hybridpd_connector.agent_api import MemoryRegion
from hybridpd_connector.tail_zeros import Tail
from hybridpd_connector.vllm_zeroing import Zeroing
from shapes import shape_of

LOADS = (1, 8)
ROUNDS = 60
BUSY_THREADS = 2
PAUSE_SECONDS = 0.0002
POST = "D worker, post"


class SmallMemory:
    """Zeroes grids of the shape of the tails, closer together, in an allocation of its own."""

    def __init__(self) -> None:
        self._bytes = torch.zeros(8 << 20, dtype=torch.uint8)
        region = MemoryRegion(self._bytes.data_ptr(), len(self._bytes))
        self._zero = Zeroing((region,), (self._bytes,))

    def zero(self, tails: Iterable[Tail]) -> None:
        start = self._bytes.data_ptr()
        self._zero(
            [
                Tail(start, tail.layers, 2 * 8192, tail.runs, 8192, min(tail.length, 4096))
                for tail in tails
            ]
        )


class PostMeter(Meter):
    """Measures the posts, and only runs the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: list[float] = []
        self.cpu: list[float] = []
        self.waits: list[float] = []

    def run(self, what: str, share: int, action: Callable[[], Any]) -> Any:
        if what != POST:
            return action()
        time.sleep(0.002)
        waits, cpu, begun = _waits(), time.thread_time(), time.perf_counter()
        result = action()
        passed = time.perf_counter() - begun
        self.passed.append(1e6 * passed / share)
        self.cpu.append(1e6 * (time.thread_time() - cpu) / share)
        self.waits.append((_waits() - waits) / share)
        return result

    def line(self) -> str:
        passed, cpu, waits = self.passed[5:], self.cpu[5:], self.waits[5:]
        p90 = statistics.quantiles(passed, n=10)[-1]
        return (
            f"{statistics.median(passed):>9.0f}{p90:>9.0f}{statistics.mean(passed):>9.0f}"
            f"{statistics.median(cpu):>9.0f}{statistics.mean(waits):>9.2f}"
        )


def _waits() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


@contextlib.contextmanager
def busy(threads: int) -> Iterator[None]:
    """Other threads that hold the interpreter in bursts."""
    stop = threading.Event()
    message = msgspec.msgpack.encode({"prompt_token_ids": list(range(3000))})

    def work() -> None:
        decoder = msgspec.msgpack.Decoder()
        while not stop.is_set():
            for _ in range(3):
                decoder.decode(message)
            time.sleep(PAUSE_SECONDS)

    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in running:
            thread.join()


def main() -> None:
    """Print a line for each connector, alone and beside busy threads, and number of loads."""
    options = parse(__doc__)
    shape = shape_of(options.model, 1)
    prompt = list(range(3, 3 + options.prompt))
    ours, theirs = Ours(shape, SmallMemory().zero), Theirs(shape)
    print(
        f"{options.model}, TP 1, prompt of {options.prompt} tokens; us per load, one step's posts"
    )
    columns = f"{'p50':>9}{'p90':>9}{'mean':>9}{'CPU p50':>9}{'waits':>9}"
    print(f"{'beside':<16}{'loads':>6}  {'whose':<9}{columns}")
    serial = 0
    for threads in (0, BUSY_THREADS):
        beside = f"{threads} busy threads" if threads else "nothing"
        for count in LOADS:
            own, other = PostMeter(), PostMeter()
            with busy(threads):
                for _ in range(ROUNDS):
                    serial += 1
                    round_of_ours(ours, own, count, prompt, serial)
                    round_of_theirs(theirs, other, count, prompt, serial)
            for whose, meter in (("ours", own), ("in-tree", other)):
                print(f"{beside:<16}{count:>6}  {whose:<9}{meter.line()}", flush=True)
    for connector in (ours.p, ours.d):
        connector._worker.close()


if __name__ == "__main__":
    main()
