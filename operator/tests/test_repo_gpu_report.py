"""Tables of the load on GPUs: which points stand together, what is told of first requests, of the
time between tokens and of engines' logs."""

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


@pytest.mark.usefixtures("modules")
def test_times_between_tokens_are_told_by_place() -> None:
    import pd_gaps

    long = pd_gaps.gaps_of([1.0, 1.5, 1.625, 1.75, 1.875, 2.875])
    assert long == {"gap_2": 0.5, "gap_3": 0.125, "gap_rest": 0.125, "gap_most": 1.0}
    short = pd_gaps.gaps_of([1.0, 1.25])
    assert short == {"gap_2": 0.25}
    assert pd_gaps.gaps_of([]) == pd_gaps.gaps_of([1.0]) == {}
    assert pd_gaps.by_place([long, short])["gap_2"] == [0.5, 0.25]
    assert set(pd_gaps.TITLES) == set(long)


def test_the_report_has_a_line_for_each_place(modules: tuple[Any, Any]) -> None:
    report, _ = modules
    points = [
        point("in-tree", 0, 2.0, gap_2_p50_ms=4.0, gap_rest_p50_ms=2.0),
        point("hybridpd", 0, 2.2, gap_2_p50_ms=6.0, gap_rest_p50_ms=2.0),
    ]
    ratios = {line[:30].strip(): line.split()[-3] for line in report.table(points) if "[" in line}
    assert ratios["2nd token p50, ms"] == "1.500"
    assert ratios["later tokens p50, ms"] == "1.000"
    assert "3rd token p50, ms" not in ratios


@pytest.mark.usefixtures("modules")
def test_what_engines_say_of_themselves_is_compared(tmp_path: Path) -> None:
    import start_logs

    head = "(EngineCore pid={}) INFO 11-30 13:22:18 [utils.py:347] "
    logs = {}
    for pid, name, backend in ((7, "a", "FLASH_ATTN"), (8, "b", "TRITON_ATTN")):
        logs[name] = tmp_path / name
        lines = ("Using LBHNC KV cache layout.", f"Using {backend} backend.", f"backend in {pid} s")
        logs[name].write_text("".join(f"{head.format(pid)}{line}\n" for line in lines) + "backend")
    assert start_logs.differences({**logs, "not there": tmp_path / "c"}) == [
        "1 lines about how they run are the same in all 2 logs",
        "a only: Using FLASH_ATTN backend.",
        "b only: Using TRITON_ATTN backend.",
    ]


@pytest.mark.usefixtures("modules")
def test_waits_and_turns_of_the_processes_below_one_are_counted() -> None:
    import subprocess
    import sys

    import pd_cpu

    # Not a gap: the kernels of Linux distributions count them. `make test` skips nothing.
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel counts no turns: runs on every Linux with CONFIG_SCHED_INFO")
    script = "import threading; threading.Thread(target=input).start(); print(flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = pd_cpu.scheduled(os.getpid())
        child.communicate(b"\n")
    assert set(found) == {"main_wait", "main_turns", "other_turns"}
    assert found["main_turns"] >= 1
    assert pd_cpu.cpu_seconds(os.getpid())["api"] > 0


def test_a_fleet_is_up_when_a_connector_has_both_of_its_engines(
    modules: tuple[Any, Any],
) -> None:
    report, _ = modules
    producer, consumer = "hybridpd-kv_producer", "hybridpd-kv_consumer"
    assert report.pairs_of([consumer, producer, "in-tree-kv_consumer"]) == ["hybridpd"]
    assert report.pairs_of([consumer, "in-tree-kv_consumer"]) == []
    assert report.pairs_of([]) == []
