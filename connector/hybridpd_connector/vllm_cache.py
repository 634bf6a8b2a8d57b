"""From vLLM's cache objects to a ``CacheLayout``, a ``RankPlacement``, and the memory behind them.

Two sources are read and must agree: the specifications in ``KVCacheConfig`` say where a layer's
pages should be, the registered tensors say where they are. A difference is a refusal at start,
because every later address is computed from the specifications.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hybridpd_connector.agent_api import Memory, MemoryRegion
from hybridpd_connector.metadata import GroupFacts
from hybridpd_connector.vllm_compat import (
    UnsupportedEngineError,
    check_cache_layout,
    check_conv_layout,
)
from hybridpd_connector.vllm_layers import LayerBuilder, kind_of
from hybridpd_connector.vllm_numerics import numerics_of
from hybridpd_geometry import (
    ATTENTION,
    STATE,
    WIRE_VERSION,
    CacheLayout,
    RankPlacement,
    check_layout,
    check_placement,
)


@dataclasses.dataclass(frozen=True)
class CacheMemory:
    """One rank's cache: what it holds, where, and the allocations behind it."""

    layout: CacheLayout
    placement: RankPlacement
    regions: tuple[MemoryRegion, ...]
    _bytes: tuple[torch.Tensor, ...]

    @property
    def memory(self) -> Memory:
        return self.regions[0].memory

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        """The allocations as bytes, one for each of ``regions``."""
        return self._bytes


def thread_setup(kv_caches: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    """What a new thread must run first: on a GPU, choose the device of this cache."""
    device = next(iter(kv_caches.values())).device
    if device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.set_device(device)


def transfer_groups(kv_cache_config: Any) -> tuple[tuple[int, Any], ...]:
    """(group id, group) of the groups whose content is handed over."""
    ids = getattr(kv_cache_config, "transfer_group_ids", None)
    groups = kv_cache_config.kv_cache_groups
    chosen = range(len(groups)) if ids is None else ids
    return tuple((index, groups[index]) for index in chosen)


def group_facts(kv_cache_config: Any) -> tuple[GroupFacts, ...]:
    """What the scheduler half must know of each transferable group."""
    facts: list[GroupFacts] = []
    for _, group in transfer_groups(kv_cache_config):
        spec = group.kv_cache_spec
        if kind_of(spec) == ATTENTION:
            facts.append(GroupFacts(ATTENTION, spec.block_size))
        else:
            facts.append(GroupFacts(STATE, spec.block_size, spec.num_speculative_blocks))
    return tuple(facts)


def read_cache(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    rank: int,
    versions: tuple[str, str],
) -> CacheMemory:
    """Describe and verify the cache of one rank. ``versions``: (vLLM's version, conv layout)."""
    check_cache_layout(_cache_layout_name(vllm_config, kv_cache_config))
    vllm_version, conv_layout = versions
    model = vllm_config.model_config
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    builder = LayerBuilder(vllm_config, kv_caches, conv_layout)
    layers = tuple(builder.build(group for _, group in transfer_groups(kv_cache_config)))
    check_conv_layout(conv_layout, builder.has_state, tp_size)
    layout = check_layout(
        CacheLayout(
            # What comes from an object store is named by a folder of this host's own.
            model_id=str(getattr(model, "model_weights", "") or model.model),
            revision=model.revision,
            vllm_version=vllm_version,
            wire_version=WIRE_VERSION,
            tp_size=tp_size,
            block_tokens=builder.block_tokens,
            kernel_block_tokens=builder.kernel_block_tokens,
            packing=builder.packing,
            kv_dtype=builder.kv_dtype,
            conv_dtype=builder.conv_dtype,
            ssm_dtype=builder.ssm_dtype,
            conv_layout=conv_layout,
            spec_tokens=builder.spec_tokens,
            page_bytes=builder.page_bytes,
            layers=layers,
            numerics=numerics_of(model, os.environ, getattr(vllm_config, "lora_config", None)),
        )
    )
    placement, regions, views = _place(kv_cache_config, kv_caches, layout, rank)
    return CacheMemory(layout, placement, regions, views)


def _cache_layout_name(vllm_config: Any, kv_cache_config: Any) -> str | None:
    name = getattr(kv_cache_config, "kv_cache_layout", None)
    return name or getattr(vllm_config.cache_config, "kv_cache_layout", None)


def _place(
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    layout: CacheLayout,
    rank: int,
) -> tuple[RankPlacement, tuple[MemoryRegion, ...], tuple[torch.Tensor, ...]]:
    """Where each layer's pages are: from the specifications, verified against the tensors."""
    storages: dict[int, torch.Tensor] = {}
    bases: list[tuple[int, int]] = []
    layer_region: dict[str, int] = {}
    num_blocks = kv_cache_config.num_blocks
    for spec_tensor in kv_cache_config.kv_cache_tensors:
        for position, name in enumerate(spec_tensor.layers):
            if name not in layout.by_name:
                continue
            tensor = kv_caches[name]
            storage = tensor.untyped_storage()
            storages.setdefault(storage.data_ptr(), tensor)
            base = storage.data_ptr() + spec_tensor.offset + position * spec_tensor.layer_stride
            _verify_address(name, tensor, base, spec_tensor.block_stride, num_blocks)
            key = (base, spec_tensor.block_stride)
            if key not in bases:
                bases.append(key)
            layer_region[name] = bases.index(key)
    missing = [layer.name for layer in layout.layers if layer.name not in layer_region]
    if missing:
        raise UnsupportedEngineError("KV cache tensors", f"a place for {missing[0]}", "none")
    first = next(iter(storages.values()))
    device = first.device
    memory = Memory.DRAM if device.type == "cpu" else Memory.VRAM
    device_id = device.index or 0
    regions = tuple(
        MemoryRegion(address, tensor.untyped_storage().nbytes(), device_id, memory)
        for address, tensor in storages.items()
    )
    views = tuple(
        torch.empty(0, dtype=torch.uint8, device=device).set_(tensor.untyped_storage())
        for tensor in storages.values()
    )
    placement = RankPlacement(
        rank=rank,
        num_blocks=num_blocks,
        region_bases=tuple(base for base, _ in bases),
        block_strides=tuple(stride for _, stride in bases),
        layer_region=layer_region,
        device_id=device_id,
    )
    return check_placement(placement), regions, views


def _verify_address(
    name: str, tensor: torch.Tensor, base: int, block_stride: int, num_blocks: int
) -> None:
    """``tensor`` must start at ``base`` and step by blocks (or their kernel-block parts)."""
    if tensor.data_ptr() != base:
        raise UnsupportedEngineError(f"cache of {name}", hex(base), hex(tensor.data_ptr()))
    parts, rest = divmod(tensor.shape[0], num_blocks)
    stride = tensor.stride(0) * tensor.element_size() * parts
    if rest or stride != block_stride:
        raise UnsupportedEngineError(
            f"cache of {name}",
            f"{num_blocks} blocks, {block_stride} bytes apart",
            f"{tensor.shape[0]} blocks, {stride} bytes",
        )
    end = base + (num_blocks - 1) * block_stride
    storage = tensor.untyped_storage()
    if not storage.data_ptr() <= base <= end < storage.data_ptr() + storage.nbytes():
        raise UnsupportedEngineError(f"cache of {name}", "inside its allocation", hex(end))
