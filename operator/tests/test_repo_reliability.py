"""docs/reliability.md against the tests that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHAOS = ROOT / "connector" / "tests_chaos"
PAGE = (ROOT / "docs" / "reliability.md").read_text()
REPORTS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in PAGE.splitlines()
    if re.match(r"\| \d+ \|", line)
]
LAST_REPORT = 41


def defined_tests() -> set[str]:
    files = [path for path in ROOT.rglob("test_*.py") if ".git" not in path.parts]
    return {
        node.name
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


def assigned(path: Path) -> dict[str, ast.expr]:
    """What names of a module are given, unread: the suite itself needs an engine's environment."""
    return {
        node.targets[0].id: node.value
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def failure_rows(name: str) -> list[str]:
    """The strings of ``ROWS`` or ``NAMED`` in the failure table that are names of rows."""
    tuple_ = assigned(CHAOS / "chaos_table.py")[name]
    assert isinstance(tuple_, ast.Tuple)
    firsts = [e.args[0] if isinstance(e, ast.Call) else e for e in tuple_.elts]
    return [str(ast.literal_eval(first)) for first in firsts]


def seconds(node: ast.expr, names: dict[str, ast.expr]) -> float:
    """The value of a sum of products of numbers and of names that stand for such."""
    if isinstance(node, ast.Name):
        return seconds(names[node.id], names)
    if isinstance(node, ast.BinOp):
        left, right = seconds(node.left, names), seconds(node.right, names)
        return left + right if isinstance(node.op, ast.Add) else left * right
    return float(ast.literal_eval(node))


def bounds() -> list[str]:
    """Within how many seconds the client of each row sees something; - where none waits."""
    table = assigned(CHAOS / "chaos_table.py")
    names = assigned(CHAOS / "chaos_stage.py") | table
    rows = table["ROWS"]
    assert isinstance(rows, ast.Tuple)
    cells = []
    for row in rows.elts:
        assert isinstance(row, ast.Call)
        within = seconds(row.args[3], names)
        cells.append(f"{within:g}" if within else "-")
    return cells


def test_every_named_test_exists() -> None:
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", PAGE))
    assert len(named) > 40
    assert named - defined_tests() == set()


def test_every_failure_row_is_on_the_page_in_its_order() -> None:
    listed = re.findall(r"^\| (?:● )?([^|]+) \| [^|]+ \| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert [name for name, _ in listed[1:]] == failure_rows("ROWS")
    assert [within for _, within in listed[1:]] == bounds()
    marked = re.findall(r"^\| ● ([^|]+) \|", PAGE, re.MULTILINE)
    assert sorted(marked) == sorted(failure_rows("NAMED"))


def test_every_report_has_its_row() -> None:
    assert [int(cells[0]) for cells in REPORTS] == list(range(1, LAST_REPORT + 1))


@pytest.mark.parametrize("cells", REPORTS, ids=[cells[0] for cells in REPORTS])
def test_a_report_is_answered_by_a_test_or_a_reason(cells: list[str]) -> None:
    _, _, _, here = cells
    rows = set(re.findall(r'"([^"]+)"', here))
    assert rows <= set(failure_rows("ROWS"))
    assert rows or re.search(r"`test_\w+`", here)
