"""The shipped connector with two hooks for tests: damage a load, stall a step.

An engine that loads this class behaves exactly like the shipped one until its control directory
holds an order, see ``probe_orders``.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpd_connector.connector import HybridNixlConnector
from hybridpd_testkit.probe_orders import (
    ATTENTION_SECTIONS,
    DELTA_SECTIONS,
    DIRECTORY_VARIABLE,
    STATE_SECTIONS,
    write_whole,
)

if TYPE_CHECKING:
    import torch


class ProbeConnector(HybridNixlConnector):
    """See the module. Both halves use the directory: the scheduler's notes block ids in it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._probe_directory = Path(os.environ[DIRECTORY_VARIABLE])
        self._probe_cache_config = kv_cache_config
        self._probe_tensors: dict[str, torch.Tensor] = {}
        self._probe_rank = -1

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0 and (self._probe_directory / "damage").exists():
            ids = json.dumps(blocks.get_block_ids())
            write_whole(self._probe_directory / f"blocks-{request.request_id}", ids)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        from vllm.distributed import get_tensor_model_parallel_rank

        self._probe_tensors = kv_caches
        self._probe_rank = get_tensor_model_parallel_rank()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        order = self._probe_directory / "stall"
        if self._probe_rank == 0 and order.exists():
            seconds = float(order.read_text())
            order.unlink()
            time.sleep(seconds)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        order = self._probe_directory / "damage"
        if results.finished_recving and order.exists():
            wanted = json.loads(order.read_text())
            if wanted["rank"] == self._probe_rank:
                for request_id in results.finished_recving - results.failed_recving:
                    self._zero(wanted["section"], request_id)
        return results

    def _zero(self, section: str, request_id: str) -> None:
        """Zero one section of every layer in the request's blocks; it must have held something."""
        groups = json.loads((self._probe_directory / f"blocks-{request_id}").read_text())
        held_something = False
        for group, block_ids in zip(self._probe_cache_config.kv_cache_groups, groups, strict=True):
            for layer in group.layer_names:
                for block in block_ids:
                    pages = self._probe_tensors[layer]
                    for part in section_views(section, pages[block], group.kv_cache_spec):
                        held_something |= bool(part.any())
                        part.zero_()
        if not held_something:
            raise AssertionError(f"section {section} of request {request_id} was zero already")


def section_views(section: str, page: torch.Tensor, spec: Any) -> Iterator[torch.Tensor]:
    """The parts of one page that hold a section; none when the layer has no such section.

    State page: bytes of [x | B | C] or [q | k | v] as (channels, conv steps), then the recurrent
    state. Attention page on the CPU: per head, first all of K, then all of V.
    """
    if hasattr(spec, "shapes"):
        if section in STATE_SECTIONS or section in DELTA_SECTIONS:
            first, last = _state_range(section, spec)
            yield page.flatten()[first:last]
    elif section in ATTENTION_SECTIONS:
        for head in page:
            k, v = head.flatten().chunk(2)
            yield k if section == "k" else v


def _state_range(section: str, spec: Any) -> tuple[int, int]:
    """Byte range of a section inside a state page, from vLLM's own shapes."""
    if len(spec.shapes) == 1:  # a short convolution: one stream, no temporal state
        return 0, math.prod(spec.shapes[0]) * spec.dtypes[0].itemsize
    (channels, steps), (heads, head_dim, _) = spec.shapes
    conv_item, ssm_item = (dtype.itemsize for dtype in spec.dtypes)
    inner = heads * head_dim  # channels of x, or of v
    shared = (channels - inner) // 2
    delta = spec.mamba_type.name == "GDN_ATTN"
    widths = (shared, shared, inner) if delta else (inner, shared, shared)
    bounds = [sum(widths[:count]) for count in range(4)]
    edges = [edge * steps * conv_item for edge in bounds]
    edges.append(edges[-1] + math.prod(spec.shapes[1]) * ssm_item)
    index = (DELTA_SECTIONS if delta else STATE_SECTIONS).index(section)
    return edges[index], edges[index + 1]
