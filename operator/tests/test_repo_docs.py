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
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("name", ["write_fields", "write_metrics"])
def test_the_reference_is_written_from_its_source(name: str) -> None:
    path = ROOT / "docs" / "reference" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.OUTPUT.read_text() == module.document(), f"run: python docs/reference/{name}.py"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


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
