"""Time and memory of building descriptor tables against the number of blocks, beside vLLM's.

Built once for each pair of ranks, at the handshake. Ours are closed forms: rows, whatever the
number of blocks. vLLM's connector lists every block of every region (its own code, `intree.py`).
Exit status 2 when ours depends on the number of blocks: more rows, or more than twice the memory.

    python benchmarks/table_build.py
"""

from __future__ import annotations

import functools
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from hybridpd_connector.read_tables import row_array
from hybridpd_connector.request_ranges import RequestRanges
from hybridpd_geometry import build_table, plan_pair
from intree import InTree
from shapes import NANO, Shape, shape_of

BLOCKS = (1_000, 4_000, 16_000, 64_000)
REPEATS = 3


def ours(shape: Shape, blocks: int) -> Any:
    """Everything that a handshake makes for one source rank."""
    plan = plan_pair(shape.layout, shape.layout, 0)
    local, remote = shape.placement(0, blocks), shape.placement(0, blocks, first=1 << 50)
    table = build_table(plan, 0, local, remote)
    rows = row_array(table.local_rows), row_array(table.remote_rows)
    return rows, RequestRanges(table), table


def theirs(shape: Shape, blocks: int) -> Any:
    """vLLM's lists of both sides."""
    connector = InTree(shape, blocks)
    return connector.lists(1 << 32), connector.lists(1 << 50)


def measured(build: Callable[[], Any]) -> tuple[float, float, Any]:
    """(best milliseconds, kilobytes that stay allocated, what was built)."""
    best = float("inf")
    for _ in range(REPEATS):
        begun = time.thread_time()
        build()
        best = min(best, time.thread_time() - begun)
    tracemalloc.start()
    made = build()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return 1e3 * best, kept / 1e3, made


def main() -> int:
    """Print one line per number of blocks."""
    shape = shape_of(NANO, 1)
    print(f"{NANO}, TP 1, both sides of one pair of ranks; CPU ms, kB kept")
    print(f"{'blocks':>8}{'ours ms':>9}{'in-tree ms':>11}{'ratio':>8}"
          f"{'ours kB':>9}{'in-tree kB':>12}{'ratio':>8}{'rows':>6}{'in-tree':>10}")  # fmt: skip
    seen = []
    for blocks in BLOCKS:
        ms, kept, (rows, _, _) = measured(functools.partial(ours, shape, blocks))
        their_ms, their_kept, lists = measured(functools.partial(theirs, shape, blocks))
        count = len(rows[0])
        seen.append((count, kept))
        print(f"{blocks:>8}{ms:>9.2f}{their_ms:>11.2f}{ms / their_ms:>8.3f}"
              f"{kept:>9.0f}{their_kept:>12.0f}{kept / their_kept:>8.4f}"
              f"{count:>6}{len(lists[0]):>10}", flush=True)  # fmt: skip
    independent = len({count for count, _ in seen}) == 1 and seen[-1][1] < 2 * seen[0][1]
    print(f"\nindependent of the number of blocks: {'yes' if independent else 'no'}")
    return 0 if independent else 2


if __name__ == "__main__":
    sys.exit(main())
