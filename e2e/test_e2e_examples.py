"""Every documented example: planned offline, and accepted by the API server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import release
from kubectl import Kubectl
from services import EXAMPLES

FILES = sorted(EXAMPLES.glob("*.yaml"))


def plan(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    paths = [str(release.ROOT / "operator"), str(release.ROOT / "connector")]
    return subprocess.run(
        [sys.executable, "-m", "hybridpd_operator.cli", "plan", "-f", str(path), *flags],
        env={**os.environ, "PYTHONPATH": ":".join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_there_are_examples() -> None:
    assert len(FILES) >= 2


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_plan_of_an_example_is_compatible(path: Path) -> None:
    done = plan(path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_api_server_takes_every_planned_child(kubectl: Kubectl, path: Path) -> None:
    """What the plan prints is what would be applied: each object passes a server-side dry run."""
    done = plan(path, "-o", "yaml")
    assert done.returncode == 0, done.stderr
    children = children_of(done.stdout)
    assert len(children) >= 6
    for child in children:
        child["metadata"].pop("namespace", None)
        child["metadata"].pop("ownerReferences", None)
        kubectl.apply(child, "--server-side", "--dry-run=server", "--field-manager=e2e")


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_api_server_accepts_an_example(kubectl: Kubectl, path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        assert "(server dry run)" in kubectl.apply(document, "--dry-run=server")


def children_of(text: str) -> list[dict[str, dict[str, object]]]:
    """The Kubernetes objects in the output of `plan -o yaml`."""
    documents = [document for document in yaml.safe_load_all(text) if document]
    found = []
    for document in documents:
        objects = document.get("children", [document])
        found += [item for item in objects if item.get("apiVersion") and item.get("kind")]
    return found
