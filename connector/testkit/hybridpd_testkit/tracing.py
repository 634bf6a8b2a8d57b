"""A connector that notes when its calls happen, and what each step of its engine is.

Each half of each process writes lines to a file of its own (`trace_lines`) in the directory that
TRACE_VARIABLE names. Seconds are the machine's monotonic clock, so that lines of all processes of
one machine, and of a client on it, can be put in order. `benchmarks/gpu/handover_stages.py` reads
them:

    [event, request id, seconds]                    a call of a hand-over
    ["step", seconds, requests, tokens, reads ordered, loads in flight, 1 if one of the requests
        was in the step before, seconds in the connector]    a step of a decode engine, as scheduled
    ["calls", seconds, reads ordered, seconds in start_load_kv, in get_transfer_results, in the
        others]                                     the connector's calls in a worker's step
    ["parts", seconds, reads ordered, {part: [seconds, CPU seconds]}]    see `posting_parts`

With MARK_VARIABLE only requests are noted whose id has it, and only steps that have such a request,
so that one fleet of engines serves measurements that are traced and such that are not. Both
connectors write the same lines, but for "parts", which are only taken where ids have PARTS_MARK.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hybridpd_testkit.trace_lines import Lines

TRACE_VARIABLE = "HYBRIDPD_TRACE_DIRECTORY"
MARK_VARIABLE = "HYBRIDPD_TRACE_MARK"
PARTS_MARK = "parts-"

ARRIVED = "arrived"
TAKEN = "taken"
SCHEDULED = "scheduled"
POST_BEGUN = "post begun"
POSTED = "posted"
NOTICED = "noticed"
REPORTED = "reported"
FIRST_STEP = "first step"
ANSWERED = "answered"
STEP = "step"
CALLS = "calls"
PARTS = "parts"


class Trace:
    """Lines of one half of a connector."""

    def __init__(self, who: str, producer: bool) -> None:
        """Of a prefill engine only its answers are noted, of a decode engine all else."""
        self._producer = producer
        self._mark = os.environ.get(MARK_VARIABLE, "")
        self._lines = Lines(Path(os.environ[TRACE_VARIABLE]), who)
        self.write = self._lines.write

    def marked(self, request_ids: Iterable[str]) -> list[str]:
        """Those that are noted."""
        return [request_id for request_id in request_ids if self._mark in request_id]

    def has_marked(self, scheduled: Mapping[str, int]) -> bool:
        """Is this a step of a decode engine whose first request is noted? Then all of them are:
        clients mark all requests of a run or none."""
        return not self._producer and bool(scheduled) and self._mark in next(iter(scheduled))

    def note(self, event: str, request_ids: Iterable[str], seconds: float | None = None) -> None:
        """One line for each request. ``seconds``: now, unless given."""
        if (event == ANSWERED) is not self._producer:
            return
        at = time.monotonic() if seconds is None else seconds
        for request_id in self.marked(request_ids):
            self.write(json.dumps([event, request_id, at]))


class Traced:
    """The calls that are noted, around those of the class behind it. See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        producer = vllm_config.kv_transfer_config.kv_role == "kv_producer"
        self._trace = Trace(f"{type(self).__name__} {role.name}", producer)
        # The scheduler's half.
        self._trace_ordered: set[str] = set()
        self._trace_flying: set[str] = set()
        self._trace_waiting: set[str] = set()
        self._trace_before: Mapping[str, int] = {}
        self._trace_heard = 0.0
        # The worker's half.
        self._trace_running: set[str] = set()
        self._trace_spent = [0.0, 0.0, 0.0]
        self._trace_posted = 0

    # --- scheduler ----------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        if request.kv_transfer_params:
            self._trace.note(ARRIVED, [request.request_id])
        super().on_new_request(request)  # type: ignore[misc]
        if request.kv_transfer_params:
            self._trace.note(TAKEN, [request.request_id])

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(  # type: ignore[misc]
            request, blocks, num_external_tokens
        )
        if num_external_tokens > 0:
            self._trace.note(SCHEDULED, [request.request_id])
            self._trace_ordered.update(self._trace.marked([request.request_id]))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        begun = time.monotonic()
        meta = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        ended = time.monotonic()
        scheduled = scheduler_output.num_scheduled_tokens
        ordered, self._trace_ordered = self._trace_ordered, set()
        self._trace_waiting |= ordered
        self._trace_flying |= ordered
        if self._trace_waiting:
            first = self._trace_waiting & scheduled.keys()
            self._trace.note(FIRST_STEP, first)
            self._trace_waiting -= first
        if self._trace_flying or self._trace.has_marked(scheduled):
            goes_on = not scheduled.keys().isdisjoint(self._trace_before.keys())
            self._trace.write(
                f'["{STEP}",{ended:.6f},{len(scheduled)},'
                f"{scheduler_output.total_num_scheduled_tokens},{len(ordered)},"
                f"{len(self._trace_flying)},{goes_on:d},{ended - begun + self._trace_heard:.7f}]"
            )
        self._trace_before, self._trace_heard = scheduled, 0.0
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        begun = time.monotonic()
        super().update_connector_output(connector_output)  # type: ignore[misc]
        self._trace_heard += time.monotonic() - begun
        ended = connector_output.finished_recving or ()
        self._trace.note(REPORTED, ended)
        self._trace_flying.difference_update(ended)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        answer = super().request_finished_all_groups(request, block_ids)  # type: ignore[misc]
        self._trace_flying.discard(request.request_id)
        self._trace_waiting.discard(request.request_id)
        if answer[1] is not None:
            self._trace.note(ANSWERED, [request.request_id])
        return answer

    # --- worker -------------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        begun = time.monotonic()
        super().handle_preemptions(kv_connector_metadata)  # type: ignore[misc]
        self._trace_spent[2] += time.monotonic() - begun

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads: list[str] = []
        if self.has_connector_metadata():  # type: ignore[attr-defined]
            orders = self._get_connector_metadata()  # type: ignore[attr-defined]
            loads = self._trace.marked(self.traced_loads(orders))
        begun = time.monotonic()
        self.traced_start(loads, forward_context, **kwargs)
        ended = time.monotonic()
        self._trace_spent[0] += ended - begun
        if loads:
            self._trace.note(POST_BEGUN, loads, begun)
            self._trace.note(POSTED, loads, ended)
            self._trace_running.update(loads)
            self._trace_posted = len(loads)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        begun = time.monotonic()
        results = super().get_transfer_results(finished_req_ids)  # type: ignore[misc]
        ended = time.monotonic()
        self._trace_spent[1] += ended - begun
        if results.finished_recving:
            self._trace.note(NOTICED, results.finished_recving, ended)
        self._trace_running -= finished_req_ids
        return results

    def get_kv_connector_stats(self) -> Any:
        begun = time.monotonic()
        found = super().get_kv_connector_stats()  # type: ignore[misc]
        self._trace_spent[2] += time.monotonic() - begun
        return found

    def build_connector_worker_meta(self) -> Any:
        """The last call of a worker's step."""
        begun = time.monotonic()
        meta = super().build_connector_worker_meta()  # type: ignore[misc]
        ended = time.monotonic()
        if self._trace_running:
            start, results, others = self._trace_spent
            self._trace.write(
                f'["{CALLS}",{ended:.6f},{self._trace_posted},'
                f"{start:.7f},{results:.7f},{others + ended - begun:.7f}]"
            )
        self._trace_spent, self._trace_posted = [0.0, 0.0, 0.0], 0
        return meta

    def traced_loads(self, metadata: Any) -> Iterable[str]:
        """Ids of the requests whose reads these orders begin."""
        raise AttributeError(f"{type(self).__name__} does not say where its orders have loads")

    def traced_start(self, loads: list[str], forward_context: Any, **kwargs: Any) -> None:
        """The call that posts reads."""
        super().start_load_kv(forward_context, **kwargs)  # type: ignore[misc]
