"""Connectors that note when the calls of a hand-over happen: the shipped one and vLLM's own.

Each process appends lines (event, request id, seconds) to a file of its own in the directory that
TRACE_VARIABLE names. Seconds are the machine's monotonic clock, so that lines of all processes of
one machine, and of a client on it, can be put in order. `benchmarks/gpu/handover_stages.py` reads
them. With MARK_VARIABLE only requests are noted whose id has it, so that one fleet of engines
serves measurements that are traced and such that are not.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

from hybridpd_connector.connector import HybridNixlConnector

TRACE_VARIABLE = "HYBRIDPD_TRACE_DIRECTORY"
MARK_VARIABLE = "HYBRIDPD_TRACE_MARK"

ARRIVED = "arrived"
SCHEDULED = "scheduled"
POST_BEGUN = "post begun"
POSTED = "posted"
NOTICED = "noticed"
REPORTED = "reported"
FIRST_STEP = "first step"
ANSWERED = "answered"


class Trace:
    """Lines of one process."""

    def __init__(self, producer: bool) -> None:
        """Of a prefill engine only its answers are noted, of a decode engine all else."""
        self._producer = producer
        self._mark = os.environ.get(MARK_VARIABLE, "")
        folder = Path(os.environ[TRACE_VARIABLE])
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def note(self, event: str, request_ids: Iterable[str], seconds: float | None = None) -> None:
        """One line for each request. ``seconds``: now, unless given."""
        if (event == ANSWERED) is not self._producer:
            return
        at = time.monotonic() if seconds is None else seconds
        for request_id in request_ids:
            if self._mark not in request_id:
                continue
            self._file.write(json.dumps([event, request_id, at]) + "\n")


class Traced:
    """The calls that are noted, around those of the class behind it. See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._trace = Trace(vllm_config.kv_transfer_config.kv_role == "kv_producer")
        self._trace_ordered: set[str] = set()
        self._trace_waiting: set[str] = set()
        self._trace_orders: list[str] = []

    def on_new_request(self, request: Any) -> None:
        if request.kv_transfer_params:
            self._trace.note(ARRIVED, [request.request_id])
        super().on_new_request(request)  # type: ignore[misc]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(  # type: ignore[misc]
            request, blocks, num_external_tokens
        )
        if num_external_tokens > 0:
            self._trace.note(SCHEDULED, [request.request_id])
            self._trace_ordered.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Orders carry the ids of their loads, for the worker's lines."""
        meta = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        meta.traced_loads = sorted(self._trace_ordered)
        self._trace_waiting |= self._trace_ordered
        self._trace_ordered = set()
        if self._trace_waiting:
            begun = self._trace_waiting & set(scheduler_output.num_scheduled_tokens)
            self._trace.note(FIRST_STEP, begun)
            self._trace_waiting -= begun
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)  # type: ignore[misc]
        self._trace.note(REPORTED, connector_output.finished_recving or ())

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        answer = super().request_finished_all_groups(request, block_ids)  # type: ignore[misc]
        if answer[1] is not None:
            self._trace.note(ANSWERED, [request.request_id])
        return answer

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        begun = time.monotonic()
        super().start_load_kv(forward_context, **kwargs)  # type: ignore[misc]
        meta = self._get_connector_metadata()  # type: ignore[attr-defined]
        loads = getattr(meta, "traced_loads", ())
        if loads:
            self._trace.note(POST_BEGUN, loads, begun)
            self._trace.note(POSTED, loads)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)  # type: ignore[misc]
        if results.finished_recving:
            self._trace.note(NOTICED, results.finished_recving)
        return results


class TracedHybrid(Traced, HybridNixlConnector):
    """The shipped connector, noted."""


class TracedUpstream(Traced, NixlConnector):  # type: ignore[misc]
    """vLLM's own connector, noted."""
