"""What the kernel says of an engine's processes, in /proc: is a front end the bottleneck, does the
engine's thread wait for a core, and how often do threads beside it wake up?"""

from __future__ import annotations

import os
from pathlib import Path


def cpu_seconds(pid: int) -> dict[str, float]:
    """Seconds used so far by the API server ``pid`` and, together, by the processes below it."""
    parents, used = _all_processes()
    below = sum(used[process] for process in _below(pid, parents))
    return {"api": used.get(pid, 0.0), "core": below}


def scheduled(pid: int) -> dict[str, float]:
    """Of the processes below the API server ``pid``, so far: seconds that their main threads have
    waited for a core while they could run, how often these were given one, and how often all other
    threads were. Empty where the kernel does not count."""
    found: dict[str, float] = {}
    for process in _below(pid, _all_processes()[0]):
        for task in Path(f"/proc/{process}/task").glob("*/schedstat"):
            try:
                _, waited, turns = map(int, task.read_text().split())
            except (OSError, ValueError):
                continue
            main = task.parent.name == str(process)
            name = "main_turns" if main else "other_turns"
            found[name] = found.get(name, 0.0) + turns
            if main:
                found["main_wait"] = found.get("main_wait", 0.0) + waited / 1e9
    return found


def _all_processes() -> tuple[dict[int, int], dict[int, float]]:
    """Parent and CPU seconds of each."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The name in parentheses may hold anything, blanks included.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
        ticks = int(fields[11]) + int(fields[12])
        used[int(folder.name)] = ticks / os.sysconf("SC_CLK_TCK")
    return parents, used


def _below(pid: int, parents: dict[int, int]) -> list[int]:
    """All processes that ``pid`` has started, and that these have."""
    found = []
    for process in parents:
        ancestor = parents[process]
        while ancestor not in (0, pid):
            ancestor = parents.get(ancestor, 0)
        if ancestor == pid:
            found.append(process)
    return found
