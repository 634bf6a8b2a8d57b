"""What a connector costs in a step that begins and ends no transfer: most steps are such.

``step`` makes the calls that vLLM 0.32 makes in every step, in its order: the scheduler's, then one
worker's, then the scheduler's again. Stand-ins and doubles as in ``connector_cpu``.
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.v1.outputs import KVConnectorOutput

from hybridpd_connector.connector import HybridNixlConnector
from hybridpd_connector.side_channel_guard import Tally
from hybridpd_connector.vllm_engine import SchedulerSide

STEPS = 3000
BATCH = 20


def ours_of(connector: Any) -> tuple[Any, Any]:
    """(the scheduler's instance, the worker's) of a ``connector_cpu.Ours`` engine."""
    scheduler: Any = object.__new__(HybridNixlConnector)
    side: Any = object.__new__(SchedulerSide)
    side.half, side._server = connector._scheduler.half, SimpleNamespace(take_refused=Tally().take)
    scheduler._scheduler = side
    scheduler._worker = None
    return scheduler, connector


def theirs_of(scheduler: Any, worker: Any, role: str) -> tuple[Any, Any]:
    """vLLM's two instances of one engine, with these halves."""
    made = []
    for halves in ((scheduler, None), (None, worker)):
        facade: Any = object.__new__(NixlPullConnector)
        facade.connector_scheduler, facade.connector_worker = halves
        facade.kv_transfer_config = SimpleNamespace(kv_role=role)
        facade._connector_metadata = None
        made.append(facade)
    return made[0], made[1]


def step(scheduler: Any, worker: Any) -> None:
    """One step of an engine that has only decoding, or nothing, to do."""
    meta = scheduler.build_connector_meta(None)
    worker.handle_preemptions(meta)
    worker.bind_connector_metadata(meta)
    worker.start_load_kv(None)
    worker.wait_for_save()
    output = KVConnectorOutput()
    results = worker.get_transfer_results(set())
    output.finished_sending = results.finished_sending or None
    output.finished_recving = results.finished_recving or None
    output.failed_recving = results.failed_recving
    output.invalid_block_ids = worker.get_block_ids_with_load_errors()
    output.kv_connector_stats = worker.get_kv_connector_stats()
    output.kv_cache_events = worker.get_kv_connector_kv_cache_events()
    output.kv_connector_worker_meta = worker.build_connector_worker_meta()
    worker.clear_connector_metadata()
    scheduler.update_connector_output(output)
    scheduler.get_kv_connector_stats()
    scheduler.has_pending_push_work()


def microseconds(scheduler: Any, worker: Any) -> float:
    """CPU of one step: median of batches."""
    batches = []
    for _ in range(STEPS // BATCH):
        begun = time.thread_time()
        for _ in range(BATCH):
            step(scheduler, worker)
        batches.append(1e6 * (time.thread_time() - begun) / BATCH)
    return statistics.median(batches)
