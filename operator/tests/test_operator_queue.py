"""Which service is looked at when: the queue, and the workers that empty it."""

import asyncio
from typing import Any

import pytest

from hybridpd_operator.cluster_api import ClusterError
from hybridpd_operator.controller import Controller
from hybridpd_operator.endpoint import Freshness
from hybridpd_operator.metrics import Metrics
from hybridpd_operator.work_queue import (
    LONGEST_RETRY_SECONDS,
    Key,
    WorkQueue,
    retry_seconds,
)

A, B = Key("ns", "a"), Key("ns", "b")


@pytest.fixture
def queue() -> WorkQueue:
    return WorkQueue(jitter=lambda: 0.999999)


# --- queue ---------------------------------------------------------------------------------------


def test_a_key_waits_once_and_the_earliest_time_stands(queue: WorkQueue) -> None:
    queue.add(A, 0.0, 5.0)
    queue.add(A, 1.0, 1.0)
    queue.add(A, 1.0, 60.0)
    assert len(queue) == 1
    assert queue.take(1.9) is None
    assert queue.wait_seconds(1.0) == pytest.approx(1.0)
    assert queue.take(2.0) == A
    assert queue.take(100.0) is None


def test_a_key_is_never_worked_on_twice_at_once(queue: WorkQueue) -> None:
    queue.add(A, 0.0)
    assert queue.take(0.0) == A
    queue.add(A, 0.0)
    queue.add(B, 0.0)
    assert queue.take(1.0) == B
    assert queue.take(1.0) is None
    assert queue.wait_seconds(1.0) is None
    queue.succeed(A, 1.0, None)
    assert queue.take(1.0) == A, "what came in meanwhile is not lost"


def test_failures_back_off_to_a_cap_and_success_forgets_them(queue: WorkQueue) -> None:
    delays = []
    for _ in range(12):
        queue.add(A, 0.0)
        assert queue.take(1e9) == A
        queue.add(A, 0.0)
        delays.append(queue.fail(A, 0.0))
    assert delays == sorted(delays)
    assert delays[0] == pytest.approx(1.0, rel=1e-3)
    assert delays[-1] == pytest.approx(LONGEST_RETRY_SECONDS, rel=1e-3)
    assert queue.take(delays[-1] - 1) is None, "events do not undercut the delay"
    assert queue.take(delays[-1]) == A
    queue.succeed(A, 0.0, None)
    queue.add(A, 0.0)
    assert queue.take(0.0) == A
    assert queue.fail(A, 0.0) == pytest.approx(1.0, rel=1e-3)


def test_jitter_spreads_a_delay_over_its_second_half() -> None:
    assert retry_seconds(3, 0.0) == 2.0
    assert 3.9 < retry_seconds(3, 0.999) < 4.0
    assert retry_seconds(10_000, 0.0) == LONGEST_RETRY_SECONDS / 2


def test_the_oldest_due_key_goes_first(queue: WorkQueue) -> None:
    queue.add(B, 0.0)
    queue.add(A, 1.0)
    assert [queue.take(5.0), queue.take(5.0)] == [B, A]
    assert "active=2" in repr(queue)


# --- controller ----------------------------------------------------------------------------------


class Runs:
    """Records passes; raises what it is told, once each."""

    def __init__(self, *errors: Exception) -> None:
        self.keys: list[Key] = []
        self.errors = list(errors)
        self.again: float | None = None

    def __call__(self, key: Key) -> float | None:
        self.keys.append(key)
        if self.errors:
            raise self.errors.pop(0)
        return self.again


def controller_of(
    runs: Runs, listed: list[tuple[Key, int]] | ClusterError, metrics: Metrics | None = None
) -> tuple[Controller, Freshness]:
    freshness = Freshness(resync_seconds=1000.0, started=0.0)

    def list_services() -> list[tuple[Key, int]]:
        if isinstance(listed, ClusterError):
            raise listed
        return listed

    queue = WorkQueue(jitter=lambda: 0.0)
    controller = Controller(queue, runs, list_services, freshness, metrics or Metrics(), workers=2)
    return controller, freshness


async def until(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not happen")


def test_the_resync_passes_over_everything_it_lists() -> None:
    async def scenario() -> None:
        runs = Runs()
        controller, freshness = controller_of(runs, [(A, 1), (B, 1)])
        controller.start()
        await until(lambda: set(runs.keys) == {A, B})
        await controller.stop()
        assert freshness.is_ready

    asyncio.run(scenario())


def test_a_burst_of_events_is_one_pass() -> None:
    async def scenario() -> None:
        runs = Runs()
        controller, _ = controller_of(runs, [])
        controller.start()
        for _ in range(50):
            controller.ask(A)
        await until(lambda: runs.keys)
        await asyncio.sleep(0.05)
        await controller.stop()
        assert runs.keys == [A]

    asyncio.run(scenario())


def test_any_failure_of_a_pass_is_retried_and_counted() -> None:
    async def scenario() -> None:
        metrics = Metrics()
        runs = Runs(ClusterError("GET", 500, "x"), RuntimeError("a defect"))
        controller, _ = controller_of(runs, [], metrics)
        controller.start()
        controller.ask(A, 0.0)
        await until(lambda: len(runs.keys) == 3)
        await until(lambda: metrics.value("hybridpd_operator_passes_total", result="ok") == 1)
        await controller.stop()
        assert metrics.value("hybridpd_operator_passes_total", result="cluster_error") == 1
        assert metrics.value("hybridpd_operator_passes_total", result="defect") == 1

    asyncio.run(scenario())


def test_a_defect_does_not_end_the_resync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridpd_operator.controller._RESYNC_RETRY_SECONDS", 0.0)
    answers: list[Any] = [RuntimeError("a defect"), [(A, 1)]]

    def list_services() -> list[tuple[Key, int]]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        found: list[tuple[Key, int]] = answer
        return found

    async def scenario() -> None:
        runs, freshness = Runs(), Freshness(resync_seconds=1000.0, started=0.0)
        queue = WorkQueue(jitter=lambda: 0.0)
        controller = Controller(queue, runs, list_services, freshness, Metrics(), workers=1)
        controller.start()
        await until(lambda: runs.keys == [A])
        await controller.stop()
        assert freshness.is_ready

    asyncio.run(scenario())


def test_a_failed_resync_does_not_make_the_process_ready() -> None:
    async def scenario() -> None:
        controller, freshness = controller_of(Runs(), ClusterError("LIST", 0, "down"))
        controller.start()
        await asyncio.sleep(0.1)
        await controller.stop()
        assert not freshness.is_ready

    asyncio.run(scenario())
