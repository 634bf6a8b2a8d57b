"""What a pair's first request costs when D learns of P by it, and when D has met P before.

    python benchmarks/first_request.py [--device cuda] [--repeats 5]

Both halves of the connector, the real agents and the real side channel, in two processes; no
engine. Nemotron-3-Nano's layers at TP 1 (on a CPU with a 16th of its state, or the copy would hide
the rest). Each repeat is a fresh pair, two new processes. Each request has blocks of its own, as in
an engine: on a CPU, where a read is a copy, one into the same blocks again takes half as long.

D's main thread does what the thread of an engine without other requests does: a step, and unless a
read is in flight the pause of a millisecond that vLLM makes after a step without a model, in which
the connector's other threads have the interpreter. It looks tightly only while a read is in flight.
(A thread that never pauses takes the interpreter from the handshake that it waits for, which then
takes its link for a slow one.) Per row:

    first ms    from the arrival of a pair's first request at D until its load is reported;
                handshake and wake-up of the link are in it where the request pays for them
    rested ms   median of further requests of the same pair, each after a pause: like the first one
                they come to a core that has done nothing, and find its caches cold
    later ms    median of further requests, one after the other
    ratio       first / rested, the median of the pairs'
    worst       the largest ratio
    ahead ms    from D's readiness until P is met, on threads of its own; no request waits for it

and what no figure has: how long both processes took to come up, and D's half to close.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from devices import named, two_devices
from hybridpd_connector.agent import NixlAgent
from hybridpd_connector.agent_api import Memory, MemoryRegion
from hybridpd_connector.consumer import Timeouts
from hybridpd_connector.handshake import Hello, Responder
from hybridpd_connector.link_probe import SCRATCH_BYTES, Scratch
from hybridpd_connector.metadata import GroupFacts, RequestFacts
from hybridpd_connector.named_peers import parse_names
from hybridpd_connector.request_blocks import Identity
from hybridpd_connector.scheduler_side import SchedulerHalf
from hybridpd_connector.settings import SETTINGS
from hybridpd_connector.side_channel import Server
from hybridpd_connector.side_channel_client import Client
from hybridpd_connector.tail_zeros import Tail
from hybridpd_connector.worker_side import RankCache, RankSettings, WorkerHalf
from hybridpd_geometry import EngineFacts, layout_of, plan_engine
from hybridpd_testkit.processes import free_port
from shapes import NANO, Shape, shape_of

TOKENS = 1000
LATER_REQUESTS = 20
RESTED_REQUESTS = 10
REST_SECONDS = 0.1
DIFFERENT_REQUESTS = 1 + LATER_REQUESTS + RESTED_REQUESTS
LEASE_SECONDS = 30
RENEW_INTERVAL_SECONDS = 0.25  # as in vllm_engine, whose import takes 20 s in every process
STEP_PAUSE_SECONDS = 0.001  # EngineCore's, after a step without a model
WAIT_SECONDS = 30.0
UP_SECONDS = 120.0
CLOSE_SECONDS = 10.0
CPU_STATE_SHARE = 16
HOST = "127.0.0.1"
DEFAULTS = {setting.name: setting.default for setting in SETTINGS}
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def shape_for(device: str) -> Shape:
    shape = shape_of(NANO, 1)
    if device != "cpu":
        return shape
    state = shape.model.state
    small = dataclasses.replace(state, state_size=state.state_size // CPU_STATE_SHARE)
    model = dataclasses.replace(shape.model, state=small)
    facts = EngineFacts(tp_size=1)
    layout = layout_of(model, facts, NANO, vllm_version="0.32.0")
    return Shape(NANO, model, plan_engine(model, facts), layout)


class Engine:
    """Both halves of one rank, and the cache. ``zero``: what zeroes tails of requests."""

    def __init__(
        self,
        role: str,
        device: str,
        port: int,
        meets: tuple[str, ...] = (),
        zero: Callable[[Iterable[Tail]], None] = lambda tails: None,
    ) -> None:
        self.shape, self.prompt = shape_for(device), tuple(range(TOKENS))
        self._needed, self._served = self.shape.blocks_needed(TOKENS), 0
        blocks = self._needed * DIFFERENT_REQUESTS
        page, regions = self.shape.geometry.page_bytes, self.shape.geometry.region_count
        self.bytes = torch.ones(blocks * page * regions, dtype=torch.uint8, device=device)
        self.scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
        name = f"{role}-{os.getpid()}-{time.monotonic_ns()}"
        self.identity = Identity(name, HOST, port, 1, role, LEASE_SECONDS)
        kinds = self.shape.layout.group_kinds
        self.half = SchedulerHalf(
            self.identity, [GroupFacts(kind, self.shape.layout.block_tokens) for kind in kinds]
        )
        kind = Memory.DRAM if device == "cpu" else Memory.VRAM
        index = self.bytes.device.index or 0
        placement = dataclasses.replace(
            self.shape.placement(0, blocks, self.bytes.data_ptr()), device_id=index
        )
        cache = self.cache = RankCache(
            self.shape.layout,
            placement,
            (MemoryRegion(self.bytes.data_ptr(), self.bytes.numel(), index, kind),),
            zero,
            Scratch(
                MemoryRegion(self.scratch.data_ptr(), SCRATCH_BYTES, index, kind), self.scratch
            ),
        )
        settings = RankSettings(
            name, role, LEASE_SECONDS, DEFAULTS["poll_interval_seconds"], RENEW_INTERVAL_SECONDS,
            Timeouts(), step_wait_seconds=DEFAULTS["step_wait_seconds"],
            prefill_peers=parse_names(meets),
        )  # fmt: skip
        agent = NixlAgent(name, progress_thread=role == "producer")
        ready = (lambda: torch.cuda.set_device(device)) if device != "cpu" else (lambda: None)
        self.worker = WorkerHalf(cache, agent, Client(), settings, ready)
        self.post = self.worker.start_loads

    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """Of the next request: blocks of its own, whose bytes no CPU cache holds yet."""
        first = 1 + self._served % DIFFERENT_REQUESTS * self._needed
        self._served += 1
        return self.shape.blocks(TOKENS, first=first).groups

    def publish(self) -> Server:
        responder = Responder(self.identity.engine_id)
        responder.publish(
            Hello(
                self.identity.engine_id, "0.1.0", "0.32.0", "producer", 1, LEASE_SECONDS,
                self.shape.layout.to_dict(), (self.worker.hello(),),
            )
        )  # fmt: skip
        return Server(HOST, self.identity.port, responder.answer)

    def step(self) -> frozenset[str]:
        """One step; requests whose load ended in it."""
        self.worker.absorb(self.half.build_orders())
        self.post()
        results, reasons = self.worker.poll()
        if results.failed:
            raise SystemExit(f"a load failed: {reasons}")
        self.half.on_results(results.sent, results.received, results.failed, reasons)
        return results.received

    def prefill(self, request_id: str) -> Any:
        self.half.on_new_request(RequestFacts(request_id, TOKENS, self.prompt, dict(TO_PREFILL)))
        _, answer = self.half.on_finished(request_id, TOKENS - 1, self.blocks())
        self.step()
        return answer

    def load(self, request_id: str, params: Any) -> float:
        """Seconds from arrival until the load is reported."""
        began = time.perf_counter()
        self.half.on_new_request(RequestFacts(request_id, TOKENS, self.prompt, params))
        tokens = self.half.external_tokens(request_id, 0)
        self.half.on_allocated(request_id, self.blocks(), tokens)
        while request_id not in self.step():
            if not self.worker.reading:
                time.sleep(STEP_PAUSE_SECONDS)
        seconds = time.perf_counter() - began
        self.half.on_finished(request_id, None, ())
        self.step()
        return seconds

    def wait_until_met(self) -> float:
        began = time.perf_counter()
        self.worker.warmed_up()
        while not self.worker.peers().get("ready"):
            if time.perf_counter() - began > WAIT_SECONDS:
                raise SystemExit("P was not met")
            time.sleep(0.001)
        return time.perf_counter() - began


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one pair: its first request, one after a pause, a later one, until P was met;
    until both processes were up, and until D's half was closed."""

    first: float
    rested: float
    later: float
    met: float
    up: float = 0.0
    closing: float = 0.0


def producer(device: str, pipe: Any) -> None:
    """P's process: a prefill for each request id it is sent, until it is killed."""
    engine = Engine("producer", device, free_port())
    server = engine.publish()
    pipe.send(engine.identity.port)
    with contextlib.closing(server):
        while True:
            pipe.send(engine.prefill(pipe.recv()))


def consumer(device: str, ahead: bool, prefill: Any, pipe: Any) -> None:
    """D's process: all requests of a pair. Says when it is up, its times, and when it is closed."""
    port = prefill.recv()
    decode = Engine("consumer", device, 0, (f"{HOST}:{port}",) if ahead else ())
    pipe.send("up")
    met = decode.wait_until_met() if ahead else 0.0
    seconds = []
    for number in range(DIFFERENT_REQUESTS):
        prefill.send(f"p-{number}")
        params = prefill.recv()
        if number > LATER_REQUESTS:
            time.sleep(REST_SECONDS)
        seconds.append(decode.load(f"d-{number}", params))
    first, later, rested = seconds[0], seconds[1 : 1 + LATER_REQUESTS], seconds[-RESTED_REQUESTS:]
    pipe.send(Times(first, statistics.median(rested), statistics.median(later), met))
    decode.worker.close()
    pipe.send("closed")


def started(context: Any, target: Any, *arguments: Any) -> Any:
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def take(pipe: Any, seconds: float, what: str) -> Any:
    if not pipe.poll(seconds):
        raise SystemExit(f"nothing after {seconds:.0f} s: {what}")
    return pipe.recv()


def pair(context: Any, devices: tuple[str, str], ahead: bool) -> Times:
    """A fresh pair, measured and killed: how processes end has no part in it."""
    begun = time.perf_counter()
    ours, theirs = context.Pipe()
    results, told = context.Pipe()
    processes = [
        started(context, producer, devices[1], theirs),
        started(context, consumer, devices[0], ahead, ours, told),
    ]
    try:
        take(results, UP_SECONDS, "both processes up")
        up = time.perf_counter() - begun
        times = take(results, 2 * WAIT_SECONDS, "the requests of a pair")
        begun = time.perf_counter()
        if results.poll(CLOSE_SECONDS):
            results.recv()
        return dataclasses.replace(times, up=up, closing=time.perf_counter() - begun)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def quick_context() -> Any:
    """Processes are forked from one that has imported PyTorch, but has touched no GPU."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    return context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=5, help="fresh pairs per row")
    options = parser.parse_args()
    devices = two_devices(options.device)
    context = quick_context()
    print(f"{named(devices)}, {os.cpu_count()} cores, medians of {options.repeats} fresh pairs")
    print(
        f"{'first request':30} {'first ms':>9} {'rested ms':>9} {'later ms':>9} {'ratio':>7} "
        f"{'worst':>7} {'ahead ms':>9}"
    )
    found: list[Times] = []
    for title, ahead in (("meets P by its parameters", False), ("finds P met ahead", True)):
        rows = [pair(context, devices, ahead) for _ in range(options.repeats)]
        found += rows
        ratios = [row.first / row.rested for row in rows]
        first, rested, later, met = (
            1e3 * statistics.median(getattr(row, name) for row in rows)
            for name in ("first", "rested", "later", "met")
        )
        print(
            f"{title:30} {first:9.2f} {rested:9.2f} {later:9.2f} {statistics.median(ratios):7.2f} "
            f"{max(ratios):7.2f} {met:9.1f}",
            flush=True,
        )
    up, closing = (max(getattr(row, name) for row in found) for name in ("up", "closing"))
    print(f"at most: processes up after {up:.1f} s, D's half closed after {closing:.2f} s")


if __name__ == "__main__":
    main()
