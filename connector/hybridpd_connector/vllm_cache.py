"""From vLLM's cache objects to a ``CacheLayout``, a ``RankPlacement``, and memory we can zero.

Two sources are read and must agree: the specifications in ``KVCacheConfig`` say where a layer's
pages should be, the registered tensors say where they are. A difference is a refusal at start,
because every later address is computed from the specifications.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hybridpd_connector.agent_api import Memory, MemoryRegion
from hybridpd_connector.metadata import GroupFacts
from hybridpd_connector.vllm_compat import (
    UnsupportedEngineError,
    check_cache_layout,
    check_conv_layout,
)
from hybridpd_geometry import (
    CARRIED,
    WIRE_VERSION,
    CacheLayout,
    LayerGeometry,
    RankPlacement,
    StateFacts,
    attention_layer,
    canonical_dtype,
    check_layout,
    check_placement,
    element_bytes,
    facts_from_config,
    place,
    planes_of,
    state_layer,
    state_sections,
)

ATTENTION_SPECS = ("FullAttentionSpec",)
STATE_SPECS = ("MambaSpec",)
CPU_PACKINGS = {"vec": "cpu_vec", "amx": "cpu_amx"}


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

    def zero(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Zero ``(address, length in bytes)`` ranges, in order with the engine's own kernels."""
        for address, length in ranges:
            for region, view in zip(self.regions, self._bytes, strict=True):
                start = address - region.address
                if start >= 0 and start + length <= region.length_bytes:
                    view[start : start + length].zero_()
                    break
            else:
                raise UnsupportedEngineError("address to zero", "inside the cache", hex(address))


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
        if _kind(spec) == "attention":
            facts.append(GroupFacts("attention", spec.block_size))
        else:
            facts.append(GroupFacts("state", spec.block_size, spec.num_speculative_blocks))
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
    builder = _LayerBuilder(vllm_config, kv_caches, conv_layout)
    layers = tuple(builder.build(kv_cache_config))
    check_conv_layout(conv_layout, builder.has_state, tp_size)
    layout = check_layout(
        CacheLayout(
            model_id=str(model.model),
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
        )
    )
    placement, regions, views = _place(kv_cache_config, kv_caches, layout, rank)
    return CacheMemory(layout, placement, regions, views)


def _kind(spec: Any) -> str:
    name = type(spec).__name__
    if name in ATTENTION_SPECS:
        return "attention"
    if name in STATE_SPECS:
        return "state"
    raise UnsupportedEngineError(
        "KV cache group",
        "full attention or Mamba2 state",
        name,
        "this model cannot be handed over between engines yet",
    )


def _cache_layout_name(vllm_config: Any, kv_cache_config: Any) -> str | None:
    name = getattr(kv_cache_config, "kv_cache_layout", None)
    return name or getattr(vllm_config.cache_config, "kv_cache_layout", None)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _LayerBuilder:
    """Turns the groups of a cache configuration into layers, collecting the engine's settings."""

    def __init__(
        self, vllm_config: Any, kv_caches: Mapping[str, torch.Tensor], conv_layout: str
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_caches = kv_caches
        self._conv_layout = conv_layout
        self._tp_size: int = vllm_config.parallel_config.tensor_parallel_size
        self._known: dict[str, object] = {}
        self.has_state = False
        self.packing = ""
        self.kv_dtype = self.conv_dtype = self.ssm_dtype = _dtype_name(
            vllm_config.model_config.dtype
        )
        self.block_tokens = self.kernel_block_tokens = self.page_bytes = self.spec_tokens = 0

    def build(self, kv_cache_config: Any) -> Iterable[LayerGeometry]:
        for index, (_, group) in enumerate(transfer_groups(kv_cache_config)):
            spec = group.kv_cache_spec
            kind = _kind(spec)
            self._agree("page_bytes", spec.page_size_bytes)
            for slot, name in enumerate(group.layer_names):
                if name not in self._kv_caches:
                    raise UnsupportedEngineError("KV caches", f"a tensor for {name}", "none")
                if kind == "attention":
                    yield self._attention(name, index, slot, spec)
                else:
                    yield self._state(name, index, slot, spec)
        if not self.block_tokens:
            raise UnsupportedEngineError("model", "at least one full-attention layer", "none")

    def _attention(self, name: str, group: int, slot: int, spec: Any) -> LayerGeometry:
        tensor = self._kv_caches[name]
        if tensor.dim() != 4 or tensor.shape[1] != spec.num_kv_heads:
            raise UnsupportedEngineError(
                f"cache of {name}", f"(blocks, {spec.num_kv_heads}, tokens, content)", tensor.shape
            )
        self._agree("block_tokens", spec.block_size)
        self._agree("kernel_block_tokens", tensor.shape[2])
        self._agree("packing", self._packing_of(name, tensor))
        self._agree("kv_dtype", self._kv_dtype_of(spec))
        planes = planes_of(self.packing, spec.head_size, spec.head_size_v, spec.dtype.itemsize)
        content = tensor.shape[3] * tensor.element_size()
        if content != sum(plane.lanes * plane.token_bytes for plane in planes):
            raise UnsupportedEngineError(
                f"cache of {name}",
                "keys and values of one head and token side by side",
                f"{content} bytes",
                "use --kv-cache-dtype auto, or fp8 without per-token scales",
            )
        heads = self._vllm_config.model_config.get_total_num_kv_heads()
        return attention_layer(name, group, slot, heads, planes)

    def _kv_dtype_of(self, spec: Any) -> str:
        """The kinds of fp8 share one torch dtype: vLLM's setting tells them apart."""
        setting = str(self._vllm_config.cache_config.cache_dtype)
        if setting != "auto":
            name = canonical_dtype(setting, "kv_cache_dtype")
            if element_bytes(name, "kv_cache_dtype") == spec.dtype.itemsize:
                return name
        return canonical_dtype(str(spec.dtype), "kv_cache_dtype")

    def _packing_of(self, name: str, tensor: torch.Tensor) -> str:
        if tensor.device.type != "cpu":
            return "token"
        if tensor.element_size() == 1:
            raise UnsupportedEngineError(
                "kv_cache_dtype", "auto on a CPU", tensor.dtype, "fp8 needs a GPU"
            )
        layer = self._vllm_config.compilation_config.static_forward_context.get(name)
        isa = getattr(layer, "isa", None)
        packing = CPU_PACKINGS.get(isa or "")
        if packing is None:
            raise UnsupportedEngineError(
                f"CPU attention of {name}", f"one of {', '.join(CPU_PACKINGS)}", isa
            )
        return packing

    def _state(self, name: str, group: int, slot: int, spec: Any) -> LayerGeometry:
        self.has_state = True
        facts = self._state_facts(name, spec)
        conv, ssm = spec.shapes
        self.conv_dtype, self.ssm_dtype = (_dtype_name(dtype) for dtype in spec.dtypes)
        columns = conv[1] if self._conv_layout == "DS" else conv[0]
        self._agree("spec_tokens", columns - (facts.conv_kernel - 1))
        sections = place(
            state_sections(facts, self.conv_dtype, self.ssm_dtype, self.spec_tokens), self._tp_size
        )
        self._verify_state(name, spec, facts, sections)
        tensor = self._kv_caches[name]
        state_bytes = conv[0] * conv[1] * spec.dtypes[0].itemsize
        state_bytes += ssm[0] * ssm[1] * ssm[2] * spec.dtypes[1].itemsize
        if tensor.shape[-1] * tensor.element_size() != state_bytes:
            raise UnsupportedEngineError(
                f"cache of {name}", f"a state of {state_bytes} bytes", tensor.shape
            )
        return state_layer(name, group, slot, facts.family, sections)

    def _state_facts(self, name: str, spec: Any) -> StateFacts:
        config = self._vllm_config.model_config.hf_text_config.to_dict()
        facts = facts_from_config(config).state
        kind = getattr(spec.mamba_type, "name", str(spec.mamba_type))
        if facts is None or CARRIED.get(facts.family) != kind:
            raise UnsupportedEngineError(
                f"state of {name}", f"one of {', '.join(CARRIED)}", facts and facts.family
            )
        if getattr(spec, "tp_replicated", False) or len(spec.shapes) != 2:
            raise UnsupportedEngineError(
                f"state of {name}", "a conv and an SSM state, sharded over ranks", spec.shapes
            )
        return facts

    def _verify_state(self, name: str, spec: Any, facts: StateFacts, sections: Any) -> None:
        """The model's configuration and the allocated shapes must tell the same story."""
        expected = placed_end(sections, self._tp_size)
        conv, ssm = spec.shapes
        got = conv[0] * conv[1] * spec.dtypes[0].itemsize
        got += ssm[0] * ssm[1] * ssm[2] * spec.dtypes[1].itemsize
        heads = facts.heads // self._tp_size
        if got != expected or tuple(ssm) != (heads, facts.head_dim, facts.state_size):
            raise UnsupportedEngineError(
                f"state of {name}", f"{expected} bytes as its config.json says", spec.shapes
            )

    def _agree(self, field: str, value: Any) -> None:
        """All layers must share this setting: the transfer plan has one of each."""
        known = self._known.setdefault(field, value)
        if known != value:
            raise UnsupportedEngineError(field, f"{known} in every layer", value)
        setattr(self, field, value)


def placed_end(sections: Sequence[Any], tp_size: int) -> int:
    """Bytes from the page start to the end of its last section."""
    from hybridpd_geometry.sections import placed_bytes

    return placed_bytes(sections, tp_size)


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
