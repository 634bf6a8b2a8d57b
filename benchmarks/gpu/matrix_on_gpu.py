"""Hand-over, abort, preemption and a killed P under each model runner and scheduling mode.

What a CPU cannot show: vLLM forces asynchronous scheduling off there and refuses model runner V2.
For every setting this starts P, D, and both again with a small cache, and compares all tokens with
one plain engine's. It prints a table and PASS or FAIL, and exits 1 when anything differs; a setting
that the engine did not take as asked is a failure too.

    PYTHONPATH=SITE:connector:connector/testkit python benchmarks/gpu/matrix_on_gpu.py --gpus 2
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hybridpd_testkit.checkpoints import write_checkpoint
from hybridpd_testkit.engines import (
    Engine,
    EngineSpec,
    base_environment,
    engine_python,
    running,
)
from hybridpd_testkit.expectations import MAX_TOKENS, prompts, random_prompt
from hybridpd_testkit.metrics import Metrics
from hybridpd_testkit.near_ties import reference_of
from hybridpd_testkit.nursery import Nursery
from hybridpd_testkit.pd_client import (
    OpenRequest,
    Pair,
    complete,
    evidence,
    leases_held,
    measured,
    require_nothing_left,
    wait_until,
)
from hybridpd_testkit.processes import HttpError

LEASE_SECONDS = 10
SMALL_BLOCKS = 26
SMALL_MODEL_LEN = 512
IN_FLIGHT = 16
AT_ONCE = 6
TIE_NATS = 0.001
RUNNER_MODULES = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}


class WrongError(AssertionError):
    """A scenario saw something else than it should."""


@dataclass(frozen=True)
class Setting:
    """One row group of the table: the model runner ("v1", "v2") and asynchronous scheduling."""

    runner: str
    asynchronous: bool

    @property
    def name(self) -> str:
        return f"{self.runner}/{'async' if self.asynchronous else 'sync'}"


@dataclass(frozen=True)
class Bench:
    """The engines of one setting."""

    single: Engine
    prefill: Engine
    decode: Engine
    small_prefill: Engine
    small_decode: Engine

    @property
    def pair(self) -> Pair:
        return Pair(self.prefill, self.decode)


def need(condition: bool, what: str) -> None:
    """A check of a scenario."""
    if not condition:
        raise WrongError(what)


def one_engine(
    bench: Bench, prompt_list: Iterable[list[int]], tokens: int
) -> list[tuple[int, ...]]:
    """What the plain engine answers to each prompt, one after the other."""
    return [complete(bench.single, prompt, tokens).tokens for prompt in prompt_list]


def handover(bench: Bench) -> str:
    """All lengths, one at a time: tokens, N-1 tokens loaded, bytes as predicted."""
    for prompt, expected in zip(prompts(), one_engine(bench, prompts(), MAX_TOKENS), strict=True):
        answer, counted = measured(bench.decode, partial(bench.pair.complete, prompt, MAX_TOKENS))
        need(answer.tokens == expected, f"{len(prompt)} tokens: {answer.tokens} for {expected}")
        need(counted.external_tokens == len(prompt) - 1, f"{len(prompt)} tokens: {counted}")
        need(counted.read_bytes == counted.predicted_bytes, f"{len(prompt)} tokens: {counted}")
    require_nothing_left(bench.prefill, bench.decode)
    return f"{len(prompts())} lengths"


def at_once(bench: Bench) -> str:
    """Many requests of different lengths together."""
    many = [random_prompt(3 + 17 * index, 100 + index) for index in range(IN_FLIGHT)]
    growth = same_tokens(bench, bench.pair, many, MAX_TOKENS)
    return f"{IN_FLIGHT} requests, {evidence(growth).loads} loads"


def same_tokens(bench: Bench, pair: Pair, many: list[list[int]], tokens: int) -> Metrics:
    """Send all at once, compare, and require that each was loaded; what D counted meanwhile."""
    expected = one_engine(bench, many, tokens)
    before = pair.decode.metrics()
    answers = pair.complete_all(many, tokens)
    growth = pair.decode.metrics().since(before)
    wrong = [i for i, a in enumerate(answers) if a.tokens != expected[i]]
    need(not wrong, f"wrong tokens for requests {wrong}")
    counted = evidence(growth)
    need((counted.loads, counted.failures) == (len(many), 0), str(counted))
    require_nothing_left(pair.prefill, pair.decode)
    return growth


def aborts(bench: Bench) -> str:
    """Clients leave while D decodes, while D loads, and between P's answer and D's call."""
    prompt = random_prompt(200, 31)
    before = bench.decode.metrics()
    params = bench.pair.prefill_only(prompt)
    with OpenRequest(bench.decode, prompt, 1500, kv_transfer_params=params):
        wait_until(
            lambda: bench.decode.metrics().since(before).total("hybridpd_loads_total") == 1,
            "D has loaded the request",
        )
    for index in range(8):
        other = random_prompt(150 + 40 * index, 500 + index)
        OpenRequest(
            bench.decode, other, 64, kv_transfer_params=bench.pair.prefill_only(other)
        ).abandon()
    require_nothing_left(bench.decode, bench.prefill)
    bench.pair.prefill_only(prompt)
    wait_until(lambda: leases_held(bench.prefill) == 0, "the lease ends", 2.0 * LEASE_SECONDS + 5)
    same_tokens(bench, bench.pair, [prompt], MAX_TOKENS)
    return "10 abandoned"


def decided(single: Engine, candidates: Iterable[list[int]], tokens: int) -> list[list[int]]:
    """The first ``AT_ONCE`` prompts at which the plain engine is nowhere near a tie.

    A preempted request is computed again, as a prompt instead of token by token: float32 sums come
    out in another order, and a token that leads by a ten-thousandth of a nat may be another one. Of
    the first six candidates one is undecided like that.
    """
    chosen: list[list[int]] = []
    for prompt in candidates:
        if min(reference_of(single, prompt, tokens).margins) >= TIE_NATS:
            chosen.append(prompt)
        if len(chosen) == AT_ONCE:
            return chosen
    raise WrongError(f"only {len(chosen)} prompts are decided by {TIE_NATS} nats everywhere")


def preempted(engine: Engine, growth: Metrics) -> int:
    """Preemptions in a growth of metrics; there must be some, else the scenario shows nothing."""
    count = int(growth.total("vllm:num_preemptions_total"))
    need(count > 0, f"{engine.spec.name} preempted nothing: its cache is too large for this")
    return count


def preempt_decode(bench: Bench) -> str:
    """D runs out of blocks after the loads."""
    block_tokens = int(bench.small_decode.worker_reports()[0]["block_tokens"])
    tokens = max(96, block_tokens - 16)
    many = decided(bench.single, (random_prompt(40, 300 + index) for index in range(60)), tokens)
    growth = same_tokens(bench, Pair(bench.prefill, bench.small_decode), many, tokens)
    return f"{preempted(bench.small_decode, growth)} preemptions"


def preempt_prefill(bench: Bench) -> str:
    """P runs out of blocks while it prefills several prompts in small pieces."""
    many = [random_prompt(400, 400 + index) for index in range(6)]
    before = bench.small_prefill.metrics()
    same_tokens(bench, Pair(bench.small_prefill, bench.decode), many, MAX_TOKENS)
    growth = bench.small_prefill.metrics().since(before)
    return f"{preempted(bench.small_prefill, growth)} preemptions"


def kill_prefill(bench: Bench) -> str:
    """P dies with requests on their way: D answers or refuses each, and goes on with another P."""
    known, waiting = random_prompt(220, 61), random_prompt(220, 62)
    (expected,) = one_engine(bench, [known], MAX_TOKENS)
    params = bench.pair.prefill_only(waiting)
    loaded = bench.pair.prefill_only(known)
    with ThreadPoolExecutor(1) as pool:
        running_request = pool.submit(bench.pair.decode_only, known, loaded, 300)
        before = bench.decode.metrics()
        wait_until(lambda: bench.decode.metrics().total("vllm:num_requests_running") > 0, "D runs")
        bench.prefill.send_signal(signal.SIGKILL)
        started = time.monotonic()
        try:
            bench.pair.decode_only(waiting, params, MAX_TOKENS)
        except HttpError:
            seconds = time.monotonic() - started
        else:
            raise WrongError("a request was answered from a P that is gone")
        need(
            running_request.result().tokens[:MAX_TOKENS] == expected,
            "the request that was loaded before",
        )
    failures = evidence(bench.decode.metrics().since(before)).failures
    need(failures == 1, f"{failures} failures counted, expected 1")
    require_nothing_left(bench.decode)
    same_tokens(bench, Pair(bench.small_prefill, bench.decode), [known], MAX_TOKENS)
    return f"refused after {seconds:.1f} s"


# The last one leaves no P behind.
SCENARIOS: dict[str, Callable[[Bench], str]] = {
    "handover": handover,
    "at-once": at_once,
    "aborts": aborts,
    "preempt-decode": preempt_decode,
    "preempt-prefill": preempt_prefill,
    "kill-prefill": kill_prefill,
}


def specs_of(setting: Setting, checkpoint: Path, options: argparse.Namespace) -> list[EngineSpec]:
    """P, D, small P, small D; P's on the first GPU, D's on the last."""
    mode = "--async-scheduling" if setting.asynchronous else "--no-async-scheduling"
    common = (mode, *shlex.split(options.engine_args))
    chunks = ("--max-num-batched-tokens", "256", "--long-prefill-token-threshold", "32")
    first, last = 0, options.gpus - 1
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1" if setting.runner == "v2" else "0"}
    extra = {"lease_seconds": LEASE_SECONDS, **json.loads(options.extra_config)}
    base = EngineSpec("", checkpoint, extra_config=extra, num_blocks=options.blocks)
    small = replace(base, num_blocks=SMALL_BLOCKS, max_model_len=SMALL_MODEL_LEN)
    named = {
        "p": (replace(base, role="kv_producer"), first, options.prefill_args),
        "d": (replace(base, role="kv_consumer"), last, options.decode_args),
        "small-p": (replace(small, role="kv_producer"), first, options.prefill_args),
        "small-d": (replace(small, role="kv_consumer"), last, options.decode_args),
    }
    return [
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
    ]


def single_spec(checkpoint: Path, options: argparse.Namespace) -> EngineSpec:
    """The plain engine, which answers for all settings."""
    return EngineSpec(
        "single",
        checkpoint,
        arguments=(*placed_arguments(options), *shlex.split(options.engine_args)),
        environment=placed_environment(options, options.gpus - 1),
        num_blocks=options.blocks,
    )


def placed_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    """A fixed cache: vLLM would refuse to start while a neighbour on its GPU frees memory."""
    if options.device == "cpu":
        return ()
    return ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 29))


def placed_environment(options: argparse.Namespace, gpu: int) -> dict[str, str]:
    return {} if options.device == "cpu" else {"CUDA_VISIBLE_DEVICES": str(gpu)}


def as_asked(bench: Bench, setting: Setting) -> str:
    """The engines run what the setting says; what they report."""
    for engine in (bench.prefill, bench.decode, bench.small_prefill, bench.small_decode):
        for report in engine.worker_reports("report_runner"):
            found = (report["module"], report["async_scheduling"])
            asked = (RUNNER_MODULES[setting.runner], setting.asynchronous)
            need(found in (asked, (cpu_module(found[0]), asked[1])), f"got {found}, asked {asked}")
    return f"{report['module']}, async {report['async_scheduling']}"


def cpu_module(module: str) -> str:
    """The CPU's model runner is a kind of V1's."""
    return module if module == "vllm.v1.worker.cpu_model_runner" else ""


def run_setting(
    single: Engine, specs: list[EngineSpec], setting: Setting, options: argparse.Namespace
) -> bool:
    """Start the engines of a setting, run every scenario, print a line for each."""
    good = True
    logs = options.out / setting.name.replace("/", "-")
    with running(specs, logs, options.nursery) as engines:
        bench = Bench(single, *engines)
        checks: dict[str, Callable[[Bench], str]] = {"as asked": lambda b: as_asked(b, setting)}
        for name in options.scenarios.split(","):
            checks[name] = SCENARIOS[name]
        for name, check in checks.items():
            started = time.monotonic()
            try:
                verdict, detail = "ok", check(bench)
            except (WrongError, HttpError, OSError, RuntimeError, ValueError) as error:
                verdict, detail, good = "WRONG", f"{type(error).__name__}: {error}"[:600], False
            line(setting.name, name, verdict, f"{time.monotonic() - started:.1f}", detail)
    return good


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
    parser.add_argument("--runners", default="v1,v2", help="model runners")
    parser.add_argument("--modes", default="sync,async", help="scheduling modes")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="in this order")
    parser.add_argument("--engine-args", default="", help="more arguments of every engine")
    parser.add_argument("--extra-config", default="{}", help="of the connector, as JSON")
    parser.add_argument("--prefill-args", default="", help="more arguments of P alone")
    parser.add_argument("--decode-args", default="", help="more arguments of D alone")
    parser.add_argument("--blocks", type=int, default=512, help="cache blocks of the large engines")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "gpu-matrix")
    return parser.parse_args()


def main() -> int:
    """Every setting, one after the other."""
    options = parse()
    checkpoint = write_checkpoint(options.family, options.out / options.family)
    settings = [
        Setting(runner, mode == "async")
        for runner, mode in itertools.product(options.runners.split(","), options.modes.split(","))
    ]
    good = True
    # Engines that are forked from one that has imported vLLM start faster, and may not use CUDA.
    options.nursery = (
        Nursery(engine_python(), base_environment()) if options.device == "cpu" else None
    )
    line("setting", "scenario", "result", "seconds", "detail")
    with running([single_spec(checkpoint, options)], options.out, options.nursery) as (single,):
        for setting in settings:
            specs = specs_of(setting, checkpoint, options)
            try:
                good = run_setting(single, specs, setting, options) and good
            except RuntimeError as error:  # an engine that does not start
                line(setting.name, "start", "WRONG", "", str(error)[-1500:])
                good = False
    if options.nursery is not None:
        options.nursery.close()
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
