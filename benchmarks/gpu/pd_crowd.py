"""Several processes of each kind on one GPU: does a connector make a step longer, or was it luck?

Two engines that are alike in all but their connector differ in time per token, and so do two with
the same connector. `start` brings up several decode engines of each kind, with our connector, with
the one inside vLLM and without any, and some prefill engines of both connectors; all share a GPU,
where an engine without requests takes memory only. `alone` asks each decode engine like a plain
one, one after the other; `pairs` sends requests through prefill and decode, and, as `colocated`,
to two engines without connector in turn. Both go through all processes and loads in passes, in an
order that alternates, until `--seconds` are spent. `report` has a value for each process (the
median of its passes) and compares kinds by their means over processes (`crowd_verdict`).

Weights are random. The model has Nano's layers in a tenth of its memory (`nano-thin`), so absolute
times say little; nothing is compiled, decode steps are whole CUDA graphs (`FULL_DECODE_ONLY`), so
that sixteen engines start in a minute or two. Prefill and decode share the GPU's time too. `try`
brings up three engines, asks them, tells what they take, and ends them.

    export PYTHONPATH=SITE:connector:connector/testkit
    python benchmarks/gpu/pd_crowd.py try
    python benchmarks/gpu/pd_crowd.py start
    python benchmarks/gpu/pd_crowd.py alone --seconds 150
    python benchmarks/gpu/pd_crowd.py pairs --seconds 180
    python benchmarks/gpu/pd_crowd.py report
    python benchmarks/gpu/pd_crowd.py stop
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import crowd_report
import keeper
import multicast
from crowd_plan import (
    DECODE,
    KINDS,
    PREFILL,
    clients_of,
    enough,
    name_of,
    order_of,
    prefills_of,
    processes_of,
    shares_of,
)
from crowd_report import ALONE, NONE, PAIRS
from memory_split import STEP_TOKENS, Share, gpu_bytes, too_much, used_mib
from pd_compare import CONNECTORS, SMALL, FullEngine
from pd_load import Load, run_load
from pd_models import write_model
from pd_report import BASE, COLOCATED, OURS

from hybridpd_testkit.engines import (
    EngineSpec,
    Place,
    base_environment,
    engine_python,
    stop_all,
)
from hybridpd_testkit.nursery import Nursery
from hybridpd_testkit.processes import free_port

GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128)
WARM_CLIENTS = 32
TRIED = (OURS, NONE)
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "0",
    **multicast.ENVIRONMENT,
    # It is built at the first start, for minutes; greedy tokens need none.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def specs_of(options: argparse.Namespace, checkpoint: Path) -> list[EngineSpec]:
    """All engines; the first of each kind, then the second of each, so that none comes up last."""
    specs, first = [], options.first
    numbers = range(first, first + options.processes)
    prefills = range(first, first + options.prefills)
    ports = {number: free_port() for number in prefills}
    told = {"prefill_peers": [f"{Place().data_host}:{port}" for port in ports.values()]}
    for number in sorted({*numbers, *prefills}):
        for kind in KINDS:
            common = {"environment": ENVIRONMENT}
            if kind != NONE:
                common["connector"] = CONNECTORS[kind]
            if kind != NONE and number in prefills:
                port = ports[number] if kind == OURS else None
                name = name_of(kind, PREFILL, number)
                place = Place(side_channel_port=port)
                specs.append(
                    EngineSpec(name, checkpoint, role="kv_producer", place=place, **common)
                )
            if number in numbers:
                role = None if kind == NONE else "kv_consumer"
                meets = told if kind == OURS else {}
                name = name_of(kind, DECODE, number)
                specs.append(EngineSpec(name, checkpoint, role=role, extra_config=meets, **common))
    return specs


def arguments_of(spec: EngineSpec, share: Share | None, options: argparse.Namespace) -> str:
    """Of one engine's command line. No share: a rehearsal on a CPU."""
    if share is None:
        return "--dtype float32 --enforce-eager"
    most = clients_of(spec, options)
    sizes = [size for size in GRAPHS if size <= most]
    config = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    graphs = json.dumps({**config, **multicast.COMPILATION}, separators=(",", ":"))
    return (
        f"--gpu-memory-utilization 0.05 --kv-cache-memory-bytes {share.cache} "
        f"--max-num-seqs {most} --max-num-batched-tokens {STEP_TOKENS} "
        # By timing, while others start on the same GPU, each engine would choose other kernels.
        "--no-enable-flashinfer-autotune "
        f"--compilation-config {graphs}"
    )


def engines_of(options: argparse.Namespace) -> list[FullEngine]:
    """All engines, not started; SystemExit when they do not fit."""
    rehearsed = options.model == SMALL
    checkpoint = options.out / options.model
    specs = specs_of(options, checkpoint)
    shares = [None] * len(specs) if rehearsed else shares_of(specs, options)
    if not rehearsed:
        if problem := too_much([share for share in shares if share], gpu_bytes()):
            raise SystemExit(problem)
        total = sum(share.total for share in shares if share)
        print(f"{len(specs)} engines are to take {total / 1e9:.1f} GB of one GPU", flush=True)
    write_model(options.model, checkpoint)
    nursery = Nursery(engine_python(), base_environment()) if rehearsed else None
    engines = []
    for spec, share in zip(specs, shares, strict=True):
        given = argparse.Namespace(engine_args=arguments_of(spec, share, options))
        engines.append(FullEngine(spec, options.out, given, nursery))
    return engines


def start(options: argparse.Namespace) -> int:
    """Bring all engines up; 1 when fewer than two of each kind came."""
    return keeper.bring_up(engines_of(options), options.out, options.start_seconds, enough)


def try_one(options: argparse.Namespace) -> int:
    """One pair of ours and one engine without connector: do they start with these settings, and
    what do they take? Their compiled kernels are there for the crowd."""
    one = argparse.Namespace(**{**vars(options), "processes": 1, "prefills": 1})
    kept = [name_of(OURS, PREFILL, one.first), *(name_of(k, DECODE, one.first) for k in TRIED)]
    engines = [engine for engine in engines_of(one) if engine.spec.name in kept]
    urls = {}
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            print(f"{engine.spec.name}: up after {engine.wait_ready(options.start_seconds):.0f} s")
            urls[engine.spec.name] = engine.url
        for clients in (int(part) for part in options.concurrency.split(",")):
            load = Load(clients, 2 * clients, options.input, options.output, 7)
            for name in kept[1:]:
                alone = asyncio.run(run_load(None, urls[name], load))
                print(json.dumps({"alone": name, **alone}))
            pair = asyncio.run(run_load(urls[kept[0]], urls[kept[1]], load))
            print(json.dumps({"pair": kept[1], **pair}), flush=True)
        print("\n".join(f"{pid}: {used} MiB of the GPU" for pid, used in used_mib().items()))
    finally:
        stop_all(engines)
    return 0


class Crowd:
    """The engines that are up, and where points go."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.urls = {
            name: str(engine["url"]) for name, engine in keeper.engines_up(options.out).items()
        }
        self.clients = [int(part) for part in options.concurrency.split(",")]
        self.numbers = range(options.first, options.first + options.processes)

    def decodes(self, kind: str, number: int) -> list[str]:
        """Who generates tokens: one engine, or two that take requests in turn as `colocated`."""
        numbers = processes_of(NONE if kind == COLOCATED else kind, [*self.urls])
        if number not in numbers:
            return []
        if kind != COLOCATED:
            return [self.urls[name_of(kind, DECODE, number)]]
        other = numbers[(numbers.index(number) + 1) % len(numbers)]
        return [self.urls[name_of(NONE, DECODE, one)] for one in (number, other)]

    def prefill(self, kind: str, number: int) -> str | None:
        """Who prefills for it; processes share prefill engines."""
        numbers = prefills_of(kind, [*self.urls])
        if not numbers:
            return None
        return self.urls[name_of(kind, PREFILL, numbers[number % len(numbers)])]

    def alone(self, kind: str, number: int, load: Load) -> dict[str, Any] | None:
        decodes = self.decodes(kind, number)
        return asyncio.run(run_load(None, decodes, load)) if decodes else None

    def pair(self, kind: str, number: int, load: Load) -> dict[str, Any] | None:
        decodes, prefill = self.decodes(kind, number), self.prefill(kind, number)
        if not decodes or (prefill is None and kind != COLOCATED):
            return None
        return asyncio.run(run_load(prefill, decodes, load))

    def warm_up(self, phase: str) -> None:
        """All engines at once, then each pair by itself: graphs, kernels and links are there."""
        options = self.options
        plain = Load(WARM_CLIENTS, 2 * WARM_CLIENTS, options.input, 8, 1)

        async def all_at_once() -> None:
            await asyncio.gather(*(run_load(None, url, plain) for url in self.urls.values()))

        asyncio.run(all_at_once())
        for kind in (OURS, BASE) if phase == PAIRS else ():
            for number in self.numbers:
                self.pair(kind, number, Load(2, 4, options.input, 8, 2))

    def passes(
        self,
        phase: str,
        kinds: Sequence[str],
        ask: Callable[[str, int, Load], dict[str, Any] | None],
    ) -> int:
        """Whole passes until the time is spent, one at least; failed requests."""
        options, begun, failed = self.options, time.monotonic(), 0
        self.warm_up(phase)
        print(f"# warm after {time.monotonic() - begun:.1f} s", flush=True)
        longest = 0.0
        for turn in range(options.passes):
            started = time.monotonic()
            if turn and started - begun + longest > options.seconds:
                break
            for concurrency in self.clients:
                requests = max(options.requests, 2 * concurrency)
                for kind, number in order_of(kinds, self.numbers, turn):
                    load = Load(concurrency, requests, options.input, options.output, 100 + turn)
                    point = ask(kind, number, load)
                    if point is not None:
                        failed += point["failed"]
                        said = {"connector": kind, "process": number, "pass": turn}
                        self.write({"phase": phase, **said, **point})
            longest = max(longest, time.monotonic() - started)
            print(f"# pass {turn} of {phase}: {time.monotonic() - started:.1f} s", flush=True)
        return failed

    def write(self, record: dict[str, Any]) -> None:
        """Add a point to the results at once; of those only a short line is printed."""
        with results_of(self.options).open("a") as file:
            file.write(json.dumps(record) + "\n")
        keys = ("phase", "connector", "process", "concurrency", "tpot_p50_ms", "failed")
        print(*(record.get(key) for key in keys), flush=True)


def results_of(options: argparse.Namespace) -> Path:
    found: Path = options.results or options.out / "crowd.jsonl"
    return found


def alone(options: argparse.Namespace) -> int:
    """Each decode engine like a plain one."""
    crowd = Crowd(options)
    return int(crowd.passes(ALONE, KINDS, crowd.alone) > 0)


def pairs(options: argparse.Namespace) -> int:
    """Through prefill and decode."""
    crowd = Crowd(options)
    return int(crowd.passes(PAIRS, (OURS, BASE, COLOCATED), crowd.pair) > 0)


def report(options: argparse.Namespace) -> int:
    """Tables of everything that was written."""
    points = [json.loads(line) for line in results_of(options).open()]
    print("One GPU, shared by all engines: compare kinds, not with other machines.")
    print("\n".join(crowd_report.report(points)))
    return 0


def stop(options: argparse.Namespace) -> int:
    """End the engines."""
    return keeper.stop(options.out)


def main() -> int:
    """Parse and run one of the commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {
        "try": try_one,
        "start": start,
        "alone": alone,
        "pairs": pairs,
        "report": report,
        "stop": stop,
    }
    parser.add_argument("command", choices=commands)
    parser.add_argument("--model", default="nano-thin", help="of `pd_models`; small to rehearse")
    parser.add_argument("--processes", type=int, default=4, help="decode engines of each kind")
    parser.add_argument("--prefills", type=int, default=2, help="of each connector")
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="number of the first process: another "
        "crowd's points go on behind those that are there",
    )
    parser.add_argument("--concurrency", default="1,8,32,128", help="its largest sizes the caches")
    parser.add_argument("--requests", type=int, default=8, help="per point, at least")
    parser.add_argument("--input", type=int, default=1000, help="prompt tokens, on average")
    parser.add_argument("--output", type=int, default=100, help="tokens to generate")
    parser.add_argument("--passes", type=int, default=9, help="at most")
    parser.add_argument("--seconds", type=float, default=150, help="no pass begins that ends later")
    parser.add_argument("--start-seconds", type=float, default=300)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "pd-crowd")
    parser.add_argument("--results", type=Path, help="lines are added to it")
    options = parser.parse_args()
    return commands[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
