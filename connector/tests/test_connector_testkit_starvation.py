"""What the engine tests may run once more: starved requests, and nothing else that goes wrong.

Each case is a session of its own, in a process of its own: plugins keep state.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAKY = """
from hybridpd_testkit.processes import HttpError
runs = []

def test_first():
    runs.append(1)
    if len(runs) == 1:
        raise {error}
"""
ALWAYS = """
import pytest

@pytest.mark.parametrize("n", range(5))
def test_always(n):
    raise TimeoutError("no processor")
"""


def outcome(tmp_path: Path, text: str) -> str:
    (tmp_path / "test_sample.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "hybridpd_testkit.starvation", "."],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "connector" / "testkit"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


@pytest.mark.parametrize("error", ["TimeoutError('late')", "HttpError('url', 500, 'failed')"])
def test_a_starved_test_is_run_once_more_and_named(tmp_path: Path, error: str) -> None:
    text = outcome(tmp_path, FLAKY.format(error=error))
    assert "1 passed" in text
    assert "starved and run once more: test_sample.py::test_first" in text


@pytest.mark.parametrize("error", ["AssertionError('tokens differ')", "RuntimeError('dead')"])
def test_what_says_that_something_is_wrong_is_not_repeated(tmp_path: Path, error: str) -> None:
    text = outcome(tmp_path, FLAKY.format(error=error))
    assert "1 failed" in text
    assert "starved" not in text


def test_a_session_repeats_few_tests_and_then_none(tmp_path: Path) -> None:
    text = outcome(tmp_path, ALWAYS)
    assert "5 failed" in text
    assert text.count("starved and run once more") == 3
