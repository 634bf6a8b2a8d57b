"""A vLLM worker extension that reports what the engine really allocated.

Loaded with ``--worker-extension-cls``; answers ``/collective_rpc``. The reports hold plain JSON
values taken from vLLM's own KV-cache configuration and tensors, so that a test can compute what a
transfer must move without any code of ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


class WorkerReport:
    """Mixed into vLLM's worker class; one instance a rank."""

    rank: int
    model_runner: Any
    vllm_config: Any

    def report_cache(self) -> dict[str, Any]:
        """Groups, layers, sizes in bytes and placement of this rank's KV cache."""
        config = self.model_runner.kv_cache_config
        layers = self.vllm_config.compilation_config.static_forward_context
        return {
            "rank": self.rank,
            "num_blocks": config.num_blocks,
            "block_tokens": self.vllm_config.cache_config.block_size,
            "groups": [_group(group, layers) for group in config.kv_cache_groups],
            "tensors": [
                {
                    "size": tensor.size,
                    "layers": list(tensor.layers),
                    "layer_stride": tensor.layer_stride,
                    "block_stride": tensor.block_stride,
                    "offset": tensor.offset,
                }
                for tensor in config.kv_cache_tensors
            ],
        }

    def report_geometry(self) -> dict[str, Any]:
        """What decides this rank's pages, as the running engine has it.

        ``smallest_kernel_blocks``: tokens, by attention backend. ``layout``: what the shipped
        connector found, without its layers; empty with another connector or none.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        config = self.model_runner.kv_cache_config
        layers = self.vllm_config.compilation_config.static_forward_context
        backends = (
            layer.get_attn_backend()
            for group in config.kv_cache_groups
            for layer in (layers[name] for name in group.layer_names)
            if hasattr(layer, "get_attn_backend")
        )
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        layout = getattr(getattr(connector, "_worker", None), "layout", None)
        told = layout.to_dict() if layout is not None else {}
        return {
            "rank": self.rank,
            "block_tokens": self.vllm_config.cache_config.block_size,
            "page_bytes": sorted({g.kv_cache_spec.page_size_bytes for g in config.kv_cache_groups}),
            "smallest_kernel_blocks": {
                backend.get_name(): min(
                    getattr(size, "base", size)
                    for size in backend.get_supported_kernel_block_sizes()
                )
                for backend in set(backends)
            },
            "layout": {name: value for name, value in told.items() if name != "layers"},
        }

    def report_agent(self) -> dict[str, int]:
        """What this rank's transfer agent holds, and its process's open files."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        agent = get_kv_transfer_group()._worker._agent
        return {
            "peers": len(agent._peers),
            "lists": agent._lists,
            "reads": sum(agent._reads_of_peer.values()),
            "registered": len(agent._registered),
            "files": len(os.listdir("/proc/self/fd")),
        }

    def flip_bit(self, group: str, block: str) -> str:
        """Flip the lowest bit of a page's first byte, in the first layer of a KV-cache group.

        Returns the layer's name. Needs the probe connector, which knows the tensors.
        """
        import torch
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        config = self.model_runner.kv_cache_config
        name: str = config.kv_cache_groups[int(group)].layer_names[0]
        tensor = get_kv_transfer_group()._probe_tensors[name]
        page = tensor.stride(0) * (tensor.shape[0] // config.num_blocks)
        at = (tensor.storage_offset() + int(block) * page) * tensor.element_size()
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        memory.set_(tensor.untyped_storage())[at] ^= 1
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        return name

    def report_runner(self) -> dict[str, Any]:
        """Which model runner this rank has, and whether steps are scheduled asynchronously."""
        return {
            "module": type(self.model_runner).__module__,
            "async_scheduling": bool(self.vllm_config.scheduler_config.async_scheduling),
        }


def _group(group: Any, layers: Mapping[str, Any]) -> dict[str, Any]:
    """``layers``: the modules of the model by the names of their caches."""
    spec = group.kv_cache_spec
    common = {
        "layers": list(group.layer_names),
        "block_tokens": spec.block_size,
        "page_bytes": spec.page_size_bytes,
    }
    if hasattr(spec, "shapes"):
        shapes = [list(shape) for shape in spec.shapes]
        item_bytes = [dtype.itemsize for dtype in spec.dtypes]
        return {**common, "kind": "state", "shapes": shapes, "item_bytes": item_bytes}
    return {
        **common,
        "kind": "attention",
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_size,
        "item_bytes": spec.dtype.itemsize,
        # Which CPU kernel stores keys and values, and so in what order.
        "isa": getattr(layers[group.layer_names[0]], "isa", None),
    }
