"""Fixtures of the operator's tests, and ``--update-golden`` for their golden files."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import hypothesis
import pytest
from operator_fake_cluster import FakeCluster
from operator_world import World

# No test is about time: a busy machine must not fail one.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> "Golden":
    return Golden(Path(__file__).parent / "golden", request.config.getoption("--update-golden"))


class Golden:
    """Compares text with a file that is reviewed as part of a change."""

    def __init__(self, folder: Path, update: bool) -> None:
        self._folder = folder
        self._update = update

    def check(self, name: str, text: str) -> None:
        path = self._folder / name
        if self._update:
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), (
            f"{path.name} differs; if the change is meant, run with --update-golden and review it"
        )


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def ticking() -> Iterator[datetime]:
    return (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=n) for n in range(10_000))


@pytest.fixture
def world(cluster: FakeCluster, ticking: Iterator[datetime]) -> World:
    return World(cluster, ticking)
