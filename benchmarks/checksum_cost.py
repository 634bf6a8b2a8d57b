"""What a checked load costs more than one that is not: the sums on P and on D, and the comparison.

    export PYTHONPATH=operator:connector    (with vLLM: the engine environment, or SITE on a GPU)
    python benchmarks/checksum_cost.py [--device cuda] [--model NAME] [--tp 1] [--tokens 1000,...]

Two caches of one published model's shapes, on one device; a request's pages are copied from one to
the other, as a load does, then summed and compared by the code that the connector runs. Told for
each length are medians, in milliseconds:

    copy          the bytes of the load, one copy a run: what a load takes at the very least
    P call        on P's engine thread, to start the sums of a prefill
    P device      from that call until the sums are on the board
    D call        on D's engine thread, to start the sums of what has arrived
    D device      from that call until D has its own sums
    compare       on D's engine thread, all sums with those of the board
    ratio         (P device + D device + compare) / copy, for a load that is checked
    sample        the same for a load in the mean, in mode `sample`

It ends with an error when the device's sums are not the reference's, when those of a right copy
differ, or when those of a wrong one do not.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import torch

from hybridpd_connector.agent_api import MemoryRegion
from hybridpd_connector.device_sums import DeviceSums
from hybridpd_connector.sum_board import HEADER_WORDS, MODES, PendingSums, slot_pages
from hybridpd_geometry import RankPlacement, ReadRequest, SumPair, SumRequest, plan_pair, row_of
from shapes import NANO, Shape, shape_of

SLOT_BYTES = 4096
TOKENS = "1000,2000,3000,8000"


class Side:
    """One engine's rank: a cache of random bytes on the device, and what sums it."""

    def __init__(self, shape: Shape, tokens: int, device: str) -> None:
        blocks = shape.blocks_needed(tokens)
        size = blocks * shape.geometry.page_bytes * shape.geometry.region_count
        self.bytes = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
        self.placement: RankPlacement = shape.placement(0, blocks, self.bytes.data_ptr())
        region = MemoryRegion(self.bytes.data_ptr(), size)
        self.sums = DeviceSums(shape.layout, self.placement, [region], [self.bytes])

    def page(self, layer: str, block: int) -> int:
        """Where a page begins in ``bytes``."""
        region = self.placement.layer_region[layer]
        address = self.placement.region_bases[region]
        return address + block * self.placement.block_strides[region] - self.bytes.data_ptr()


class Load:
    """One request between two sides."""

    def __init__(self, shape: Shape, tokens: int, device: str) -> None:
        self.device, self.tokens = device, tokens
        self.source, self.destination = (Side(shape, tokens, device) for _ in range(2))
        blocks = shape.blocks(tokens)
        plan = plan_pair(shape.layout, shape.layout, 0)
        self.pair = SumPair(plan)
        read = ReadRequest(tokens, blocks, blocks)
        self.runs = [
            (
                self.destination.page(run.layer, run.destination_block) + run.destination_offset,
                self.source.page(run.layer, run.source_block) + run.source_offset,
                run.length,
            )
            for run in plan.request_runs(0, read)
        ]
        self.bytes = sum(length for _, _, length in self.runs)
        self.theirs: SumRequest = self.pair.request(tokens, blocks)
        self.ours: SumRequest = self.pair.request(tokens, blocks)
        self.slot_bytes = slot_pages(self.pair.source) * SLOT_BYTES
        self.board = self.source.sums.allocate(self.slot_bytes)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def copy(self) -> None:
        for to, origin, length in self.runs:
            self.destination.bytes[to : to + length] = self.source.bytes[origin : origin + length]

    def publish(self) -> None:
        self.source.sums.publish(self.theirs, 1, self.board)

    def start(self) -> PendingSums:
        return self.destination.sums.start(self.ours)

    def differences(self, words: object) -> int:
        """Spans that differ; what D does with both rows."""
        count = self.pair.source_words(self.theirs)
        row = (ctypes.c_uint64 * count).from_address(self.board + HEADER_WORDS * 8)
        there = memoryview(row).cast("B").cast("Q")
        here = memoryview(words).cast("B").cast("Q")  # type: ignore[arg-type]
        return sum(
            there[span.source_word : span.source_word + span.words]
            != here[span.destination_word : span.destination_word + span.words]
            for span in self.pair.spans(0, self.ours)
        )


def timed(load: Load, action: Callable[[], object]) -> tuple[float, float]:
    """(milliseconds in the call, until the device had done it)."""
    load.wait()
    began = time.perf_counter()
    action()
    returned = time.perf_counter()
    load.wait()
    return (returned - began) * 1e3, (time.perf_counter() - began) * 1e3


def compared(load: Load) -> float:
    words = load.start()
    load.wait()
    row = words.words()
    began = time.perf_counter()
    if load.differences(row):
        raise SystemExit("the sums of a right copy differ")
    return (time.perf_counter() - began) * 1e3


def check_wrong_byte(load: Load) -> None:
    at = load.runs[len(load.runs) // 2][0]
    load.destination.bytes[at] ^= 1
    pending = load.start()
    load.wait()
    if load.differences(pending.words()) != 1:
        raise SystemExit("a wrong byte was not found")


def check_reference(shape: Shape, device: str) -> None:
    """The device's row of one rank, word by word, on both sides of the largest number of ranks."""
    load = Load(shape, 100, device)
    memory = load.source.bytes.cpu()

    def read(layer: str, block: int, offset: int, length: int) -> bytes:
        at = load.source.page(layer, block) + offset
        return memory[at : at + length].numpy().tobytes()

    pending = load.source.sums.start(load.theirs)
    load.wait()
    words = pending.words()
    if words is None or list(words) != row_of(load.pair.source, load.theirs, read):
        raise SystemExit("the device's sums are not the reference's")
    print(f"{len(words)} sums of TP {shape.tp_size} equal the reference", flush=True)


def line(shape: Shape, tokens: int, device: str, rounds: int) -> str:
    load = Load(shape, tokens, device)
    copies, stated, summed, checks = [], [], [], []
    for _ in range(rounds + 1):
        copies.append(timed(load, load.copy)[1])
        stated.append(timed(load, load.publish))
        summed.append(timed(load, load.start))
        checks.append(compared(load))
    check_wrong_byte(load)
    # The first round allocates and makes the weights.
    copy, compare = (statistics.median(times[1:]) for times in (copies, checks))
    p_call, p_device, d_call, d_device = (
        statistics.median(times[at] for times in rounds[1:])
        for rounds in (stated, summed)
        for at in (0, 1)
    )
    ratio = (p_device + d_device + compare) / copy
    return (
        f"{shape.tp_size:>2} {tokens:>6} {load.bytes / 1e6:>8.1f} {len(load.runs):>6} "
        f"{load.pair.source_words(load.theirs):>6} {copy:>9.3f} {p_call:>8.3f} {p_device:>9.3f} "
        f"{d_call:>8.3f} {d_device:>9.3f} {compare:>8.3f} {ratio:>7.2f} "
        f"{ratio / MODES['sample']:>8.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default=NANO)
    parser.add_argument("--tp", default="1,2")
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    how = f"torch {torch.__version__}, {options.rounds} rounds, medians, ms"
    print(f"{options.model} on {name}, {how}")
    check_reference(shape_of(options.model, 8), options.device)
    print(
        "TP tokens       MB copies   sums      copy   P call  P device   D call  D device  "
        "compare   ratio   sample"
    )
    for tp_size in map(int, options.tp.split(",")):
        shape = shape_of(options.model, tp_size)
        for tokens in map(int, options.tokens.split(",")):
            print(line(shape, tokens, options.device, options.rounds), flush=True)


if __name__ == "__main__":
    main()
