"""The table of combinations: every row names tests, and those tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "combinations.md"
TEST = re.compile(r"`(test_\w+)`")
DEFINED = re.compile(r"^(?:    )?def (test_\w+)\(", re.MULTILINE)
SENTENCE = re.compile(r"refused at start[^|]*: `([^`]+)`")


def rows() -> list[list[str]]:
    """Cells of every row of the page's tables, without their heads."""
    lines = PAGE.read_text().splitlines()
    tables = [line for line in lines if line.startswith("| ") and not line.endswith("Shown by |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in tables]


def defined_tests() -> set[str]:
    folders = (ROOT / "connector" / "tests", ROOT / "connector" / "tests_vllm")
    files = [path for folder in folders for path in folder.glob("test_*.py")]
    return {name for path in files for name in DEFINED.findall(path.read_text())}


def test_every_row_names_tests_that_exist() -> None:
    assert len(rows()) > 25
    known = defined_tests()
    for feature, status, shown in (row[:3] for row in rows()):
        assert status, feature
        named = TEST.findall(shown)
        assert named, feature
        assert set(named) <= known, (feature, set(named) - known)


def test_every_test_of_the_matrix_is_in_the_table() -> None:
    named = set(TEST.findall(PAGE.read_text()))
    shared = (
        "test_vllm_matrix_mismatch_leaves_nothing_behind",
    )  # a second look at a row's engines
    for path in (ROOT / "connector" / "tests_vllm").glob("test_vllm_matrix_*.py"):
        for name in DEFINED.findall(path.read_text()):
            assert name in named or name in shared, name


def test_refusals_are_quoted_as_they_are_written() -> None:
    """A sentence in the table is one of the connector, or one that its tests wait for."""
    files = [
        *(ROOT / "connector" / "hybridpd_connector").glob("*.py"),
        *(ROOT / "connector" / "tests_vllm").glob("test_vllm_matrix_*.py"),
    ]
    text = "\n".join(path.read_text() for path in files)
    sentences = SENTENCE.findall(PAGE.read_text())
    assert len(sentences) >= 5
    for sentence in sentences:
        assert sentence in text, sentence


def test_the_page_says_what_runs_on_one_version_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "LoRA's and those of other block sizes run on 0.32 only": all others are in the matrix."""
    monkeypatch.syspath_prepend(str(ROOT / "e2e" / "tooling"))
    import suite

    named = set(TEST.findall(PAGE.read_text()))
    files = (ROOT / "connector" / "tests_vllm").glob("test_vllm_*.py")
    showing = [path for path in files if named & set(DEFINED.findall(path.read_text()))]
    in_the_matrix = {ROOT / test for test in suite.MATRIX_TESTS}
    left_out = {path.stem for path in showing if path not in in_the_matrix}
    assert left_out == {"test_vllm_lora", "test_vllm_block_sizes"}
    assert "LoRA's and\nthose of other block sizes run on 0.32 only" in PAGE.read_text()
