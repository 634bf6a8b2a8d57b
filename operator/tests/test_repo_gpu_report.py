"""Tables of the load on GPUs: which points stand together, and what is told of first requests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def modules(gpu_programs: Path) -> tuple[Any, Any]:
    import pd_report
    import spinners

    return pd_report, spinners


def point(connector: str, repeat: int, tpot_ms: float, **more: Any) -> dict[str, Any]:
    return {
        "kind": "point", "connector": connector, "repeat": repeat, "concurrency": 1,
        "requests": 25, "failed": 0, "tpot_p50_ms": tpot_ms, **more,
    }  # fmt: skip


def test_points_beside_busy_processes_and_of_another_label_are_tables_of_their_own(
    modules: tuple[Any, Any],
) -> None:
    report, _ = modules
    points = [
        point("in-tree", 0, 2.0),
        point("hybridpd", 0, 3.0),
        point("in-tree", 0, 4.0, label="awake", spin=0),
        point("hybridpd", 0, 4.4, label="awake", spin=0),
        point("in-tree", 0, 5.0, label="awake", spin=2),
        point("hybridpd", 0, 5.0, label="awake", spin=2),
    ]
    lines = report.table(points)
    titles = [line for line in lines if "concurrency" in line]
    assert [title.partition(", requests")[0] for title in titles] == [
        "concurrency 1",
        "awake: concurrency 1",
        "awake: concurrency 1, 2 busy processes beside",
    ]
    ratios = [line.split()[-3] for line in lines if line.startswith("TPOT p50")]
    assert ratios == ["1.500", "1.100", "1.000"]
    assert lines[-1] == "failed requests: 0"


def test_a_point_of_one_connector_has_no_ratio(modules: tuple[Any, Any]) -> None:
    report, _ = modules
    lines = report.table([point("in-tree", 0, 2.0)])
    assert [line.split()[-2:] for line in lines if line.startswith("TPOT")] == [
        ["2.00", "[2.00-2.00]"]
    ]


def test_first_requests_say_whether_p_was_met_before(modules: tuple[Any, Any]) -> None:
    report, _ = modules
    records = [
        {"kind": "first", "connector": "in-tree", "met_ahead": 0, "hand_over_ms": [125.0, 30.0]},
        {"kind": "first", "connector": "hybridpd", "met_ahead": 1, "hand_over_ms": [24.0]},
        point("in-tree", 0, 2.0),
    ]
    assert report.first_lines(records) == [
        "hand-over of the first requests, ms, in-tree: 125.0, 30.0",
        "hand-over of the first requests, ms, hybridpd, 1 P met ahead: 24.0",
    ]


def test_busy_processes_run_inside_the_block_only(
    modules: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, spinners = modules
    started = []
    popen = spinners.subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> Any:
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(spinners.subprocess, "Popen", start)
    with spinners.spinning(2):
        assert [process.poll() for process in started] == [None, None]
    assert all(process.returncode is not None for process in started)
    assert len(started) == 2
    assert spinners.count_of("3") == 3
    assert spinners.count_of("all") == os.cpu_count()
