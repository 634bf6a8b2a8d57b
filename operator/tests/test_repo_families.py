"""The page of families: every kind of state has a row, and what a row names exists."""

from __future__ import annotations

import re
from pathlib import Path

from hybridpd_geometry.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "reference" / "families.md").read_text()
RESULTS = ROOT / "benchmarks" / "gpu" / "results"


def test_every_kind_of_state_has_a_row() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ")]
    for family in FAMILIES:
        assert any(f"`{family}`" in row.split("|")[1] for row in rows), family


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 12
    folders = (ROOT / "connector" / "tests", ROOT / "connector" / "tests_vllm")
    code = "\n".join(path.read_text() for folder in folders for path in folder.glob("test_*.py"))
    for name in named:
        assert f"def {name}(" in code, name


def test_every_run_that_is_named_says_ok() -> None:
    named = set(re.findall(r"`(2026-[\w-]+\.txt)`", TEXT))
    assert named
    for name in named:
        lines = [line for line in (RESULTS / name).read_text().splitlines() if line[:1] == "{"]
        assert lines
        assert all('"ok": true' in line for line in lines), name
