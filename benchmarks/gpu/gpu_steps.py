"""What a session on GPUs runs, most valuable first: programs, times, and what each step needs.

Seconds are what a step took on two H200 with vLLM 0.32, or an estimate where it never ran there
(`tried` False). `rehearsal` is the same program on a CPU; "" where a CPU has nothing to show.
"""

from __future__ import annotations

from dataclasses import dataclass


# Dotted, since quotes of JSON would have to survive two shells.
def ngram(method: str) -> str:
    """P and D draft; the plain engine does not, since it says what is right. With 16 words the
    model repeats itself."""
    given = {"method": method, "num_speculative_tokens": 2}
    given |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    words = " ".join(f"--speculative-config.{name} {value}" for name, value in given.items())
    return f'--words 16 --pair-args="{words}"'


TRITON = '--engine-args="--gdn-prefill-backend triton"'
SHORT = "handover,at-once"
FLEET = "{scratch}/fleet"
TRACE = "{scratch}/trace"
SMALL_FLEET = '--model small --engine-args="--dtype float32 --enforce-eager" --start-seconds 200'
SMALL_LOAD = "--requests 4 --repeats 1 --input 100 --output 8"


@dataclass(frozen=True)
class Step:
    """One program. ``file``: the text file that has its output, joined with others'.

    ``engines``: how many it runs at a time; such steps run beside each other. None: it measures
    time, and nothing runs beside it. ``needs``: a step that must have gone well before.
    ``gpus``: the fewest that it wants. ``cleans``: it runs whenever the step it needs was begun.
    """

    name: str
    file: str
    command: str
    rehearsal: str
    seconds: int
    engines: int | None = None
    needs: str = ""
    gpus: int = 1
    cleans: bool = False
    tried: bool = True

    @property
    def limit_seconds(self) -> int:
        """Longer than this it hangs."""
        return 2 * self.seconds + 60


def matrix(name: str, runner: str, mode: str, more: str = "", cpu: str = "") -> Step:
    """One setting of the matrix: five engines, which start together; three for the short ones."""
    program, out = "benchmarks/gpu/matrix_on_gpu.py", f"--out {{scratch}}/{name}"
    return Step(
        name,
        "matrix",
        f"{program} --gpus {{gpus}} --runners {runner} --modes {mode} {out} {more}".rstrip(),
        cpu and f"{program} --device cpu --runners v1 --modes sync {out} {cpu}",
        seconds=190,
        engines=3 if SHORT in more else 5,
        tried=not more,
    )


def traps(rows: str, engines: int, seconds: int) -> Step:
    """What makes reads slow is seen, and said."""
    name = f"traps-{rows}"
    command = f"benchmarks/gpu/traps_on_gpu.py --rows {rows} --out {{scratch}}/{name}"
    return Step(name, "traps", command, f"{command} --rehearse", seconds, engines, gpus=2)


def tokens(
    name: str,
    family: str,
    pairs: str,
    more: str = "",
    tried: bool = True,
    seconds: int = 100,
    on_cpu: bool = True,
) -> Step:
    """One family at some TP pairs: one plain engine, P and D at a time; ``seconds`` for each."""
    program = "benchmarks/gpu/tokens_on_gpu.py"
    place = f"--families {family} --pairs {pairs} --checksum all --out {{scratch}}/{name}"
    return Step(
        name,
        "tokens",
        f"{program} --gpus {{gpus}} {place} {more}".rstrip(),
        f"{program} --device cpu {place}" if on_cpu else "",
        seconds=seconds * len(pairs.split(",")),
        engines=3,
        gpus=2 if "2" in pairs else 1,
        tried=tried,
    )


def fleet(name: str, start: str, seconds: int, tried: bool = True) -> Step:
    """Engines of both connectors that the steps behind it load."""
    return Step(
        name,
        "load",
        f"benchmarks/gpu/pd_compare.py start --out {FLEET} --trace {TRACE} --gpus {{gpus}} {start}",
        f"benchmarks/gpu/pd_compare.py start --out {FLEET} --trace {TRACE} {SMALL_FLEET}",
        seconds=seconds,
        gpus=2,
        tried=tried,
    )


def load(name: str, needs: str, options: str, seconds: int, cpu: str, tried: bool = True) -> Step:
    """Requests to a fleet."""
    results = f"--out {FLEET} --results {{scratch}}/{needs}.jsonl"
    return Step(
        name,
        "load",
        f"benchmarks/gpu/pd_compare.py {options} {results}",
        f"benchmarks/gpu/pd_compare.py {cpu} {results}",
        seconds=seconds,
        needs=needs,
        gpus=2,
        tried=tried,
    )


def stop(name: str, needs: str) -> Step:
    command = f"benchmarks/gpu/pd_compare.py stop --out {FLEET}"
    return Step(name, "load", command, command, seconds=5, needs=needs, gpus=2, cleans=True)


def cost(
    name: str, command: str, cpu: str, seconds: int, gpus: int = 1, tried: bool = True
) -> Step:
    """A program without engines that measures time."""
    return Step(name, "costs", command, cpu, seconds, gpus=gpus, tried=tried)


def traced(name: str, needs: str, options: str, seconds: int, cpu: str) -> Step:
    """Requests that the connectors of a fleet note."""
    program = f"benchmarks/gpu/handover_stages.py --trace {TRACE} --out {FLEET}"
    return Step(
        name,
        "load",
        f"{program} {options}",
        f"{program} {cpu}",
        seconds=seconds,
        needs=needs,
        gpus=2,
    )


def unequal(prefill_tp: int, decode_tp: int) -> tuple[Step, ...]:
    """Pairs of two TP sizes, with engines that share GPUs and a quarter of the experts."""
    name = f"fleet-{prefill_tp}-{decode_tp}"
    start = f"--model nano32 --tp {prefill_tp},{decode_tp} --cache-bytes 10000000000 "
    start += "--start-seconds 500"
    points = "load --concurrency 1,8,32,128 --repeats 2 --output 100 --no-colocated"
    cpu = f"load --concurrency 1 --no-colocated {SMALL_LOAD}"
    return (
        fleet(name, start, 130, tried=False),
        load(f"load-{prefill_tp}-{decode_tp}", name, points, 130, cpu, tried=False),
        load(f"report-{prefill_tp}-{decode_tp}", name, "report", 3, "report", tried=False),
        stop(f"stop-{prefill_tp}-{decode_tp}", name),
    )


STEPS: tuple[Step, ...] = (
    matrix("matrix-v2-async", "v2", "async"),
    matrix("matrix-v1-sync", "v1", "sync", cpu=f"--scenarios exact,{SHORT},preempt-decode"),
    traps("namespaces", 2, 150),
    traps("allocators", 1, 120),
    matrix("matrix-v2-sync", "v2", "sync"),
    matrix("matrix-v1-async", "v1", "async"),
    tokens("tokens-1-1", "nemotron-h", "1-1"),
    tokens("tokens-1-2", "nemotron-h", "1-2"),
    tokens("tokens-2-1", "nemotron-h", "2-1"),
    tokens(
        "tokens-qwen3-next",
        "qwen3-next",
        "1-1",
        TRITON,
        seconds=150,  # its kernels are compiled in 100 s, by each engine, when no cache has them
    ),
    tokens("tokens-falcon-h1", "falcon-h1", "1-2,2-1", seconds=90),
    tokens("tokens-jamba", "jamba", "1-1,1-2,2-1", seconds=85, on_cpu=False),
    tokens("tokens-kimi", "kimi-linear", "1-1", TRITON, seconds=185, on_cpu=False),
    tokens(  # its kernels are compiled anew for half of the heads
        "tokens-kimi-tp2",
        "kimi-linear",
        "1-2,2-1",
        TRITON,
        seconds=100,
        on_cpu=False,
    ),
    matrix(
        "matrix-ngram",
        "v1",
        "sync",
        f"--scenarios {SHORT},drafts {ngram('ngram')}",
        cpu=f"--family llama --scenarios {SHORT},drafts {ngram('ngram')}",
    ),
    matrix(  # with asynchronous scheduling, vLLM takes n-grams that the GPU looks up only
        "matrix-ngram-gpu",
        "v2",
        "async",
        f"--scenarios {SHORT},drafts {ngram('ngram_gpu')}",
    ),
    matrix(
        "matrix-fp8",
        "v2",
        "async",
        f'--scenarios exact,{SHORT} --engine-args="--kv-cache-dtype fp8"',
        cpu=f'--scenarios exact,{SHORT} --engine-args="--kv-cache-dtype fp8"',
    ),
    cost(
        "posting-parts",
        "benchmarks/posting_parts.py --device cuda --busy",
        "benchmarks/posting_parts.py --requests 20 --busy",
        15,
        gpus=2,
    ),
    cost(  # the way where the driver's memset cannot be had
        "posting-parts-torch",
        "benchmarks/posting_parts.py --device cuda --busy --zero-by torch",
        "benchmarks/posting_parts.py --requests 20 --busy --zero-by torch",
        15,
        gpus=2,
    ),
    cost(
        "post-cost",
        "benchmarks/post_cost.py --device cuda --tokens 1000,2000,3000",
        "benchmarks/post_cost.py --tokens 1000 --rounds 10",
        55,
        gpus=2,
    ),
    cost(
        "first-request",
        "benchmarks/first_request.py --device cuda",
        "benchmarks/first_request.py --repeats 2",
        50,  # five fresh pairs for each of two rows
        gpus=2,
    ),
    fleet("fleet-1-1", "--model nano64 --tp 1,1 --start-seconds 500", 110),
    load(
        "load-one-client",
        "fleet-1-1",
        "load --concurrency 1 --repeats 3 --output 16 --no-colocated",
        115,
        f"load --concurrency 1 --no-colocated {SMALL_LOAD}",
    ),
    traced(
        "stages",
        "fleet-1-1",
        "--concurrency 1,8,32 --output 40",
        100,
        "--concurrency 1,2 --requests 8 --input 100 --output 24",
    ),
    load(
        "load-one-client-awake",
        "fleet-1-1",
        "load --concurrency 1 --repeats 3 --requests 25 --output 24 --no-colocated --warm "
        "--spin 0,2,all --label awake",
        80,
        f"load --concurrency 1 --no-colocated --warm --spin 0,1 --label awake {SMALL_LOAD}",
    ),
    load(
        "load-alone",
        "fleet-1-1",
        "load --concurrency 1,8 --repeats 3 --requests 10 --input 100 --output 100 --no-colocated "
        "--warm --alone decode,prefill",
        65,
        f"load --concurrency 1,2 --no-colocated --warm --alone decode,prefill {SMALL_LOAD}",
    ),
    *(
        load(
            f"load-{clients}",
            "fleet-1-1",
            f"load --concurrency {clients} --repeats {repeats} --no-colocated --warm",
            seconds,
            f"load --concurrency {rehearsed} --no-colocated --warm {SMALL_LOAD}",
        )
        for clients, repeats, seconds, rehearsed in (
            (8, 5, 110, 2),
            (128, 5, 125, 4),
            (32, 3, 30, 3),
        )
    ),
    traced(
        "bursts",
        "fleet-1-1",
        '--concurrency "" --bursts 8 --passes 3',
        30,
        '--concurrency "" --bursts 4 --passes 2 --rounds 2 --input 100',
    ),
    load(
        "load-colocated",
        "fleet-1-1",
        "load --concurrency 1,8,32,128 --repeats 1 --warm --label colocated",
        140,
        f"load --concurrency 1 --warm --label colocated {SMALL_LOAD}",
        tried=False,
    ),
    load("report", "fleet-1-1", "report", 3, "report"),
    stop("stop", "fleet-1-1"),
    *unequal(1, 2),
    *unequal(2, 1),
    cost(
        "checksum-cost",
        "benchmarks/checksum_cost.py --device cuda",
        "benchmarks/checksum_cost.py --tp 1 --tokens 1000 --rounds 2",
        15,
    ),
    cost(
        "link-warmup",
        "benchmarks/link_warmup.py --device cuda",
        "benchmarks/link_warmup.py --repeats 2",
        65,
        gpus=2,
    ),
)
