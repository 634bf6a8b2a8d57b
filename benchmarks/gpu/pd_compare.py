"""Compare the bundled connector with the one inside vLLM on GPUs of one machine.

`start` brings up a prefill and a decode engine for each connector, side by side, and leaves them
running; `load` drives them in turn, repeat by repeat, and prints one JSON line per point and the
ratios at the end; `stop` ends them. Weights are random: this measures speed, not tokens.

    python benchmarks/gpu/pd_compare.py start --model nano --tp 1,1
    python benchmarks/gpu/pd_compare.py load --concurrency 1,8,32,128 --repeats 3
    python benchmarks/gpu/pd_compare.py stop
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from pd_load import Load, run_load
from pd_models import write_model

from hybridpd_testkit.engines import SHIPPED, UPSTREAM, Engine, EngineSpec
from hybridpd_testkit.metrics import parse_metrics

CONNECTORS = {"in-tree": UPSTREAM, "hybridpd": SHIPPED}
METRICS = (
    "vllm:nixl_bytes_transferred_sum",
    "vllm:nixl_num_descriptors_sum",
    "vllm:nixl_post_time_seconds_sum",
    "vllm:nixl_xfer_time_seconds_sum",
    "hybridpd_read_bytes_total",
    "hybridpd_read_descriptors_total",
    "hybridpd_post_seconds_sum",
    "hybridpd_transfer_seconds_sum",
    "hybridpd_queue_seconds_sum",
)
COMPARED = (
    "tokens_per_second",
    "ttft_p50_ms",
    "tpot_p50_ms",
    "hand_over_p50_ms",
    "hand_over_p99_ms",
)


class FullEngine(Engine):
    """An engine for speed: the model's own dtype, CUDA graphs, random weights."""

    def __init__(self, spec: EngineSpec, logs: Path, options: argparse.Namespace) -> None:
        super().__init__(spec, logs)
        self.spec = _FullSpec(spec, options)  # type: ignore[assignment]


class _FullSpec:
    """The test kit's specification with another command line."""

    def __init__(self, spec: EngineSpec, options: argparse.Namespace) -> None:
        self._spec, self._options = spec, options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec, name)

    def server_arguments(self, port: int) -> list[str]:
        """The server's command line."""
        return [
            *("--model", str(self._spec.checkpoint), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy"),
            *("--tensor-parallel-size", str(self._spec.tp_size)),
            *("--max-model-len", "8192", "--no-enable-prefix-caching"),
            *("--disable-uvicorn-access-log",),
            *("--kv-transfer-config", json.dumps(self._spec.transfer_config())),
            *self._options.engine_args.split(),
        ]


def start(options: argparse.Namespace) -> int:
    """Bring all engines up in sessions of their own and write down where they are."""
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.out / options.model
    write_model(options.model, folder)
    prefill_tp, decode_tp = (int(part) for part in options.tp.split(","))
    gpu, engines = 0, []
    for name in options.connectors.split(","):
        for role, tp in (("kv_producer", prefill_tp), ("kv_consumer", decode_tp)):
            spec = EngineSpec(
                f"{name}-{role}",
                folder,
                tp_size=tp,
                role=role,
                connector=CONNECTORS[name],
                environment={"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpu, gpu + tp)))},
            )
            engines.append(FullEngine(spec, options.out, options))
            gpu += tp
    if os.fork():
        return wait_for(options.out / "engines.json", options.start_seconds)
    os.setsid()  # the engines' parent: it outlives this command
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.wait_ready(options.start_seconds)
    described = {"keeper": os.getpid(), "urls": {e.spec.name: e.url for e in engines}}
    (options.out / "engines.json.new").write_text(json.dumps(described))
    (options.out / "engines.json.new").rename(options.out / "engines.json")
    while True:
        time.sleep(60)


def wait_for(path: Path, seconds: float) -> int:
    """Wait for the keeper to write `path`."""
    started = time.monotonic()
    while not path.exists():
        if time.monotonic() - started > seconds:
            print("engines are not up; see the logs beside", path, file=sys.stderr)
            return 1
        time.sleep(1)
    print(json.dumps({"up_after_s": round(time.monotonic() - started)}), flush=True)
    return 0


def counters(url: str) -> dict[str, float]:
    """The transfer counters of an engine."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        found = parse_metrics(response.read().decode())
    return {name: found.total(name) for name in METRICS}


def load(options: argparse.Namespace) -> int:
    """Drive the connectors in turn, in alternating order, and print points and ratios."""
    urls: dict[str, str] = json.loads((options.out / "engines.json").read_text())["urls"]
    names = list(dict.fromkeys(key.rsplit("-kv_", 1)[0] for key in urls))
    points: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for name in names:
        warm = Load(2, 6, options.input, 16, 1)
        asyncio.run(run_load(urls[f"{name}-kv_producer"], urls[f"{name}-kv_consumer"], warm))
    for repeat in range(options.repeats):
        for concurrency in (int(part) for part in options.concurrency.split(",")):
            for name in names if repeat % 2 == 0 else reversed(names):
                requests = max(options.requests, concurrency * 3)
                point = Load(concurrency, requests, options.input, options.output, 100 + repeat)
                decode = urls[f"{name}-kv_consumer"]
                before = counters(decode)
                result = asyncio.run(run_load(urls[f"{name}-kv_producer"], decode, point))
                moved = {k: v - before[k] for k, v in counters(decode).items() if v != before[k]}
                result["per_request"] = {k: round(v / requests, 7) for k, v in moved.items()}
                points.setdefault((name, concurrency), []).append(result)
                print(json.dumps({"connector": name, "repeat": repeat, **result}), flush=True)
    return report(points)


def report(points: dict[tuple[str, int], list[dict[str, Any]]]) -> int:
    """Medians over repeats with their spread, and hybridpd's value over in-tree's."""
    for concurrency in sorted({key[1] for key in points}):
        for metric in COMPARED:
            row: dict[str, Any] = {"concurrency": concurrency, "metric": metric}
            for name in CONNECTORS:
                values = [p[metric] for p in points.get((name, concurrency), []) if metric in p]
                if values:
                    row[name] = statistics.median(values)
                    row[f"{name}_range"] = [min(values), max(values)]
            if all(name in row for name in CONNECTORS):
                row["ratio"] = round(row["hybridpd"] / row["in-tree"], 3)
            print(json.dumps(row), flush=True)
    failed = sum(p["failed"] for group in points.values() for p in group)
    print(json.dumps({"failed_requests": failed}))
    return 1 if failed else 0


def stop(options: argparse.Namespace) -> int:
    """End the keeper; its engines end with it."""
    path = options.out / "engines.json"
    os.kill(json.loads(path.read_text())["keeper"], signal.SIGTERM)
    path.unlink()
    return 0


def main() -> int:
    """Parse and run one of the commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("start", "load", "stop"))
    parser.add_argument("--model", default="nano", help="nano, or small for a rehearsal on CPU")
    parser.add_argument("--tp", default="1,1", help="prefill's and decode's TP size")
    parser.add_argument("--connectors", default="in-tree,hybridpd")
    parser.add_argument("--engine-args", default="")
    parser.add_argument("--concurrency", default="1,8,32,128")
    parser.add_argument("--requests", type=int, default=100, help="per point, at least")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--input", type=int, default=2000, help="prompt tokens, on average")
    parser.add_argument("--output", type=int, default=200, help="tokens to generate")
    parser.add_argument("--start-seconds", type=float, default=580)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "pd-compare")
    options = parser.parse_args()
    return {"start": start, "load": load, "stop": stop}[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
