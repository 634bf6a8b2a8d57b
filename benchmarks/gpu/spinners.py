"""Processes that do nothing, without a pause, so that cores of a machine never sleep.

A virtual core without work is given back to its host, and waking it up takes a while. The connector
inside vLLM has a thread that spins; ours sleeps. With spinners beside both, that difference is
gone. They run at the scheduler's lowest class: whatever else wants a core has it at once.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from hybridpd_testkit.processes import die_with_parent

ALL = "all"
SPIN = """
import os
try:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
except OSError:
    os.nice(19)
while True:
    pass
"""


def count_of(text: str) -> int:
    """A number, or as many as there are cores."""
    return os.cpu_count() or 1 if text == ALL else int(text)


@contextlib.contextmanager
def spinning(count: int) -> Iterator[None]:
    """``count`` of them inside the block."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", SPIN],
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, no locks
        )
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
