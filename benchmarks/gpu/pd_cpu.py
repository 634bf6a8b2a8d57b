"""CPU seconds of an engine's processes, from /proc: is a front end the bottleneck?"""

from __future__ import annotations

import os
from pathlib import Path


def cpu_seconds(pid: int) -> dict[str, float]:
    """Seconds used so far by the API server ``pid`` and, together, by the processes below it."""
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
    below = 0.0
    for process in used:
        ancestor = parents.get(process, 0)
        while ancestor not in (0, pid):
            ancestor = parents.get(ancestor, 0)
        if ancestor == pid:
            below += used[process]
    return {"api": used.get(pid, 0.0), "core": below}
