"""Coverage-guided fuzzing of every reader of what strangers wrote.

    make fuzz SECONDS=60            every target for so long, one after the other
    python connector/fuzz/fuzz.py --target link --seconds 600 --keep

Each target runs in a process of its own with a bound of memory and of time for one input. A finding
ends the program with status 1; its input lies in connector/fuzz/findings. ``--keep`` adds inputs
that reach new code to connector/fuzz/corpus, which the unit tests read again.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS, FINDINGS = HERE / "corpus", HERE / "findings"
MAX_INPUT_BYTES = 16 * 1024
MEMORY_MIB = 1024
ONE_INPUT_SECONDS = 30


def main() -> int:
    """Run the chosen targets; 1 when one of them had a finding."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", help="one of them only")
    parser.add_argument("--seconds", type=int, default=2, help="for each target")
    parser.add_argument("--keep", action="store_true", help="keep what reaches new code")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        return fuzz(options.run[0], options.run[1:])
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "testkit")]
    from hybridpd_testkit.fuzz_targets import TARGETS

    names = [options.target] if options.target else sorted(TARGETS)
    found = [name for name in names if not passes(name, options.seconds, keep=options.keep)]
    print(f"\n{len(names)} targets, findings in: {', '.join(found) or 'none'}")
    return 1 if found else 0


def passes(name: str, seconds: int, *, keep: bool) -> bool:
    """Fuzz one target in a process of its own."""
    kept = CORPUS / name
    kept.mkdir(parents=True, exist_ok=True)
    FINDINGS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folders = [str(kept), scratch] if keep else [scratch, str(kept)]
        command = [
            *(sys.executable, __file__, "--run", name),
            f"-max_total_time={seconds}",
            f"-max_len={MAX_INPUT_BYTES}",
            f"-rss_limit_mb={MEMORY_MIB}",
            f"-timeout={ONE_INPUT_SECONDS}",
            f"-artifact_prefix={FINDINGS}/{name}-",
            "-print_final_stats=1",
            *folders,
        ]
        print(f"\n=== {name}", flush=True)
        return subprocess.run(command, check=False).returncode == 0


def fuzz(name: str, arguments: list[str]) -> int:
    """In the child: instrument our modules and hand over to libFuzzer. Never returns."""
    import atheris

    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "testkit")]
    with atheris.instrument_imports(include=["hybridpd_connector", "hybridpd_geometry"]):
        from hybridpd_testkit import fuzz_targets
    target = fuzz_targets.TARGETS[name]

    def mutate(raw: bytes, max_bytes: int, seed: int) -> bytes:
        """Mostly a neighbour with the same form, else bytes as libFuzzer likes them."""
        changed = fuzz_targets.mutate(raw, target.header_bytes, seed) if seed % 4 else raw
        if changed == raw or len(changed) > max_bytes:
            return atheris.Mutate(raw, max_bytes)
        return changed

    def run(raw: bytes) -> None:
        target.run(raw)

    with tempfile.TemporaryDirectory() as seeds:
        for index, seed in enumerate(target.seeds):
            Path(seeds, str(index)).write_bytes(seed)
        atheris.Setup([sys.argv[0], *arguments, seeds], run, custom_mutator=mutate)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
