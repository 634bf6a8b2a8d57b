"""Run the parts of the test suite in order and print a table of seconds per part.

Each part is one command in one environment. A part that fails does not stop the later ones, so
one run tells everything that is wrong; the exit status is 1 when any part failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import envs

ROOT = Path(__file__).resolve().parents[2]
COUNTS = re.compile(r"(\d+) (passed|failed|error|errors|skipped)\b")


@dataclass(frozen=True)
class Part:
    """One command of the suite; `env` names the virtual environment whose bin/ comes first."""

    name: str
    env: str
    command: tuple[str, ...]
    groups: tuple[str, ...]
    own_cluster: bool = False  # left out when KUBECONFIG names another one


@dataclass(frozen=True)
class Outcome:
    """What a part did: exit status, seconds and pytest's counts where it printed some."""

    part: Part
    status: int
    seconds: float
    counts: dict[str, int]


PYTEST = ("python", "-m", "pytest", "-q")
CHAOS = "connector/tests_chaos"
FUZZ = ("python", "connector/fuzz/fuzz.py")
CLUSTER = ("python", "-m", "hybridpd_cluster")
# The end-to-end set that every supported vLLM runs, the tests marked `matrix` among them. 0.33 has
# no CPU build: test_vllm_contract reads its source.
MATRIX_ENGINES = (("0.30", "engine-0.30"), ("0.31", "engine-0.31"), ("0.32", "engine"))
VLLM_TESTS = ROOT / "connector" / "tests_vllm"
MATRIX_TOO = (
    *("contract", "first_contact", "held_blocks", "items", "multi_connector", "preemption"),
    *("requests", "tokens"),
)
MATRIX_TESTS = tuple(
    str(path.relative_to(ROOT))
    for path in sorted(VLLM_TESTS.glob("test_vllm_*.py"))
    if path.stem.startswith("test_vllm_matrix_")
    or path.stem.removeprefix("test_vllm_") in MATRIX_TOO
)
PARTS = (
    Part("lint", "check", ("ruff", "check", "."), ("check", "test")),
    Part("format", "check", ("ruff", "format", "--check", "."), ("check", "test")),
    Part("types", "check", ("mypy",), ("check", "test")),
    Part("contracts", "check", ("lint-imports", "--no-cache"), ("check", "test")),
    # One process for each core: nothing here starts an engine or a cluster.
    Part("unit and property", "check", (*PYTEST, "-n", "auto"), ("check", "test")),
    Part(
        "connector on vLLM and NIXL",
        "engine",
        (*PYTEST, "-m", "not matrix", "connector/tests_vllm"),
        ("connector", "test"),
    ),
    Part("fuzz", "fuzz", FUZZ, ("test",)),
    Part("fuzz, longer", "fuzz", (*FUZZ, "--seconds", "10"), ("chaos",)),
    # Needs root: two engines in network namespaces of their own.
    Part("failures", "engine", (*PYTEST, CHAOS), ("test",)),
    Part(
        "every failure",
        "engine",
        (*PYTEST, CHAOS, "--failures", "all", "--soak-seconds", "600"),
        ("chaos",),
    ),
    Part("cluster up", "check", (*CLUSTER, "up"), ("e2e", "test"), own_cluster=True),
    Part("images", "check", (*CLUSTER, "images"), ("e2e", "test"), own_cluster=True),
    Part("end to end", "check", (*PYTEST, "-s", "e2e"), ("e2e", "test")),
    Part("cluster down", "check", (*CLUSTER, "down"), ("e2e", "test"), own_cluster=True),
    *(
        Part(f"matrix on vLLM {version}", env, (*PYTEST, *MATRIX_TESTS), ("matrix",))
        for version, env in MATRIX_ENGINES
    ),
)
GROUPS = ("check", "connector", "chaos", "e2e", "matrix", "test")
# Parts of these groups alone are the long form of one that "test" runs.
LONGER = ("chaos",)


def run(part: Part) -> Outcome:
    """Run one part with its output passed through, and count what pytest reports."""
    print(f"\n=== {part.name}: {' '.join(part.command)}", flush=True)
    started = time.monotonic()
    venv = envs.ensure(part.env)
    environment = {
        **os.environ,
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(str(ROOT / p) for p in ("operator", "connector", "e2e")),
        "PYTHONUNBUFFERED": "1",
    }
    counts: dict[str, int] = {}
    with subprocess.Popen(
        part.command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if " in " in line and COUNTS.search(line):
                counts = {word.rstrip("s"): int(n) for n, word in COUNTS.findall(line)}
    return Outcome(part, process.returncode, time.monotonic() - started, counts)


def report(outcomes: list[Outcome]) -> int:
    """Print the table of seconds and the closing line; return the exit status."""
    print("\n=== seconds per part")
    for outcome in outcomes:
        verdict = "ok" if outcome.status == 0 else f"FAILED ({outcome.status})"
        tests = ", ".join(f"{n} {word}" for word, n in sorted(outcome.counts.items()))
        print(f"{outcome.part.name:<28} {outcome.seconds:>8.1f}  {verdict:<12} {tests}")
    print(f"{'total':<28} {sum(o.seconds for o in outcomes):>8.1f}")
    failed_parts = [o for o in outcomes if o.status != 0]
    passed = sum(o.counts.get("passed", 0) for o in outcomes)
    failed = sum(o.counts.get("failed", 0) + o.counts.get("error", 0) for o in outcomes)
    skipped = sum(o.counts.get("skipped", 0) for o in outcomes)
    failed = max(failed, len(failed_parts))
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed_parts else 0


def main() -> int:
    """Run the parts of one group."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="example: python3.11 e2e/tooling/suite.py check",
    )
    parser.add_argument("group", choices=GROUPS, help="which parts to run")
    group = parser.parse_args().group
    foreign = bool(os.environ.get("KUBECONFIG"))
    chosen = [p for p in PARTS if group in p.groups and not (foreign and p.own_cluster)]
    return report([run(part) for part in chosen])


if __name__ == "__main__":
    sys.exit(main())
