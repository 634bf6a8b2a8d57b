"""The driver of the GPU programs, with programs of a line each: what fails, hangs or has no time
left must not cost the rest."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
MARKS = """
import pathlib, sys, time
mark = pathlib.Path(sys.argv[1])
mark.with_suffix(".begun").write_text(str(time.monotonic()))
time.sleep(float(sys.argv[2]))
print("said", mark.name)
mark.with_suffix(".ended").write_text(str(time.monotonic()))
sys.exit(int(sys.argv[3]))
"""


@pytest.fixture(scope="module")
def modules(gpu_programs: Path) -> tuple[Any, Any]:
    import all_steps
    import gpu_steps

    return all_steps, gpu_steps


@pytest.fixture
def play(
    modules: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Play steps `(name, seconds it sleeps, exit status, fields)`; the session afterwards."""
    driver, table = modules
    script = tmp_path / "program.py"
    script.write_text(MARKS)

    def run(*rows: tuple[str, float, int, dict[str, Any]], **settings: Any) -> Any:
        steps = []
        for name, sleeps, status, fields in rows:
            text = shlex.join([str(script), str(tmp_path / name), str(sleeps), str(status)])
            known = {"file": "all", "rehearsal": text, "seconds": 1, "engines": 1, **fields}
            steps.append(table.Step(name, command=text, **known))
        monkeypatch.setattr(driver, "LOOK_SECONDS", 0.01)
        monkeypatch.setattr(driver, "steps_of", lambda gpus: tuple(steps))
        given: dict[str, Any] = {"seconds": 1e9, "again": False, "engines": 4, "steps": []}
        options = argparse.Namespace(
            device="cpu", gpus=1, scratch=tmp_path / "scratch", out=tmp_path / "out",
            **{**given, **settings},
        )  # fmt: skip
        session = driver.Session(options)
        session.play()
        return session

    return run


def results(session: Any) -> dict[str, str]:
    return {run.step.name: run.result for run in session.runs}


def span(folder: Path, name: str) -> tuple[float, float]:
    begun, ended = (folder / f"{name}.{what}" for what in ("begun", "ended"))
    return float(begun.read_text()), float(ended.read_text())


def test_a_step_that_fails_leaves_the_rest_alone(play: Callable[..., Any], tmp_path: Path) -> None:
    session = play(("a", 0, 1, {}), ("b", 0, 0, {}), ("c", 0, 0, {"file": "other"}))
    assert results(session) == {"a": "FAILED", "b": "ok", "c": "ok"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "all.txt", "other.txt", "summary.txt",
    ]  # fmt: skip
    text = (tmp_path / "out" / "all.txt").read_text().splitlines()
    assert text[0].startswith("# python3 ")
    assert text[0].endswith("a 0 1")
    assert text[1].startswith("# ")
    assert text[2] == "said a"
    assert text[3].startswith("# FAILED exit 1")
    assert "said b" in text


def test_what_measures_time_runs_alone(play: Callable[..., Any], tmp_path: Path) -> None:
    alone = {"engines": None}
    play(("a", 0.5, 0, {}), ("b", 0.5, 0, {}), ("timed", 0.3, 0, alone), ("c", 0.1, 0, {}))
    a, b, timed, c = (span(tmp_path, name) for name in ("a", "b", "timed", "c"))
    assert max(a[0], b[0]) < min(a[1], b[1]), "these run beside each other"
    assert max(a[1], b[1]) <= timed[0]
    assert timed[1] <= c[0]


def test_no_more_engines_than_asked_for(play: Callable[..., Any], tmp_path: Path) -> None:
    three = {"engines": 3}
    play(("a", 0.3, 0, three), ("b", 0.3, 0, three), engines=5)
    assert span(tmp_path, "a")[1] <= span(tmp_path, "b")[0]


def test_a_step_that_hangs_is_ended(
    play: Callable[..., Any], modules: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = property(lambda step: 0.5 if step.name == "a" else 3600)
    monkeypatch.setattr(modules[1].Step, "limit_seconds", limits)
    begun = time.monotonic()
    session = play(("a", 3600, 0, {}), ("b", 0, 0, {}))
    assert results(session) == {"a": "HANGS", "b": "ok"}
    assert time.monotonic() - begun < 1800


def test_a_step_that_outlasts_its_call_is_left_for_the_next_one(
    play: Callable[..., Any],
    modules: tuple[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(modules[0], "OVERTIME_SECONDS", 0)
    session = play(("a", 3600, 0, {"seconds": 1}), ("b", 0, 0, {"seconds": 600}), seconds=2)
    assert results(session) == {"a": "left", "b": "left"}
    text = (tmp_path / "out" / "all.txt").read_text()
    assert "left not done when this call ended" in text
    rows = (("a", 0, 0, {}),)
    assert results(play(*rows)) == {"a": "ok"}


def test_a_child_of_a_step_that_hangs_ends_too(modules: tuple[Any, Any], tmp_path: Path) -> None:
    """As an engine does, it has a session of its own and does not listen."""
    import subprocess

    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(3600)"
    )
    parent = (
        "import subprocess, sys, pathlib, time;"
        f"c = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True);"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(c.pid)); time.sleep(3600)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    pid_file = tmp_path / "pid"
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.01)
    modules[0].end_tree(process)
    assert process.poll() is not None
    status = Path(f"/proc/{pid_file.read_text()}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)


def test_a_later_call_goes_on_behind_what_is_done(play: Callable[..., Any], tmp_path: Path) -> None:
    first = ("a", 0, 0, {"seconds": 1})
    rows = (
        first,
        ("fleet", 0, 0, {"seconds": 5000, "engines": None}),
        ("other-fleet", 0, 0, {"seconds": 1, "engines": None}),
        ("load", 0, 0, {"seconds": 1, "engines": None, "needs": "fleet"}),
        ("stop", 0, 0, {"seconds": 1, "engines": None, "needs": "fleet", "cleans": True}),
    )
    session = play(*rows, seconds=1000)
    assert results(session) == {
        "a": "ok", "fleet": "left", "other-fleet": "left", "load": "skipped", "stop": "skipped",
    }  # fmt: skip
    (tmp_path / "a.begun").unlink()
    session = play(*rows)
    assert set(results(session).values()) == {"ok"}
    assert not (tmp_path / "a.begun").exists(), "it was done"
    assert "said a" in (tmp_path / "out" / "all.txt").read_text()


def test_a_fleet_stays_up_while_a_step_that_wants_it_is_left(play: Callable[..., Any]) -> None:
    def needs(**fields: Any) -> dict[str, Any]:
        return {"engines": None, "needs": "fleet", **fields}

    rows = (
        ("fleet", 0, 0, {"engines": None}),
        ("long", 0, 0, needs(seconds=5000)),
        ("short", 0, 0, needs()),
        ("stop", 0, 0, needs(cleans=True)),
    )
    assert results(play(*rows, seconds=1000)) == {
        "fleet": "ok", "long": "left", "short": "ok", "stop": "left",
    }  # fmt: skip
    assert set(results(play(*rows)).values()) == {"ok"}


def test_a_fleet_that_did_not_come_up_is_stopped_and_not_loaded(play: Callable[..., Any]) -> None:
    more = {"engines": None, "needs": "fleet"}
    session = play(
        ("fleet", 0, 1, {"engines": None}),
        ("load", 0, 0, more),
        ("stop", 0, 0, {**more, "cleans": True}),
    )
    assert results(session) == {"fleet": "FAILED", "load": "skipped", "stop": "ok"}


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_table_names_programs_that_exist(modules: tuple[Any, Any], gpus: int) -> None:
    steps = modules[0].steps_of(gpus)
    assert all(step.gpus <= gpus for step in steps)
    names = [step.name for step in steps]
    assert len(set(names)) == len(names)
    assert len({step.file for step in steps}) <= 7, "a summary comes beside, and eight files back"
    for at, step in enumerate(steps):
        for text in filter(None, (step.command, step.rehearsal)):
            program = FOLDER.parents[1] / shlex.split(text)[0]
            assert program.is_file(), text
            assert os.path.commonpath([program, FOLDER.parent]) == str(FOLDER.parent)
        assert not step.needs or step.needs in names[:at]
        assert step.seconds < 540, "a call of a lent machine is 600 s"


def test_an_unknown_step_is_named(play: Callable[..., Any]) -> None:
    with pytest.raises(SystemExit, match="expected names of --list, got nothing-like-it"):
        play(("a", 0, 0, {}), steps=["nothing-like-it"])


def test_compiled_kernels_outlive_a_machine(
    modules: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _ = modules
    monkeypatch.setattr(driver, "MOST_FILE_BYTES", 4096)
    kernels, out, later = (tmp_path / name for name in ("kernels", "out", "later"))
    out.mkdir()
    assert driver.save_caches(kernels, out) == "nothing was compiled"
    (kernels / "triton").mkdir(parents=True)
    (kernels / "triton" / "kernel").write_bytes(os.urandom(5000))
    assert driver.save_caches(kernels, out) == "caches saved in 2 parts"
    driver.load_caches(out, later)
    assert (later / "triton" / "kernel").read_bytes() == (kernels / "triton/kernel").read_bytes()
    (kernels / "large").write_bytes(os.urandom(9000))
    assert driver.save_caches(kernels, out) == "caches would be 4 parts, 2 is the most"
    assert list(out.iterdir()) == []


def test_steps_beside_each_other_take_other_ports(play: Callable[..., Any]) -> None:
    session = play(("a", 0, 0, {}), ("b", 0, 0, {}))
    a, b = (session._ports(run).split("-") for run in session.runs)
    assert int(a[0]) < int(a[1]) < int(b[0])
    beside = play(("a", 0, 0, {}), ("b", 0, 0, {}), steps=["b"], again=True)
    assert beside._ports(beside.runs[0]) == "-".join(b), "in another call too"


@pytest.mark.parametrize("gpus", [1, 2])
def test_every_step_has_ports_below_those_of_outgoing_connections(
    modules: tuple[Any, Any], gpus: int
) -> None:
    driver, _ = modules
    assert driver.FIRST_PORT + driver.STEP_PORTS * len(driver.steps_of(gpus)) <= 30000


def test_one_gpu_has_a_table_of_its_own(
    modules: tuple[Any, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _ = modules
    for gpus, shown, hidden in (("1", "crowd-pairs", "fleet-1-2"), ("2", "fleet-1-2", "crowd")):
        monkeypatch.setattr(sys, "argv", ["all_steps.py", "--list", "--gpus", gpus])
        assert driver.main() == 0
        names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
        assert shown in names
        assert hidden not in names
