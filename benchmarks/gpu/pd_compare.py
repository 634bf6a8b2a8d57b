"""Compare the bundled connector with the one inside vLLM on GPUs of one machine.

`start` brings up a prefill and a decode engine for each connector and leaves them running, with
`--layout shared` (the default) on the same GPUs: an engine without requests leaves its GPU alone,
so both connectors are measured on the same silicon, one after the other. `load` drives them in
turn, in alternating order, beside the same two engines as plain ones (colocated); `report` prints
tables of all that was written. Results are written line by line, so that a run that is cut short
keeps what it has. Weights are random: this measures speed, not tokens.

Our D is told where its P lives (`prefill_peers`), as the operator tells it, and so meets it before
a request does; `--no-prefill-peers` leaves that out. With `--spin` each point is measured beside so
many busy processes too (`spinners`): do sleeping cores make the difference? With `--alone` one
engine of each pair is asked like a plain one: does it, without any hand-over?

With `--gpus` engines that do not fit beside each other wrap round: `--tp 1,2 --gpus 2` puts D on
both GPUs and P on the first of them. `start` prints what the engines say of their pages.

    export PYTHONPATH=SITE:connector:connector/testkit
    python benchmarks/gpu/pd_compare.py start --model nano64 --tp 1,1
    python benchmarks/gpu/pd_compare.py load --concurrency 8,32,128 --repeats 3
    python benchmarks/gpu/pd_compare.py load --concurrency 1 --spin 0,2,all --label awake --warm
    python benchmarks/gpu/pd_compare.py load --concurrency 1 --alone decode,prefill --warm
    python benchmarks/gpu/pd_compare.py report
    python benchmarks/gpu/pd_compare.py stop
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keeper
import multicast
import pd_report
from handover_stages import MARK
from pd_cpu import cpu_seconds, scheduled
from pd_load import Load, run_load
from pd_models import write_model
from spinners import count_of, spinning

from hybridpd_testkit.engines import (
    SHIPPED,
    UPSTREAM,
    ConnectorClass,
    Engine,
    EngineSpec,
    Place,
    base_environment,
    engine_python,
)
from hybridpd_testkit.metrics import Metrics, parse_metrics
from hybridpd_testkit.nursery import Nursery
from hybridpd_testkit.processes import free_port
from hybridpd_testkit.tracing import MARK_VARIABLE, TRACE_VARIABLE

CONNECTORS = {pd_report.BASE: UPSTREAM, pd_report.OURS: SHIPPED}
# The same two, noting when their calls happen: for `handover_stages.py`.
TRACE_MODULE = "hybridpd_testkit.trace_connector"
TRACED = {
    pd_report.BASE: ConnectorClass("TracedUpstream", TRACE_MODULE),
    pd_report.OURS: ConnectorClass("TracedHybrid", TRACE_MODULE),
}
METRICS = (
    "vllm:nixl_bytes_transferred_sum",
    "vllm:nixl_num_descriptors_sum",
    "vllm:nixl_post_time_seconds_sum",
    "vllm:nixl_xfer_time_seconds_sum",
    "hybridpd_read_bytes_total",
    "hybridpd_read_descriptors_total",
    "hybridpd_post_seconds_sum",
    "hybridpd_until_noticed_seconds_sum",
    "hybridpd_queue_seconds_sum",
)
SMALL = "small"
# Two engines share a GPU: each takes a fixed part for its cache, whatever the other one holds.
SHARED_ARGUMENTS = "--gpu-memory-utilization 0.1 --kv-cache-memory-bytes"
ONE_GPU = (
    "# All engines share one GPU, prefill and decode of a pair too: ratios of connectors mean "
    "something, times do not"
)
MOST_CLIENTS = 128  # more need no graphs, which take long, and each sequence a state block


class FullEngine(Engine):
    """An engine for speed: the model's own dtype, CUDA graphs, random weights."""

    def __init__(
        self,
        spec: EngineSpec,
        logs: Path,
        options: argparse.Namespace,
        nursery: Nursery | None = None,
    ) -> None:
        super().__init__(spec, logs, nursery)
        self.spec = _FullSpec(spec, options)  # type: ignore[assignment]


class _FullSpec:
    """The test kit's specification with another command line."""

    def __init__(self, spec: EngineSpec, options: argparse.Namespace) -> None:
        self._spec, self._options = spec, options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec, name)

    def server_arguments(self, port: int) -> list[str]:
        """The server's command line."""
        transfer = self._spec.transfer_config()
        return [
            *("--model", str(self._spec.checkpoint), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy"),
            *("--tensor-parallel-size", str(self._spec.tp_size)),
            *("--max-model-len", "8192", "--no-enable-prefix-caching"),
            *("--disable-uvicorn-access-log",),
            *("--worker-extension-cls", "hybridpd_testkit.worker_report.WorkerReport"),
            *(("--kv-transfer-config", json.dumps(transfer)) if transfer else ()),
            *self._options.engine_args.split(),
        ]


def start(options: argparse.Namespace) -> int:
    """Bring all engines up in sessions of their own and write down where they are."""
    if options.gpus == 1:
        print(ONE_GPU, flush=True)
    folder = options.out / options.model
    write_model(options.model, folder)
    if options.engine_args is None:
        options.engine_args = engine_arguments(options)
    # A rehearsal: vLLM is imported once for all engines.
    nursery = Nursery(engine_python(), base_environment()) if options.model == SMALL else None
    engines = [
        FullEngine(spec, options.out, options, nursery) for spec in specs_of(options, folder)
    ]
    return keeper.bring_up(
        engines,
        options.out,
        options.start_seconds,
        # One pair may be measured without the other.
        lambda up: bool(pd_report.pairs_of(up)),
        options.stagger_seconds,
    )


def specs_of(options: argparse.Namespace, checkpoint: Path) -> list[EngineSpec]:
    """P and D of each connector."""
    prefill_tp, decode_tp = (int(part) for part in options.tp.split(","))
    traced = {TRACE_VARIABLE: str(options.trace), MARK_VARIABLE: MARK} if options.trace else {}
    shared = {**multicast.ENVIRONMENT, **traced}
    gpu, specs = 0, []
    for name in options.connectors.split(","):
        gpu = 0 if options.layout == "shared" else gpu
        port = free_port()
        meets = {"prefill_peers": [f"{Place().data_host}:{port}"]}
        for role, tp in (("kv_producer", prefill_tp), ("kv_consumer", decode_tp)):
            told = role == "kv_consumer" and name == pd_report.OURS and options.prefill_peers
            specs.append(
                EngineSpec(
                    f"{name}-{role}",
                    checkpoint,
                    tp_size=tp,
                    role=role,
                    connector=(TRACED if options.trace else CONNECTORS)[name],
                    extra_config=meets if told else {},
                    environment={"CUDA_VISIBLE_DEVICES": placed(gpu, tp, options.gpus), **shared},
                    place=Place(side_channel_port=port if role == "kv_producer" else None),
                )
            )
            gpu += tp
    return specs


def engine_arguments(options: argparse.Namespace) -> str:
    """Memory and graphs of the engines on GPUs."""
    if options.model == SMALL:
        return ""
    config = {"max_cudagraph_capture_size": MOST_CLIENTS, **multicast.COMPILATION}
    graphs = json.dumps(config, separators=(",", ":"))
    memory = f"{SHARED_ARGUMENTS} {options.cache_bytes} " if options.layout == "shared" else ""
    return f"{memory}--max-num-seqs {2 * MOST_CLIENTS} --compilation-config {graphs}"


def placed(first: int, count: int, gpus: int) -> str:
    """`count` GPUs from `first` on; they wrap round at `gpus`, unless it is 0."""
    return ",".join(str(gpu % gpus if gpus else gpu) for gpu in range(first, first + count))


def metrics_of(url: str) -> Metrics:
    """An engine's metrics as they are now."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        return parse_metrics(response.read().decode())


def counters(url: str) -> dict[str, float]:
    """The transfer counters of an engine."""
    found = metrics_of(url)
    return {name: found.total(name) for name in METRICS}


class Fleet:
    """The engines that are up, and where results go."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        described = keeper.engines_up(options.out)
        self.pairs = {
            name: (described[f"{name}-kv_producer"], described[f"{name}-kv_consumer"])
            for name in CONNECTORS
            if {f"{name}-kv_producer", f"{name}-kv_consumer"} <= set(described)
        }

    def write(self, record: Mapping[str, Any]) -> None:
        """Print a record and add it to the results file at once."""
        line = json.dumps(record)
        print(line, flush=True)
        with (self.options.results or self.options.out / "results.jsonl").open("a") as file:
            file.write(line + "\n")

    def warm_up(self) -> None:
        """Plain requests to every engine, then the first hand-overs of each pair, told apart."""
        options = self.options
        for name, (prefill, decode) in self.pairs.items():
            plain = Load(4, 8, options.input, 16, 1)
            asyncio.run(run_load(None, [prefill["url"], decode["url"]], plain))
            found = []
            ready = metrics_of(decode["url"]).total("hybridpd_peers", state="ready")
            for index in range(6):
                one = Load(1, 1, options.input, 4, 2 + index)
                result = asyncio.run(run_load(prefill["url"], decode["url"], one))
                found.append(result.get("hand_over_p50_ms", -1.0))
            self.write(
                {
                    "kind": "first",
                    "connector": name,
                    "met_ahead": int(ready),
                    "hand_over_ms": found,
                }
            )
            self.point(name, Load(8, 16, options.input, 16, 9))

    def point(self, name: str, load: Load, alone: str = "") -> dict[str, Any]:
        """One measured point of one connector, or of engines as plain ones: both, or one."""
        prefill, decode = self.pairs[pd_report.OURS if name == pd_report.COLOCATED else name]
        urls = prefill["url"], decode["url"]
        before, used = counters(urls[1]), [cpu_seconds(e["pid"]) for e in (prefill, decode)]
        asked = prefill if alone == "prefill" else decode
        turns, begun = scheduled(asked["pid"]), time.perf_counter()
        if name == pd_report.COLOCATED:
            result = asyncio.run(run_load(None, urls, load))
        else:
            result = asyncio.run(run_load(None if alone else urls[0], asked["url"], load))
        wall = time.perf_counter() - begun
        for what, count in scheduled(asked["pid"]).items():
            result[f"core_{what}"] = round((count - turns.get(what, 0.0)) / wall, 5)
        for role, engine, earlier in zip(
            ("prefill", "decode"), (prefill, decode), used, strict=True
        ):
            for part, seconds in cpu_seconds(engine["pid"]).items():
                result[f"{role}_{part}_cpu"] = round((seconds - earlier[part]) / wall, 3)
        moved = {k: v - before[k] for k, v in counters(urls[1]).items() if v != before[k]}
        done = max(1, load.requests - result["failed"])
        result["per_request"] = {k: round(v / done, 7) for k, v in moved.items()}
        return result


def load(options: argparse.Namespace) -> int:
    """Drive all set-ups in turn, in alternating order: A, B, ... then ..., B, A."""
    fleet = Fleet(options)
    names = [*fleet.pairs]
    if pd_report.OURS in fleet.pairs and options.colocated:
        names.append(pd_report.COLOCATED)
    if not options.warm:
        fleet.warm_up()
    spins = [count_of(part) for part in options.spin.split(",")]
    turn = failed = 0
    clients = [int(part) for part in options.concurrency.split(",")]
    points = [*itertools.product(options.alone.split(","), clients, spins)]
    for repeat in range(options.repeats):
        for alone, concurrency, spin in points:
            for name in names if turn % 2 == 0 else reversed(names):
                requests = max(options.requests, concurrency * 3)
                one = Load(concurrency, requests, options.input, options.output, 100 + repeat)
                with spinning(spin):
                    result = fleet.point(name, one, alone)
                failed += result["failed"]
                label = f"{alone} alone" if alone else options.label
                said = {"connector": name, "repeat": repeat, "spin": spin, "label": label}
                fleet.write({"kind": "point", **said, **result})
            turn += 1
    return 1 if failed else 0


def report(options: argparse.Namespace) -> int:
    """Tables of everything that was written."""
    path = options.results or options.out / "results.jsonl"
    records: Sequence[Mapping[str, Any]] = [json.loads(line) for line in path.open()]
    if options.gpus == 1:
        print(ONE_GPU)
    lines = pd_report.table([record for record in records if record["kind"] == "point"])
    print("\n".join([*lines, "", *pd_report.first_lines(records)]))
    return 0


def stop(options: argparse.Namespace) -> int:
    """End the keeper; its engines end with it."""
    return keeper.stop(options.out)


def main() -> int:
    """Parse and run one of the commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {"start": start, "load": load, "report": report, "stop": stop}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--model", default="nano64", help="nano, nano64, nano32; small to rehearse")
    parser.add_argument("--tp", default="1,1", help="prefill's and decode's TP size")
    parser.add_argument("--gpus", type=int, default=0, help="wrap round after so many")
    parser.add_argument("--cache-bytes", type=int, default=20_000_000_000, help="of each engine")
    parser.add_argument("--layout", choices=("shared", "own"), default="shared")
    parser.add_argument("--trace", type=Path, help="note calls here, for handover_stages.py")
    parser.add_argument("--stagger-seconds", type=float, default=0.0, help="between two starts")
    parser.add_argument("--connectors", default="in-tree,hybridpd")
    parser.add_argument("--engine-args", help="instead of the memory settings of the layout")
    parser.add_argument(
        "--no-prefill-peers",
        dest="prefill_peers",
        action="store_false",
        help="our D learns of its P by the first request",
    )
    parser.add_argument("--concurrency", default="1,8,32,128")
    parser.add_argument("--spin", default="0", help="busy processes beside, all: one for each core")
    parser.add_argument("--alone", default="", help="prefill or decode, or both: asked alone")
    parser.add_argument("--label", default="", help="points with another one are reported apart")
    parser.add_argument("--requests", type=int, default=100, help="per point, at least")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--input", type=int, default=2000, help="prompt tokens, on average")
    parser.add_argument("--output", type=int, default=200, help="tokens to generate")
    parser.add_argument("--warm", action="store_true", help="the engines have been warmed up")
    parser.add_argument("--no-colocated", dest="colocated", action="store_false")
    parser.add_argument("--start-seconds", type=float, default=580)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "pd-compare")
    parser.add_argument("--results", type=Path, help="lines are added to it")
    options = parser.parse_args()
    return commands[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
