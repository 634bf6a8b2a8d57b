"""What posting and reading one request costs, by the shape of its list of descriptors.

One process owns the pages (prefill), one reads them (decode), each with its own agent; the same
pages are read in four ways:

    ranges      what the connector posts: the fewest ranges, agent without a progress thread
    ids         the same bytes as ids of a prepared list in units of several sizes
    in-tree     descriptors as vLLM's connector cuts them (whole blocks, padding slots, conv in
                parts), same agent
    in-tree, its agent    the same with vLLM's agent settings: progress thread, four threads

In each round every way reads every length once, in an order of its own (`--seed`), so that neither
what ran before nor a machine that changes slowly stands between two ways. Told are quartiles and
90 % of the time inside the post, the share of posts within the goal, the time until a tight poll
says done, and the number of descriptors; then the post's medians at each place of the cache that is
read in turn. The first three ways are measured before vLLM's agent exists, whose thread spins and
keeps the machine awake, and again beside it; with `--pauses` also with a pause before each post, as
an engine makes: a core that has slept is slow at first. On GPUs (`--device cuda`) the owner has the
first and the reader the last one.

    export PYTHONPATH=operator:connector    (with vLLM and NIXL: the engine environment, or SITE)
    python benchmarks/post_cost.py [--device cuda] [--model NAME] [--tokens 1000,2000,3000]
        [--rounds 300] [--pauses 0,2]
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from devices import named, two_devices
from hybridpd_connector.agent import NixlAgent, load_nixl
from hybridpd_connector.agent_api import Memory, MemoryRegion, ReadState
from hybridpd_connector.read_tables import row_array
from hybridpd_connector.request_ranges import RequestRanges
from hybridpd_geometry import IdRun, ReadRequest, build_table, plan_pair
from shapes import NANO, Shape, shape_of

GOAL_MICROSECONDS = 150
WARM_ROUNDS = 5
SPREAD = 4
"""Requests take turns on this many places of the cache, so that none is read twice in a row."""


@dataclasses.dataclass(frozen=True)
class Pages:
    """One side's cache: where it begins and what keeps it alive."""

    address: int
    size: int
    device: int
    memory: Memory
    owner: Any


def allocate(size: int, device: str, last: bool) -> Pages:
    """Plain memory of the process, or of a GPU."""
    if device == "cpu":
        owner = (ctypes.c_uint8 * size)()
        return Pages(ctypes.addressof(owner), size, 0, Memory.DRAM, owner)
    import torch

    index = torch.cuda.device_count() - 1 if last else 0
    torch.cuda.set_device(index)
    tensor = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{index}")
    torch.cuda.synchronize()
    return Pages(tensor.data_ptr(), size, index, Memory.VRAM, tensor)


def own(size: int, device: str, channel: Any) -> None:
    """The owner's process: registers its pages and keeps the agents alive until told to end."""
    pages = allocate(size, device, last=False)
    region = MemoryRegion(pages.address, size, pages.device, pages.memory)
    agent = NixlAgent("post-cost-owner", progress_thread=True)
    agent.register([region])
    channel.send((agent.metadata(), pages.address, pages.device))
    channel.recv()
    agent.close()


class Reader:
    """Reads requests of one shape from the owner, each in a chosen way."""

    def __init__(self, shape: Shape, blocks: int, device: str, met: tuple[bytes, int, int]) -> None:
        self.shape = shape
        self.blocks = blocks
        size = cache_bytes(shape, blocks)
        self.pages = allocate(size, device, last=True)
        region = MemoryRegion(self.pages.address, size, self.pages.device, self.pages.memory)
        metadata, self.address, self.remote_device = met
        self.agent = NixlAgent("post-cost-reader")
        self.agent.register([region])
        self.peer = self.agent.add_peer(metadata)
        local = placement(shape, blocks, self.pages.address, self.pages.device)
        remote = placement(shape, blocks, self.address, self.remote_device)
        self.table = build_table(plan_pair(shape.layout, shape.layout, 0), 0, local, remote)
        self.ranges = RequestRanges(self.table)
        memory = self.pages.memory
        self.local = self.agent.prepare(None, row_array(self.table.local_rows), memory)
        self.remote = self.agent.prepare(self.peer, row_array(self.table.remote_rows), memory)
        # Imports vLLM, which the owner's process does without.
        from intree import InTree

        self.in_tree = InTree(shape, blocks)

    def request(self, tokens: int, turn: int) -> ReadRequest:
        """A request at one of ``SPREAD`` places."""
        first = 1 + turn % SPREAD * self.shape.blocks_needed(tokens)
        blocks = self.shape.blocks(tokens, first=first)
        return ReadRequest(tokens, blocks, blocks)

    def by_ranges(self, tokens: int, turn: int) -> Callable[[], Any]:
        ranges = self.ranges.of(self.request(tokens, turn)).ranges
        return lambda: self.agent.post_ranges(self.local, self.remote, ranges)

    def by_ids(self, tokens: int, turn: int) -> Callable[[], Any]:
        runs = self.table.id_runs(self.request(tokens, turn))
        local = written_out(runs, lambda run: run.local_first)
        remote = written_out(runs, lambda run: run.remote_first)
        return lambda: self.agent.post_read(self.local, local, self.remote, remote)

    def in_tree_ranges(self, tokens: int, turn: int) -> np.ndarray:
        """(ours, theirs, length) of vLLM's descriptors."""
        ids = self.in_tree.ids(self.request(tokens, turn).source)
        local, remote = (
            self.in_tree.lists(first)[ids] for first in (self.pages.address, self.address)
        )
        return np.stack([local[:, 0], remote[:, 0], local[:, 1]], axis=1).astype(np.int64)

    def as_in_tree(self, tokens: int, turn: int) -> Callable[[], Any]:
        ranges = self.in_tree_ranges(tokens, turn)
        return lambda: self.agent.post_ranges(self.local, self.remote, ranges)

    def finish(self, read: Any) -> tuple[float, int]:
        """Poll tightly; (when it was done, descriptors)."""
        while (state := self.agent.poll(read)) is ReadState.PENDING:
            pass
        done = time.perf_counter()
        if state is not ReadState.DONE:
            raise SystemExit("a read failed")
        descriptors = self.agent.telemetry(read).descriptors
        self.agent.release_read(read)
        return done, descriptors


class UpstreamAgent:
    """vLLM's agent settings around the same memory: prepared lists, progress thread, 4 threads."""

    def __init__(self, reader: Reader, metadata: bytes) -> None:
        nixl = load_nixl()
        self.reader = reader
        pages = reader.pages
        config = nixl.nixl_agent_config(num_threads=4, capture_telemetry=True)
        self.nixl = nixl.nixl_agent("post-cost-upstream", config)
        self.kind = pages.memory.value
        rows = [(pages.address, pages.size, pages.device, "")]
        self.nixl.register_memory(self.nixl.get_reg_descs(rows, self.kind), backends=["UCX"])
        peer = self.nixl.add_remote_agent(metadata)
        self.local, self.remote = (
            self.nixl.prep_xfer_dlist(name, self.nixl.get_xfer_descs(self.list(*side), self.kind))
            for name, side in (
                ("NIXL_INIT_AGENT", (pages.address, pages.device)),
                (peer, (reader.address, reader.remote_device)),
            )
        )

    def list(self, address: int, device: int) -> np.ndarray:
        table = self.reader.in_tree.lists(address)
        table[:, 2] = device
        return table

    def post(self, tokens: int, turn: int) -> Callable[[], Any]:
        ids = self.reader.in_tree.ids(self.reader.request(tokens, turn).source).astype(np.int32)

        def go() -> Any:
            handle = self.nixl.make_prepped_xfer("READ", self.local, ids, self.remote, ids, b"")
            self.nixl.transfer(handle)
            return handle

        return go

    def finish(self, handle: Any) -> tuple[float, int]:
        while (state := self.nixl.check_xfer_state(handle)) == "PROC":
            pass
        done = time.perf_counter()
        if state != "DONE":
            raise SystemExit("a read failed")
        descriptors = self.nixl.get_xfer_telemetry(handle).descCount
        handle.release()
        return done, descriptors


def written_out(runs: list[IdRun], first: Callable[[IdRun], int]) -> np.ndarray:
    """Every id of the runs."""
    return np.concatenate(
        [np.arange(first(run), first(run) + run.units, dtype=np.int32) for run in runs]
    )


def placement(shape: Shape, blocks: int, address: int, device: int) -> Any:
    return dataclasses.replace(shape.placement(0, blocks, address), device_id=device)


def cache_bytes(shape: Shape, blocks: int) -> int:
    """Bytes of all regions."""
    return shape.geometry.region_count * shape.geometry.page_bytes * blocks


@dataclasses.dataclass
class Cell:
    """One way and length: microseconds of each post and until done, and the place it has read."""

    make: Callable[[int, int], Callable[[], Any]]
    finish: Callable[[Any], tuple[float, int]]
    tokens: int
    posts: list[float] = dataclasses.field(default_factory=list)
    dones: list[float] = dataclasses.field(default_factory=list)
    places: list[int] = dataclasses.field(default_factory=list)
    descriptors: int = 0

    def measure(self, turn: int, first_place: int, pause_seconds: float) -> None:
        """One read."""
        place = (turn + first_place) % SPREAD
        post = self.make(self.tokens, place)
        if pause_seconds:
            time.sleep(pause_seconds)
        begun = time.perf_counter()
        read = post()
        posted = time.perf_counter()
        done, self.descriptors = self.finish(read)
        if turn >= WARM_ROUNDS:  # the first ones wake the connection up
            self.posts.append(1e6 * (posted - begun))
            self.dones.append(1e6 * (done - begun))
            self.places.append(place)

    def line(self) -> str:
        """Quartiles and 90 % of the post, share within the goal, and so on."""
        low, median, high = statistics.quantiles(self.posts, n=4)
        most = statistics.quantiles(self.posts, n=10)[-1]
        share = sum(post <= GOAL_MICROSECONDS for post in self.posts) / len(self.posts)
        done, done_most = statistics.median(self.dones), statistics.quantiles(self.dones, n=10)[-1]
        return (
            f"{low:7.0f} {median:7.0f} {high:7.0f} {most:7.0f} {share:7.0%} "
            f"{done:9.0f} {done_most:7.0f} {self.descriptors:12d}"
        )

    def by_place(self) -> str:
        """Medians of the post at each place."""
        found = [
            [post for post, at in zip(self.posts, self.places, strict=True) if at == place]
            for place in range(SPREAD)
        ]
        return " ".join(f"{statistics.median(posts):7.0f}" for posts in found if posts)


def compare(
    title: str,
    ways: Mapping[str, tuple[Any, Any]],
    lengths: Sequence[int],
    options: argparse.Namespace,
    pause_seconds: float,
) -> None:
    """Print a line per way and length, and one more with its places."""
    cells = {
        (name, tokens): Cell(make, finish, tokens)
        for tokens in lengths
        for name, (make, finish) in ways.items()
    }
    order, source = [*enumerate(cells.values())], random.Random(options.seed)
    for turn in range(WARM_ROUNDS + options.rounds):
        source.shuffle(order)
        for first_place, cell in order:
            cell.measure(turn, first_place, pause_seconds)
    print(
        f"{title}\n{'way':<20} tokens  post us: p25     p50     p75     p90   "
        f"<={GOAL_MICROSECONDS}  done us: p50     p90  descriptors   post p50 at each place"
    )
    for (name, tokens), cell in cells.items():
        print(f"{name:<20} {tokens:6d} {' ' * 6}{cell.line()}  {cell.by_place()}", flush=True)


def main() -> None:
    """Print tables without and beside vLLM's agent, without and with pauses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default=NANO)
    parser.add_argument("--tokens", default="1000,3000")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1, help="of the order in each round")
    parser.add_argument("--pauses", default="0,2", help="before each post, milliseconds")
    options = parser.parse_args()
    shape = shape_of(options.model, 1)
    lengths = [int(part) for part in options.tokens.split(",")]
    blocks = 1 + SPREAD * max(shape.blocks_needed(tokens) for tokens in lengths)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    owner = context.Process(target=own, args=(cache_bytes(shape, blocks), options.device, there))
    owner.start()
    met = here.recv()
    reader = Reader(shape, blocks, options.device, met)
    where = named(two_devices(options.device))
    print(f"{options.model}, TP 1, {where}, block of {shape.layout.block_tokens} tokens")
    ways: dict[str, tuple[Any, Any]] = {
        "ranges": (reader.by_ranges, reader.finish),
        "ids": (reader.by_ids, reader.finish),
        "in-tree": (reader.as_in_tree, reader.finish),
    }
    pauses = [float(part) / 1e3 for part in options.pauses.split(",")]
    for pause in pauses:
        compare(f"a pause of {1e3 * pause:g} ms", ways, lengths, options, pause)
    upstream = UpstreamAgent(reader, met[0])
    ways["in-tree, its agent"] = (upstream.post, upstream.finish)
    for pause in pauses:
        compare(
            f"vLLM's agent beside, a pause of {1e3 * pause:g} ms", ways, lengths, options, pause
        )
    here.send("end")
    owner.join()


if __name__ == "__main__":
    main()
