"""Engines that outlive the command which brings them up, until `stop`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_facts import engine_facts
from start_logs import differences

from hybridpd_testkit.engines import Engine

UP = "engines.json"
Up = Mapping[str, Mapping[str, Any]]


def bring_up(
    engines: Sequence[Engine],
    out: Path,
    start_seconds: float,
    enough: Callable[[Sequence[str]], bool],
    stagger_seconds: float = 0.0,
) -> int:
    """Start all engines in a session of their own and write down where they are.

    0 when those that came up are ``enough``, by their names.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / UP).unlink(missing_ok=True)
    if os.fork():
        # Somewhat longer than the keeper waits, who tells which engines are up.
        return _wait_for(out / UP, start_seconds + 15, enough)
    os.setsid()  # the engines' parent: it outlives this command
    (out / "keeper").write_text(str(os.getpid()))
    for engine in engines:
        engine.start()
        time.sleep(stagger_seconds)
    begun = time.monotonic()
    up: dict[str, dict[str, Any]] = {}
    for engine in engines:
        try:
            engine.wait_ready(start_seconds)
        except RuntimeError as error:
            # Others may still be measured.
            print(str(error)[-3000:], file=sys.stderr, flush=True)
            continue
        up[engine.spec.name] = {"url": engine.url, "pid": engine.pid}
    print(f"{len(up)} of {len(engines)} up after {time.monotonic() - begun:.0f} s", flush=True)
    tell_pages([engine for engine in engines if engine.spec.name in up])
    print("\n".join(differences({e.spec.name: e.log_path for e in engines})), flush=True)
    (out / f"{UP}.new").write_text(json.dumps({"engines": up}))
    (out / f"{UP}.new").rename(out / UP)
    while True:
        time.sleep(60)


def tell_pages(engines: Sequence[Engine]) -> None:
    """A line per engine: its pages, and geometry's. What cannot be asked keeps no fleet down."""
    for engine in engines:
        try:
            print(json.dumps({"kind": "engine", **engine_facts(engine)}), flush=True)
        except (RuntimeError, OSError, ValueError) as error:
            print(f"{engine.spec.name}: {error!r}"[:500], file=sys.stderr, flush=True)


def _wait_for(path: Path, seconds: float, enough: Callable[[Sequence[str]], bool]) -> int:
    """Wait for the keeper to write `path`."""
    started = time.monotonic()
    while not path.exists():
        if time.monotonic() - started > seconds:
            print("engines are not up; see the logs beside", path, file=sys.stderr)
            return 1
        time.sleep(1)
    up = sorted(json.loads(path.read_text())["engines"])
    print(json.dumps({"up_after_s": round(time.monotonic() - started), "up": up}), flush=True)
    return 0 if enough(up) else 1


def engines_up(out: Path) -> Up:
    """Where the engines are that came up."""
    found: Up = json.loads((out / UP).read_text())["engines"]
    return found


def stop(out: Path) -> int:
    """End the keeper; its engines end with it."""
    keeper = out / "keeper"
    os.kill(int(keeper.read_text()), signal.SIGTERM)
    keeper.unlink()
    (out / UP).unlink(missing_ok=True)
    return 0
