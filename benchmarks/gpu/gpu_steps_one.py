"""What a session on one GPU runs, most valuable first; all engines share it.

Seconds are estimates until such a session was run (`tried` False), from those of two GPUs with
twice the cores. What a pair of TP 1 can show is shown here too; times of a hand-over are those of
two processes that take turns on one GPU, so that only ratios of connectors mean something.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_steps import (
    SHORT,
    SMALL_LOAD,
    STEPS,
    TRITON,
    Step,
    fleet,
    load,
    matrix,
    ngram,
    stop,
    tokens,
)

FLIPS = "--reference prefill --flip"
UNPROVEN = """--extra-config '{"unproven":["hybrid_ngram"]}'"""
CACHING = "--enable-prefix-caching"
# A step that ends on the border of a block is what a state is kept at; on a CPU it must be one.
LONG_STEPS = '--engine-args="--max-num-batched-tokens {tokens}"'
CROWD = "{scratch}/crowd"
SMALL_CROWD = "--processes 2 --concurrency 1,2"
SMALL_POINTS = f"{SMALL_CROWD} --requests 2 --input 60 --output 8 --passes 2"
GROUPS = {"crowd-try": 0, "crowd": 0, "crowd-again": 4}  # the number of their first process


def families() -> tuple[Step, ...]:
    """Each at TP 1 to 1, with bits that are flipped on the GPU."""
    rows = (
        ("nemotron-h", "", 110, True),
        ("falcon-h1", "", 110, True),
        ("qwen3-next", TRITON, 130, True),
        ("jamba", "", 110, False),
        ("kimi-linear", TRITON, 210, False),
    )
    return tuple(
        replace(
            tokens(f"tokens-{family}", family, "1-1", f"{FLIPS} {more}".rstrip(), False, seconds),
            engines=2,
            rehearsal=f"benchmarks/gpu/tokens_on_gpu.py --device cpu --families {family} "
            f"--pairs 1-1 --checksum all {FLIPS} --out {{scratch}}/tokens-{family}"
            if on_cpu
            else "",
        )
        for family, more, seconds, on_cpu in rows
    )


def settings() -> tuple[Step, ...]:
    """Rows of the matrix that the two-GPU table lacks, and `exact` again.

    Not here: `fp8_e5m2`, with which vLLM 0.32 does not start Nemotron-H on an H200; n-grams with
    Gated DeltaNet, whose kernel there takes no float32, while in bfloat16 the plain engine's own
    tokens are ties too often.
    """
    rows = (
        matrix("matrix-short", "v2", "async", f"--scenarios exact,{SHORT}"),
        matrix(
            "matrix-caching",
            "v2",
            "async",
            # Not `handover`: it counts the bytes of prompts that nobody has cached.
            f'--scenarios cached,at-once {LONG_STEPS.format(tokens=512)} --pair-args="{CACHING}"',
            cpu=f'--scenarios cached {LONG_STEPS.format(tokens=128)} --pair-args="{CACHING}"',
        ),
        matrix(
            "matrix-ngram-caching",
            "v1",
            "sync",
            f"--scenarios cached,drafts {UNPROVEN} {LONG_STEPS.format(tokens=512)} "
            + with_more(ngram("ngram"), CACHING),
        ),
    )
    return tuple(replace(step, engines=3, seconds=140, tried=False) for step in rows)


def with_more(arguments: str, more: str) -> str:
    """Another argument of the pair behind those of `ngram`, which end with a quote."""
    return f'{arguments[:-1]} {more}"'


def crowd(name: str) -> tuple[Step, ...]:
    """Several processes of each connector; another group has other ones and the same results."""
    program, results = "benchmarks/gpu/pd_crowd.py", "{scratch}/crowd.jsonl"
    place = f"--first {GROUPS[name]} --out {{scratch}}/{name} --results {results}"

    def phase(what: str, options: str, cpu: str, seconds: int) -> Step:
        return Step(
            name if what in ("start", "try") else f"{name}-{what}",
            "crowd",
            " ".join(filter(None, (program, what, options, place))),
            " ".join(filter(None, (program, what, cpu, place))),
            seconds,
            engines=3 if what == "try" else None,
            needs="" if what in ("start", "try") else name,
            cleans=what == "stop",
            tried=False,
        )

    if name == "crowd-try":
        cpu = f"--model small {SMALL_CROWD} --input 60 --output 8"
        return (phase("try", "--concurrency 8,128 --start-seconds 200", cpu, 120),)
    started = f"--model small --prefills 1 {SMALL_CROWD}"
    return (
        phase("start", "--start-seconds 240", started, 150),
        phase("alone", "--input 100 --output 80 --requests 5 --seconds 150", SMALL_POINTS, 165),
        phase("pairs", "--output 80 --requests 5 --seconds 190", SMALL_POINTS, 205),
        phase("report", "", "", 3),
        phase("stop", "", "", 5),
    )


def shared_fleet() -> tuple[Step, ...]:
    """P and D of both connectors on one GPU, and the same two engines as plain ones beside."""
    name = "fleet-shared"
    start = "--model nano32 --tp 1,1 --cache-bytes 10000000000 --start-seconds 240"
    points = "load --output 100 --requests 30 --repeats 2"
    cpu = f"load --concurrency 1 {SMALL_LOAD}"
    steps = (
        fleet(name, start, 140),
        load("load-shared", name, f"{points} --concurrency 1,8,32", 150, cpu),
        load("load-shared-128", name, f"{points} --concurrency 128 --warm", 100, f"{cpu} --warm"),
        load(
            "load-alone-shared",
            name,
            "load --concurrency 1,8 --repeats 3 --requests 10 --input 100 --output 100 "
            "--no-colocated --warm --alone decode,prefill",
            65,
            f"load --concurrency 1 --no-colocated --warm --alone decode {SMALL_LOAD}",
        ),
        load("report-shared", name, "report --gpus 1", 3, "report --gpus 1"),
        stop("stop-shared", name),
    )
    return tuple(replace(step, gpus=1, tried=False) for step in steps)


def kept(name: str) -> Step:
    """A step of the other table, which does with one GPU."""
    (step,) = (step for step in STEPS if step.name == name)
    return replace(step, gpus=1, tried=step.gpus == 1)


ONE_GPU: tuple[Step, ...] = (
    *families(),
    *crowd("crowd-try"),
    *settings(),
    kept("post-cost"),
    kept("first-request"),
    *crowd("crowd"),
    *shared_fleet(),
    *crowd("crowd-again"),
    kept("posting-parts"),
    kept("link-warmup"),
    kept("checksum-cost"),
    kept("traps-allocators"),
)
