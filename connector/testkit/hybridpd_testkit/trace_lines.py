"""Lines that processes of one machine write while they are measured, at a microsecond each.

Each writer has a file of its own, mapped into its memory: a line is a copy of some bytes, without
a call of the system and without a thread that would want the interpreter later. A file that is
full takes no more lines. Line: a JSON list that begins with its kind.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE_BYTES = 16 << 20
"""Two hundred thousand lines; what is not written takes no room on the disk."""

WHO = "who"


class Lines:
    """What one part of one process writes."""

    def __init__(self, folder: Path, who: str, size: int = FILE_BYTES) -> None:
        """The first line names the writer."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{os.getpid()}-{time.monotonic_ns()}.jsonl"
        with path.open("x+b") as file:
            file.truncate(size)
            self._bytes = mmap.mmap(file.fileno(), size)
        self._size = size
        self._end = 0
        self.write(json.dumps([WHO, who]))

    def write(self, line: str) -> None:
        """Add a line of JSON. The caller writes it out: most have numbers only."""
        data = line.encode() + b"\n"
        end = self._end + len(data)
        if end <= self._size:
            self._bytes[self._end : end] = data
            self._end = end


def read_lines(folder: Path) -> Iterator[tuple[str, list[list[Any]]]]:
    """(who, the other lines) of every writer, also of such that still write."""
    for path in sorted(folder.glob("*.jsonl")):
        text = path.read_bytes().rstrip(b"\0")
        # A line that is just being written is left for the next time.
        whole = text[: text.rfind(b"\n") + 1].decode()
        lines = [json.loads(line) for line in whole.splitlines()]
        if lines and lines[0][0] == WHO:
            yield lines[0][1], lines[1:]


def cost_of_a_line(rounds: int = 50, lines: int = 100) -> float:
    """Seconds that a line of a step costs, here and now: median of some rounds."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        writer = Lines(Path(folder), "cost", 1 << 20)
        for _ in range(rounds):
            begun = time.perf_counter()
            for index in range(lines):
                writer.write(f'["step",{begun:.6f},{index},8,1,1,1,{1.2e-5:.7f}]')
            seconds.append((time.perf_counter() - begun) / lines)
    return statistics.median(seconds)
