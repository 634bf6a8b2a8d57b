"""Fixtures of the operator's tests, and ``--update-golden`` for their golden files."""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import hypothesis
import pytest
from operator_fake_cluster import FakeCluster
from operator_golden import Golden
from operator_world import World

# No test is about time: a busy machine must not fail one.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(Path(__file__).parent / "golden", request.config.getoption("--update-golden"))


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def ticking() -> Iterator[datetime]:
    return (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=n) for n in range(10_000))


@pytest.fixture
def world(cluster: FakeCluster, ticking: Iterator[datetime]) -> World:
    return World(cluster, ticking)


@pytest.fixture(scope="module")
def gpu_programs() -> Iterator[Path]:
    """The folder of the GPU programs, whose modules can be imported meanwhile."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield folder
    finally:
        sys.path[:] = before
