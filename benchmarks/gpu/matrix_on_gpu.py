"""Hand-over, abort, preemption and a killed P under each model runner and scheduling mode.

What a CPU cannot show: vLLM forces asynchronous scheduling off there and refuses model runner V2.
For every setting this starts P, D, and both again with a small cache, and compares all tokens with
one plain engine's, within the noise that it has measured in the same setting (`matrix_noise`);
`matrix_scenarios` has what is done. It prints a table and PASS or FAIL, and exits 1 when anything
is wrong, too little could be compared, or an engine did not take a setting as asked. Noise above
the cap is "NOISY": `matrix_verdict` says what decides then.

    PYTHONPATH=SITE:connector:connector/testkit:benchmarks python benchmarks/gpu/matrix_on_gpu.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from matrix_noise import largest_of, one_by_one, plain_noise, setting_noise, told_bound
from matrix_scenarios import (
    CHUNK_TOKENS,
    LEASE_SECONDS,
    MOST_REQUESTS,
    SCENARIOS,
    USUAL,
    WITH_SMALL_CACHES,
    Bench,
    checksums,
)
from matrix_verdict import need, run_checks

from hybridpd_testkit.checkpoint_families import FAMILIES
from hybridpd_testkit.checkpoints import write_checkpoint
from hybridpd_testkit.engines import (
    EngineSpec,
    base_environment,
    engine_python,
    running,
)
from hybridpd_testkit.expectations import MAX_TOKENS, prompts
from hybridpd_testkit.nursery import Nursery

SMALL_BLOCKS = 26
SMALL_MODEL_LEN = 512
RUNNER_MODULES = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}
# A lone request is cut by the budget of a step only, which must not be below the most requests.
PIECES = ("--max-num-batched-tokens", str(CHUNK_TOKENS), "--max-num-seqs", str(MOST_REQUESTS))


@dataclass(frozen=True)
class Setting:
    """One row group of the table: the model runner ("v1", "v2") and asynchronous scheduling."""

    runner: str
    asynchronous: bool

    @property
    def name(self) -> str:
        return f"{self.runner}/{'async' if self.asynchronous else 'sync'}"


def specs_of(setting: Setting, checkpoint: Path, options: argparse.Namespace) -> list[EngineSpec]:
    """The plain engine, P, D, and when they are wanted small P, small D; P's on the first GPU, the
    others on the last."""
    mode = "--async-scheduling" if setting.asynchronous else "--no-async-scheduling"
    common = (mode, *PIECES, *shlex.split(options.engine_args), *shlex.split(options.pair_args))
    chunks = ("--max-num-batched-tokens", "256", "--long-prefill-token-threshold", "32")
    first, last = 0, options.gpus - 1
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1" if setting.runner == "v2" else "0"}
    extra = {"lease_seconds": LEASE_SECONDS, "checksum": "all", **json.loads(options.extra_config)}
    base = EngineSpec(
        "",
        checkpoint,
        extra_config=extra,
        num_blocks=options.blocks,
        dtype=FAMILIES[checkpoint.name].dtype,
    )
    small = replace(base, num_blocks=SMALL_BLOCKS, max_model_len=SMALL_MODEL_LEN)
    named = {
        "p": (replace(base, role="kv_producer"), first, options.prefill_args),
        "d": (replace(base, role="kv_consumer"), last, options.decode_args),
        "small-p": (replace(small, role="kv_producer"), first, options.prefill_args),
        "small-d": (replace(small, role="kv_consumer"), last, options.decode_args),
    }
    plain = EngineSpec(
        "single",
        checkpoint,
        arguments=(*placed_arguments(options), *PIECES, *shlex.split(options.engine_args)),
        environment={**runner, **placed_environment(options, last)},
        num_blocks=options.blocks,
        dtype=base.dtype,
    )
    return [plain] + [
        replace(
            spec,
            name=name,
            arguments=(
                *placed_arguments(options),
                *common,
                *(chunks if name == "small-p" else ()),
                *shlex.split(own),
            ),
            environment={**runner, **placed_environment(options, gpu)},
        )
        for name, (spec, gpu, own) in named.items()
        if not name.startswith("small") or set(WITH_SMALL_CACHES) & set(options.scenarios)
    ]


def placed_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    """A fixed cache: vLLM would refuse to start while a neighbour on its GPU frees memory."""
    if options.device == "cpu":
        return ()
    return ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 29))


def placed_environment(options: argparse.Namespace, gpu: int) -> dict[str, str]:
    if options.device == "cpu":
        return {}
    # Model runner V1 builds FlashInfer's sampler at its first start, which takes minutes.
    return {"CUDA_VISIBLE_DEVICES": str(gpu), "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def as_asked(bench: Bench, setting: Setting) -> str:
    """The engines run what the setting says; what they report."""
    for engine in bench.with_connector:
        for report in engine.worker_reports("report_runner"):
            found = (report["module"], report["async_scheduling"])
            asked = (RUNNER_MODULES[setting.runner], setting.asynchronous)
            need(found in (asked, (cpu_module(found[0]), asked[1])), f"got {found}, asked {asked}")
    return f"{report['module']}, async {report['async_scheduling']}"


def cpu_module(module: str) -> str:
    """The CPU's model runner is a kind of V1's."""
    return module if module == "vllm.v1.worker.cpu_model_runner" else ""


def noise_of(bench: Bench, setting: Setting) -> Bench:
    """Measure, a line for each way; the bench with the noise."""
    started = time.monotonic()
    expected = one_by_one(bench.single, prompts(), MAX_TOKENS)
    found = plain_noise(bench.single, expected)
    found += setting_noise(bench.prefill, bench.decode, expected)
    for one in found:
        line(setting.name, "noise", "", "", str(one))
    good, words = told_bound(found)
    seconds = f"{time.monotonic() - started:.1f}"
    line(setting.name, "noise", "ok" if good else "NOISY", seconds, words)
    return replace(bench, noise=largest_of(found))


def run_setting(bench: Bench, setting: Setting, scenarios: list[str]) -> bool:
    """Run every scenario, print a line for each."""
    bench = noise_of(bench, setting)
    checks: dict[str, Callable[[Bench], str]] = {"as asked": partial(as_asked, setting=setting)}
    checks |= {name: SCENARIOS[name] for name in scenarios}
    checks["checksums"] = checksums
    return run_checks(bench, checks, partial(line, setting.name))


def line(*cells: str) -> None:
    """One line of the table."""
    widths = (10, 16, 7, 9)
    fixed = " ".join(c.ljust(w) for c, w in zip(cells, widths, strict=False))
    print(fixed, cells[-1], flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="example: python benchmarks/gpu/matrix_on_gpu.py --gpus 2 --runners v2 --modes "
        "async; on a CPU, to rehearse: --device cpu --runners v1 --modes sync",
    )
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--gpus", type=int, default=2, help="GPUs on this machine")
    parser.add_argument("--family", default="nemotron-h", help="a family of the test kit")
    parser.add_argument("--words", type=int, help="different tokens that the model says; all")
    parser.add_argument("--runners", default="v1,v2", help="model runners")
    parser.add_argument("--modes", default="sync,async", help="scheduling modes")
    parser.add_argument("--scenarios", default=",".join(USUAL), help="in this order")
    parser.add_argument("--engine-args", default="", help="more arguments of every engine")
    parser.add_argument("--pair-args", default="", help="the same, but not of the plain engine")
    parser.add_argument("--extra-config", default="{}", help="of the connector, as JSON")
    parser.add_argument("--prefill-args", default="", help="more arguments of P alone")
    parser.add_argument("--decode-args", default="", help="more arguments of D alone")
    parser.add_argument("--blocks", type=int, default=512, help="cache blocks of the large engines")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "gpu-matrix")
    options = parser.parse_args()
    options.scenarios = options.scenarios.split(",")
    if unknown := [name for name in options.scenarios if name not in SCENARIOS]:
        parser.error(f"--scenarios: expected names among {', '.join(SCENARIOS)}, got {unknown}")
    return options


def main() -> int:
    """Every setting, one after the other."""
    options = parse()
    folder = options.out / options.family
    checkpoint = write_checkpoint(options.family, folder, words=options.words)
    settings = [
        Setting(runner, mode == "async")
        for runner, mode in itertools.product(options.runners.split(","), options.modes.split(","))
    ]
    # Engines that are forked from one that has imported vLLM start faster, and may not use CUDA.
    options.nursery = (
        Nursery(engine_python(), base_environment()) if options.device == "cpu" else None
    )
    line("setting", "scenario", "result", "seconds", "detail")
    good = True
    for setting in settings:
        logs = options.out / setting.name.replace("/", "-")
        specs = specs_of(setting, checkpoint, options)
        try:
            with running(specs, logs, options.nursery) as (single, p, d, *small):
                small_p, small_d = small or (p, d)
                bench = Bench(single, p, d, small_p, small_d)
                good = run_setting(bench, setting, options.scenarios) and good
        except RuntimeError as error:  # an engine that does not start
            line(setting.name, "start", "WRONG", "", str(error)[-1500:])
            good = False
    if options.nursery is not None:
        options.nursery.close()
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
