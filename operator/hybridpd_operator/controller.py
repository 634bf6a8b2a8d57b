"""Runs passes: queue in, worker threads out, a resync beside them. Knows neither kopf nor kinds.

Everything here lives on one event loop, except the passes: those block on the network and run in
a bounded thread pool.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from hybridpd_operator import logs
from hybridpd_operator.cluster_api import ClusterError, ConflictError
from hybridpd_operator.endpoint import Freshness
from hybridpd_operator.metrics import Metrics
from hybridpd_operator.work_queue import Key, WorkQueue

_log: Final = logging.getLogger(__name__)

#: Events of one change come in bursts (StatefulSet, pods, endpoints): one pass for all of them.
DEBOUNCE_SECONDS: Final = 0.2
_RESYNC_RETRY_SECONDS: Final = 5.0

#: One pass; returns the delay to the next or None. ``Reconciler.run``.
Pass = Callable[[Key], float | None]
#: Lists every service with its generation.
ListServices = Callable[[], Sequence[tuple[Key, int]]]


class Controller:
    """Feeds services to passes, one at a time per service."""

    def __init__(
        self,
        queue: WorkQueue,
        run_pass: Pass,
        list_services: ListServices,
        freshness: Freshness,
        metrics: Metrics,
        workers: int,
    ) -> None:
        self._queue = queue
        self._run_pass = run_pass
        self._list_services = list_services
        self._freshness = freshness
        self._metrics = metrics
        self._workers = workers
        self._threads = ThreadPoolExecutor(workers + 1, thread_name_prefix="pass")
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start workers and resync on the running loop."""
        self._tasks = [asyncio.create_task(self._work()) for _ in range(self._workers)]
        self._tasks.append(asyncio.create_task(self._resync()))

    async def stop(self, grace_seconds: float = 15.0) -> None:
        """Take no more work, let running passes end, give up after the grace."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        ended = asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
        try:
            await asyncio.wait_for(ended, grace_seconds)
        except TimeoutError:
            _log.warning("passes are still running after %.0f s; leaving them", grace_seconds)

    def ask(self, key: Key, delay_seconds: float = DEBOUNCE_SECONDS) -> None:
        """Ask for a pass soon."""
        self._queue.add(key, time.monotonic(), delay_seconds)
        self._wake.set()

    async def _work(self) -> None:
        while True:
            now = time.monotonic()
            key = self._queue.take(now)
            self._metrics.set("hybridpd_operator_queue_length", len(self._queue))
            if key is not None:
                await self._one(key)
                continue
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), self._queue.wait_seconds(now))
            except TimeoutError:
                continue

    async def _one(self, key: Key) -> None:
        """One pass; whatever it raises, the worker lives on and the key comes back."""
        started = time.monotonic()
        result = "ok"
        try:
            loop = asyncio.get_running_loop()
            again = await loop.run_in_executor(self._threads, self._logged_pass, key)
            self._queue.succeed(key, time.monotonic(), again)
        except ConflictError as error:
            result = "conflict"
            self._retry(key, error)
        except ClusterError as error:
            result = "cluster_error"
            self._retry(key, error)
        except Exception as error:
            result = "defect"
            _log.exception("pass over %s/%s failed", *key)
            self._retry(key, error)
        finally:
            self._wake.set()
            self._metrics.add("hybridpd_operator_passes_total", result=result)
            self._metrics.add("hybridpd_operator_pass_seconds_total", time.monotonic() - started)

    def _logged_pass(self, key: Key) -> float | None:
        with logs.about(f"{key.namespace}/{key.name}"):
            return self._run_pass(key)

    def _retry(self, key: Key, error: Exception) -> None:
        delay = self._queue.fail(key, time.monotonic())
        _log.warning("%s/%s: %s; again in %.1f s", *key, error, delay)

    async def _resync(self) -> None:
        """Look at everything now and then: what a watch missed is found here."""
        while True:
            delay = self._freshness.resync_seconds
            try:
                loop = asyncio.get_running_loop()
                listed = await loop.run_in_executor(self._threads, self._list_services)
                self._freshness.listed(dict(listed), time.monotonic())
                self._metrics.set("hybridpd_operator_services", len(listed))
                for key, _ in listed:
                    self.ask(key)
            except ClusterError as error:
                _log.warning("resync failed: %s", error)
                delay = min(delay, _RESYNC_RETRY_SECONDS)
            except Exception:
                # Nobody would notice its end before the liveness probe does.
                _log.exception("resync failed")
                delay = min(delay, _RESYNC_RETRY_SECONDS)
            await asyncio.sleep(delay)
