"""Two connectors that note their calls (see `tracing`): the shipped one and vLLM's own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

from hybridpd_connector.connector import HybridNixlConnector
from hybridpd_testkit.posting_parts import PostingParts
from hybridpd_testkit.tracing import PARTS, PARTS_MARK, Traced


class TracedHybrid(Traced, HybridNixlConnector):
    """The shipped connector, noted."""

    _trace_parts: PostingParts | None = None

    def traced_loads(self, metadata: Any) -> Iterable[str]:
        return [load.request_id for load in metadata.orders.loads]

    def traced_start(self, loads: list[str], forward_context: Any, **kwargs: Any) -> None:
        if not any(PARTS_MARK in load for load in loads):
            super().traced_start(loads, forward_context, **kwargs)
            return
        if self._trace_parts is None:
            self._trace_parts = PostingParts(self._worker)
        parts = self._trace_parts.measure(super().traced_start, loads, forward_context, **kwargs)
        self._trace.write(json.dumps([PARTS, time.monotonic(), len(loads), parts]))


class TracedUpstream(Traced, NixlConnector):  # type: ignore[misc]
    """vLLM's own connector, noted."""

    def traced_loads(self, metadata: Any) -> Iterable[str]:
        return list(metadata.reqs_to_recv)
