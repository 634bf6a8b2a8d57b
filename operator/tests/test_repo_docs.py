"""The documentation against what it speaks about."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import yaml

from hybridpd_operator.spec import parse_service

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.yaml"))
WRITERS = sorted((ROOT / "docs").rglob("write_*.py"))
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("path", WRITERS, ids=[path.stem for path in WRITERS])
def test_pages_are_written_from_their_source(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.OUTPUT.read_text() == module.document(), f"run: python {path.relative_to(ROOT)}"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_page_is_on_the_page_that_lists_its_folder() -> None:
    """docs/index.md lists all pages, but for decisions, which have a list of their own."""
    for listed, pages in (
        (ROOT / "docs" / "index.md", [page for page in PAGES if page.parent.name != "adr"]),
        (ROOT / "docs" / "adr" / "README.md", [*(ROOT / "docs" / "adr").glob("0*.md")]),
    ):
        links = {(listed.parent / link).resolve() for link in LINK.findall(listed.read_text())}
        assert set(pages) - links - {listed} == set()


def test_every_benchmark_is_listed_and_so_is_its_output() -> None:
    """A program is a file that can be run; a listed output is one that exists."""
    folder = ROOT / "benchmarks"
    programs = [path for path in folder.rglob("*.py") if "__main__" in path.read_text()]
    text = (folder / "README.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if ".py` | " in line]
    assert sorted(f"`{path.relative_to(folder)}`" for path in programs) == sorted(
        row[0] for row in rows
    )
    for row in rows:
        for pattern in re.findall(r"`([^`]+)`", row[3] if len(row) > 3 else ""):
            assert [*folder.glob(pattern)], pattern


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_examples_parse(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        parse_service(document)


def test_the_tiny_example_states_its_checkpoints_facts() -> None:
    """The example carries config.json inline; it must be the one the demo writes."""
    testkit = str(ROOT / "connector" / "testkit")
    if testkit not in sys.path:
        sys.path.insert(0, testkit)
    from hybridpd_testkit.checkpoint_families import FAMILIES, config_of

    example = yaml.safe_load((ROOT / "docs" / "examples" / "tiny-nemotron.yaml").read_text())
    inline = example["spec"]["model"]["config"]["inline"]
    written = config_of(FAMILIES["nemotron-h"])
    assert inline == {key: written[key] for key in inline}


def test_every_label_of_a_metric_has_its_values_on_the_page() -> None:
    lines = (ROOT / "docs" / "reference" / "metrics.md").read_text().splitlines()
    metrics = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `hybridpd_")]
    used = [label for cells in metrics for label in re.findall(r"`([a-z]+)`", cells[2])]
    explained = [line[3:].partition("`")[0] for line in lines if re.match(r"\| `[a-z]+`", line)]
    assert used
    assert sorted(used) == sorted(explained)


def test_every_condition_is_explained() -> None:
    (source,) = (ROOT / "crds").glob("*.yaml")
    text = source.read_text()
    conditions = (
        "Accepted",
        "Compatible",
        "PrefillReady",
        "DecodeReady",
        "RouterReady",
        "KVTransferVerified",
        "Reconciling",
        "Stalled",
        "Ready",
    )
    page = (ROOT / "docs" / "howto" / "read-conditions.md").read_text()
    for name in conditions:
        assert name in text
        assert f"| {name} |" in page


DIFF = re.compile(r"^```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)
QUOTES = [
    (page, block) for page in PAGES for block in DIFF.findall(page.read_text(encoding="utf-8"))
]


def test_the_guide_to_a_new_family_quotes_diffs() -> None:
    assert len([page for page, _ in QUOTES if page.stem == "add-a-family"]) == 4


@pytest.mark.parametrize(("page", "block"), QUOTES, ids=lambda value: getattr(value, "stem", ""))
def test_quoted_diffs_are_in_the_files_they_name(page: Path, block: str) -> None:
    header, *hunks = re.split(r"^@@.*\n", block, flags=re.MULTILINE)
    text = (ROOT / header.strip().removeprefix("+++ b/")).read_text(encoding="utf-8")
    assert hunks
    for hunk in hunks:
        kept = [line[1:] for line in hunk.splitlines() if not line.startswith("-")]
        assert "\n".join(kept) in text
        for line in hunk.splitlines():
            if line.startswith("-"):
                assert f"\n{line[1:]}\n" not in text
