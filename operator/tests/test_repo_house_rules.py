"""Rules about the repository itself that no other tool checks.

Left out on purpose: what ruff, mypy and import-linter already enforce.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE_LINES = 400
FUNCTION_LINES = 60
# Modules that may be longer, each with the reason; an entry that is no longer needed fails too.
LONGER_MODULES: dict[str, str] = {}
FOREIGN_HOSTS = re.compile(
    r"(?:pypi\.org|pythonhosted\.org|proxy\.golang\.org|registry\.npmjs\.org|deb\.debian\.org"
    r"|docker\.io|ghcr\.io|quay\.io|registry\.k8s\.io|gcr\.io)"
)


def tracked(pattern: str = "*") -> list[Path]:
    """Files git knows that match `pattern` and exist in the working tree."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", pattern],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_the_operator_folder_never_becomes_a_package() -> None:
    # It would shadow the standard library's `operator` for every Python started at the root.
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert not (ROOT / "connector" / "__init__.py").exists()


def test_test_files_have_unique_names_and_no_packages() -> None:
    tests = [path for path in tracked("*.py") if path.name.startswith("test_")]
    repeated = [name for name, count in Counter(p.name for p in tests).items() if count > 1]
    assert tests
    assert repeated == []
    assert [p for p in tests if (p.parent / "__init__.py").exists()] == []


def test_nothing_is_imported_from_a_conftest() -> None:
    """There are several, and which one such an import finds depends on what was collected first."""
    importing = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.glob("**/tests*/**/*.py")
        if re.search(r"^\s*(from conftest import|import conftest)", path.read_text(), re.MULTILINE)
    ]
    assert importing == []


def test_modules_stay_within_the_size_budget() -> None:
    sizes = {str(path.relative_to(ROOT)): lines(path) for path in tracked("*.py")}
    over = {
        name: count
        for name, count in sizes.items()
        if count > MODULE_LINES and name not in LONGER_MODULES
    }
    assert over == {}, f"over {MODULE_LINES} lines: split it, or name it with its reason"
    stale = [name for name in LONGER_MODULES if sizes.get(name, 0) <= MODULE_LINES]
    assert stale == [], "no longer over the budget: remove the exception"


def test_functions_stay_within_the_size_budget() -> None:
    over = {
        f"{path.relative_to(ROOT)}: {node.name}": node.end_lineno - node.lineno + 1
        for path in tracked("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= FUNCTION_LINES
    }
    assert over == {}, f"over {FUNCTION_LINES} lines: name the parts"


def test_only_the_agent_loads_nixl() -> None:
    # It is found by name among the packages it ships in, so import-linter cannot see it.
    loads = re.compile(r"import_module\(|__import__\(|^\s*(?:import|from) nixl", re.MULTILINE)
    packages = [*tracked("operator/hybridpd_operator/*.py"), *tracked("connector/hybridpd_*/*.py")]
    found = [path.name for path in packages if loads.search(path.read_text(encoding="utf-8"))]
    assert found == ["agent.py"]


def test_no_file_names_a_registry_host() -> None:
    this = Path(__file__).resolve()
    named = []
    for path in tracked():
        if path == this or path.suffix in {".png", ".gz"} or path.name == "LICENSE":
            continue
        if FOREIGN_HOSTS.search(path.read_text(encoding="utf-8", errors="replace")):
            named.append(str(path.relative_to(ROOT)))
    assert named == [], "pin by name and version; the client's own configuration knows the host"


def test_requirement_files_are_plain_pins() -> None:
    files = tracked("e2e/tooling/requirements/*.txt")
    assert files
    for path in files:
        bad = [
            line
            for line in path.read_text().splitlines()
            if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._!+-]+", line)
        ]
        assert bad == [], f"{path.name}: every line is name==version"


@pytest.mark.parametrize(
    "module", ["hybridpd_geometry", "hybridpd_operator.cli", "hybridpd_connector"]
)
def test_a_package_imports_alone_without_its_extras(module: str) -> None:
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['kopf', 'kubernetes', 'vllm', 'nixl', 'torch']))\n"
        f"import {module}\n"
        "print('imported')\n"
    )
    paths = [str(ROOT / "operator"), str(ROOT / "connector")]
    program = f"import sys; sys.path[:0] = {paths!r}\n{program}"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "imported", done.stderr


def test_the_documents_name_the_targets_that_exist_and_suites_are_all_named() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in tracked("*.md"):
        text = path.read_text()
        code = re.findall(r"`make ([a-z0-9-]+)|^make ([a-z0-9-]+)", text, re.MULTILINE)
        assert {one or other for one, other in code} <= targets, path
    suites = {"check", "test", "test-connector", "test-matrix", "chaos", "fuzz", "bench"}
    assert suites <= targets
    for name, wanted in (
        ("CONTRIBUTING.md", suites | {"test-e2e"}),
        ("README.md", suites - {"test-connector"}),
    ):
        named = set(re.findall(r"\bmake ([a-z0-9-]+)", (ROOT / name).read_text()))
        assert wanted <= named, name


def test_links_in_the_documents_lead_somewhere() -> None:
    broken = []
    for path in tracked("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
            if "://" in target or target.startswith("mailto:"):
                continue
            if not (path.parent / target).exists():
                broken.append(f"{path.relative_to(ROOT)} -> {target}")
    assert broken == []


def test_ci_runs_the_command_of_the_readme_and_nothing_else() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "exec make test" in script
    assert "make test" in (ROOT / "README.md").read_text()
