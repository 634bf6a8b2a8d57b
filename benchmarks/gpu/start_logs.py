"""What engines say of themselves while they start, where those of two connectors differ.

Two connectors are compared on engines that should be alike in all else: attention and MoE kernels,
graphs, layout and size of the cache, scheduling. A difference here is one in every step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

TOLD = re.compile(
    r"backend|KV cache (layout|size)|cache layout|cudagraph|CUDA graph|autotun|block size|page size"
    r"|[Mm]odel runner|synchronous scheduling|kernel config|NUMA|numa|affinity",
)
# Paths and times differ always; the last two are what vLLM's connector says of itself.
NOISE = re.compile(
    r"kv_transfer_config|non-default args|init_method|\bseconds\b|\d ?s\b|it/s|%\||Nixl|^Detected"
)
PREFIX = re.compile(r"^.*?\.py:\d+\] ")
MOST_LINES = 12
MOST_LETTERS = 200


def told(log: str) -> list[str]:
    """Lines about how the engine runs, each once, without their times and process ids."""
    logged = filter(PREFIX.match, map(str.strip, log.splitlines()))
    lines = (PREFIX.sub("", line) for line in logged)
    chosen = (line for line in lines if TOLD.search(line) and not NOISE.search(line))
    return list(dict.fromkeys(line[:MOST_LETTERS] for line in chosen))


def differences(logs: Mapping[str, Path]) -> list[str]:
    """How many lines all of these engines have, and those that not all have."""
    found = {
        name: told(path.read_text(errors="replace")) for name, path in logs.items() if path.exists()
    }
    shared = set.intersection(*map(set, found.values())) if found else set()
    lines = [f"{len(shared)} lines about how they run are the same in all {len(found)} logs"]
    for name, own in found.items():
        apart = [line for line in own if line not in shared]
        lines += [f"{name} only: {line}" for line in apart[:MOST_LINES]]
    return lines
