"""The traps that make reads 500 times slower are seen, and said, on this machine.

Four rows, each on engines of its own with a tiny checkpoint: P and D side by side (the fast path),
P in a PID namespace of its own (the probe must call the path slow and name the namespace), and
expandable segments asked for through either of PyTorch's two variables (the engine must refuse to
start). Prints one JSON line per row; exits 1 when a row is not as it should be. On a CPU nothing is
slow and nothing is refused: `--rehearse` prints the rows and judges only that engines answer.

    PYTHONPATH=SITE:connector:connector/testkit python benchmarks/gpu/traps_on_gpu.py
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from links import link_of
from tokens_on_gpu import gpu_spec

from hybridpd_testkit.checkpoints import write_checkpoint
from hybridpd_testkit.engines import (
    ENGINE_PYTHON_VARIABLE,
    Engine,
    EngineFailedError,
    engine_python,
    running,
    stop_all,
)
from hybridpd_testkit.pd_client import Pair

PROMPT = list(range(3, 120))
NAMESPACE = "different PID namespaces"
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@contextmanager
def own_pid_namespace(folder: Path) -> Iterator[None]:
    """Engines started inside the block run in a PID namespace, with a /proc, of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    wrapper = folder / "python-in-a-pid-namespace"
    wrapper.write_text(
        f'#!/bin/sh\nexec unshare --pid --fork --mount-proc {engine_python()} "$@"\n'
    )
    wrapper.chmod(0o755)
    before = os.environ.get(ENGINE_PYTHON_VARIABLE)
    os.environ[ENGINE_PYTHON_VARIABLE] = str(wrapper)
    try:
        yield
    finally:
        if before is None:
            del os.environ[ENGINE_PYTHON_VARIABLE]
        else:
            os.environ[ENGINE_PYTHON_VARIABLE] = before


def describe(prefill: Engine, decode: Engine) -> dict[str, Any]:
    """One request through the pair, then what D says of the link."""
    answer = Pair(prefill, decode).complete(PROMPT, 8)
    path, bytes_per_second = link_of(decode)
    log = decode.log_path.read_text(errors="replace")
    return {
        "tokens": len(answer.tokens),
        "path": path,
        "gigabytes_per_second": round(bytes_per_second / 1e9, 2),
        "warned": log.count("is slow:"),
        "names_the_namespace": NAMESPACE in log,
    }


def try_namespaces(checkpoint: Path, out: Path) -> Iterator[dict[str, Any]]:
    """Rows `side by side` and `own PID namespace`: one D, two producers in turn."""
    for row in ("side by side", "own PID namespace"):
        logs = out / row.replace(" ", "-")
        producer = Engine(gpu_spec("p", checkpoint, "0", "kv_producer"), logs)
        try:
            if row == "side by side":
                producer.start()
            else:
                with own_pid_namespace(logs):
                    producer.start()
            with running([gpu_spec("d", checkpoint, "1", "kv_consumer")], logs) as (decode,):
                producer.wait_ready()
                yield {"row": row, **describe(producer, decode)}
        finally:
            stop_all([producer])


def try_allocator(checkpoint: Path, out: Path, variable: str) -> dict[str, Any]:
    """Does an engine with expandable segments start, and what does it say when not?"""
    spec = gpu_spec(f"expandable-{variable.lower()}", checkpoint, "0", "kv_producer")
    setting = {variable: "expandable_segments:True"}
    spec = replace(spec, environment={**spec.environment, **setting})
    try:
        with running([spec], out):
            refused = False
    except EngineFailedError:
        refused = True
    log = (out / f"{spec.name}.log").read_text(errors="replace")
    sentences = [line for line in log.splitlines() if variable in line and "expandable" in line]
    said = sentences[-1][:400] if sentences else ""
    return {"row": variable, "refused": refused, "said": said}


def all_rows(checkpoint: Path, out: Path, rows: str) -> Iterator[dict[str, Any]]:
    """Each as soon as it is known."""
    if "namespaces" in rows:
        yield from try_namespaces(checkpoint, out)
    if "allocators" in rows:
        for variable in ALLOCATORS:
            yield try_allocator(checkpoint, out, variable)


def is_right(row: dict[str, Any]) -> bool:
    """Is a row as it should be on GPUs of one machine?"""
    if "refused" in row:
        return row["refused"] and row["row"] in row["said"]
    if row["row"] == "side by side":
        return row["path"] == "cuda_ipc" and not row["warned"]
    return row["path"] in ("tcp", "staged") and row["warned"] == 1 and row["names_the_namespace"]


def main() -> int:
    """Run all rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: print, judge little")
    parser.add_argument("--rows", default="namespaces,allocators", help="which of the two kinds")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "gpu-traps")
    options = parser.parse_args()
    checkpoint = options.out / "nemotron-h"
    write_checkpoint("nemotron-h", checkpoint)
    failed = False
    for row in all_rows(checkpoint, options.out, options.rows):
        good = row.get("tokens", 8) == 8 if options.rehearse else is_right(row)
        failed = failed or not good
        print(json.dumps({**row, "ok": good}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
