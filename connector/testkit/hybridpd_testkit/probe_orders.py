"""Orders to an engine that runs the probe connector: files in a directory of its own.

``damage``  JSON {"section": "x", "rank": 0}: after every finished load, that rank zeroes the bytes
            of the section in the blocks the request received, before the engine uses them
``stall``   seconds: the next step of rank 0 sleeps that long; the file goes when it starts
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

DIRECTORY_VARIABLE = "HYBRIDPD_PROBE_DIR"
STATE_SECTIONS = ("x", "B", "C", "ssm")  # of Mamba-2
DELTA_SECTIONS = ("conv q", "conv k", "conv v", "ssm")  # of Gated DeltaNet
ATTENTION_SECTIONS = ("k", "v")


class ProbeOrders:
    """The control directory, seen from the test: it writes orders, the engine obeys."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def environment(self) -> dict[str, str]:
        """For ``EngineSpec.environment``."""
        return {DIRECTORY_VARIABLE: str(self.directory)}

    @contextlib.contextmanager
    def damage(self, section: str, rank: int) -> Iterator[None]:
        """Zero ``section`` on ``rank`` after each load inside the block."""
        order = self.directory / "damage"
        write_whole(order, json.dumps({"section": section, "rank": rank}))
        try:
            yield
        finally:
            order.unlink()

    def stall(self, seconds: float) -> None:
        """Make the next step take so long."""
        write_whole(self.directory / "stall", str(seconds))

    @property
    def stall_taken(self) -> bool:
        """Whether the engine has begun the step that sleeps."""
        return not (self.directory / "stall").exists()


def write_whole(path: Path, text: str) -> None:
    """Write so that a reader sees all of it or nothing."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
