"""From vLLM's KV-cache groups to the layers of a ``CacheLayout``.

Every kind of group has one reader here. A specification without a reader, or one whose allocated
tensor is not what the reader expects, is a refusal at start: a wrong layer is a wrong byte.

What a tensor looks like, in vLLM's axes (blocks, heads, tokens, content):

    attention   heads of this rank; keys and values of one head and token side by side
    latent      one head on every rank, or no head axis at all; one vector per token
    state       (blocks, 1, 1, bytes): conv state, then the temporal state where there is one
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from hybridpd_connector.vllm_compat import UnsupportedEngineError, state_type
from hybridpd_geometry import (
    ATTENTION,
    CARRIED,
    STATE,
    LayerGeometry,
    PlacedSection,
    StateFacts,
    attention_layer,
    canonical_dtype,
    element_bytes,
    facts_from_config,
    place,
    planes_of,
    state_layer,
    state_sections,
    units_per_rank,
)
from hybridpd_geometry.families import TEMPORAL

ATTENTION_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
LATENT_SPECS = ("MLAAttentionSpec",)
STATE_SPECS = ("MambaSpec",)
CPU_PACKINGS = {"vec": "cpu_vec", "amx": "cpu_amx"}
NO_TRANSFER = "this model cannot be handed over between engines yet"

# Fields of an attention specification that are set only for a cache that is not one full entry
# per token in plain rows, made of that token and those before it; and what they hold in one that
# is.
PLAIN_ATTENTION: Mapping[str, object] = {
    "sliding_window": None,
    "attention_chunk_size": None,
    "non_causal": False,  # what follows a token would change its entry, and the last one does
    "num_head_slots": None,
    "state_content_bytes": None,
    "tokens_per_state": 1,
    "model_version": None,
    "storage_block_size": None,  # up to vLLM 0.31
}

# Ways of vLLM to quantise a cache that leave rows of values alone in it: no scales beside them, and
# none that an engine makes by itself.
PLAIN_SCALES = ("NONE", "FP8_PER_TENSOR")


def kind_of(spec: Any) -> str:
    """`attention` or `state`; a group of any other kind is refused.

    Refused are sliding windows, chunks, ring buffers, host pools, mixtures, and states that vLLM
    does not shard as the geometry does, linear attention among them.
    """
    name = type(spec).__name__
    if name in ATTENTION_SPECS:
        _check_plain_attention(name, spec)
        return ATTENTION
    if name in STATE_SPECS:
        _check_sharded_state(spec)
        return STATE
    raise UnsupportedEngineError(
        "KV cache group", "full attention, latent attention or a state", name, NO_TRANSFER
    )


def _check_plain_attention(name: str, spec: Any) -> None:
    for field, plain in PLAIN_ATTENTION.items():
        value = getattr(spec, field, plain)
        if value != plain:
            raise UnsupportedEngineError(f"{name}.{field}", str(plain), value, NO_TRANSFER)
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", PLAIN_SCALES[0])
    if mode not in PLAIN_SCALES:
        raise UnsupportedEngineError(
            f"{name}.kv_quant_mode",
            " or ".join(PLAIN_SCALES),
            mode,
            "scales made at run time are not handed over: use --kv-cache-dtype bfloat16",
        )
    role = getattr(spec, "cache_role", None)
    if getattr(role, "value", "sparse") != "sparse":
        raise UnsupportedEngineError(f"{name}.cache_role", "keys and values", role, NO_TRANSFER)


def _check_sharded_state(spec: Any) -> None:
    kind = state_type(spec)
    if kind not in CARRIED.values():
        known = ", ".join(sorted(set(CARRIED.values())))
        raise UnsupportedEngineError("kind of state", f"one of {known}", kind, NO_TRANSFER)
    if getattr(spec, "tp_replicated", False) or not 1 <= len(spec.shapes) <= 2:
        raise UnsupportedEngineError(
            f"{kind} state",
            "a conv state and at most one temporal state, sharded over ranks",
            spec.shapes,
            NO_TRANSFER,
        )


def dtype_name(dtype: Any) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


class LayerBuilder:
    """Turns the groups of a cache configuration into layers, collecting the engine's settings."""

    def __init__(self, vllm_config: Any, kv_caches: Mapping[str, Any], conv_layout: str) -> None:
        self._vllm_config = vllm_config
        self._kv_caches = kv_caches
        self._conv_layout = conv_layout
        self._tp_size: int = vllm_config.parallel_config.tensor_parallel_size
        self._known: dict[str, object] = {}
        self.has_state = False
        self.packing = ""
        self.kv_dtype = self.conv_dtype = self.ssm_dtype = dtype_name(
            vllm_config.model_config.dtype
        )
        self.block_tokens = self.kernel_block_tokens = self.page_bytes = self.spec_tokens = 0

    def build(self, groups: Iterable[Any]) -> Iterable[LayerGeometry]:
        """The layers of ``groups`` in order; the settings are whole when all have been taken."""
        for index, group in enumerate(groups):
            spec = group.kv_cache_spec
            read = self._attention if kind_of(spec) == ATTENTION else self._state
            self._agree("page_bytes", spec.page_size_bytes)
            for slot, name in enumerate(group.layer_names):
                if name not in self._kv_caches:
                    raise UnsupportedEngineError("KV caches", f"a tensor for {name}", "none")
                yield read(name, index, slot, spec)
        if not self.block_tokens:
            raise UnsupportedEngineError("model", "at least one full-attention layer", "none")

    def _attention(self, name: str, group: int, slot: int, spec: Any) -> LayerGeometry:
        tensor = self._kv_caches[name]
        latent = type(spec).__name__ in LATENT_SPECS
        if latent and tensor.dim() == 3:
            tensor = tensor.unsqueeze(1)
        if tensor.dim() != 4 or tensor.shape[1] != spec.num_kv_heads:
            raise UnsupportedEngineError(
                f"cache of {name}", f"(blocks, {spec.num_kv_heads}, tokens, content)", tensor.shape
            )
        self._agree("block_tokens", spec.block_size)
        self._agree("kernel_block_tokens", tensor.shape[2])
        self._agree("packing", "latent" if latent else self._packing_of(name, tensor))
        self._agree("kv_dtype", self._kv_dtype_of(spec))
        planes = planes_of(self.packing, spec.head_size, spec.head_size_v, spec.dtype.itemsize)
        content = tensor.shape[3] * tensor.element_size()
        if content != sum(plane.lanes * plane.token_bytes for plane in planes):
            entry = "one latent vector of a token"
            raise UnsupportedEngineError(
                f"cache of {name}",
                entry if latent else "keys and values of one head and token side by side",
                f"{content} bytes",
                "use --kv-cache-dtype bfloat16",
            )
        model = self._vllm_config.model_config
        heads = spec.num_kv_heads if latent else model.get_total_num_kv_heads()
        layer = attention_layer(name, group, slot, heads, planes)
        expected = units_per_rank(layer.sections[0].section, 1 if latent else self._tp_size)
        if spec.num_kv_heads != expected:
            # Some models have layers of several kinds: reads would leave heads out.
            raise UnsupportedEngineError(
                f"KV heads of {name}", f"{expected}, as the model says", spec.num_kv_heads
            )
        return layer

    def _kv_dtype_of(self, spec: Any) -> str:
        """The kinds of fp8 share one torch dtype: vLLM's setting tells them apart."""
        setting = str(self._vllm_config.cache_config.cache_dtype)
        if setting != "auto":
            name = canonical_dtype(setting, "kv_cache_dtype")
            if element_bytes(name, "kv_cache_dtype") == spec.dtype.itemsize:
                return name
        return canonical_dtype(str(spec.dtype), "kv_cache_dtype")

    def _packing_of(self, name: str, tensor: Any) -> str:
        if tensor.device.type != "cpu":
            return "token"
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
        names = [dtype_name(dtype) for dtype in spec.dtypes]
        self._agree("conv_dtype", names[0])
        self._agree("ssm_dtype", names[-1])
        conv = spec.shapes[0]
        columns = conv[1] if self._conv_layout == "DS" else conv[0]
        self._agree("spec_tokens", columns - (facts.conv_kernel - 1))
        sections = place(
            state_sections(facts, self.conv_dtype, self.ssm_dtype, self.spec_tokens), self._tp_size
        )
        self._verify_state(name, spec, sections)
        return state_layer(name, group, slot, facts.family, sections)

    def _state_facts(self, name: str, spec: Any) -> StateFacts:
        config = self._vllm_config.model_config.hf_text_config.to_dict()
        facts = facts_from_config(config).state
        kind = state_type(spec)
        if facts is None or CARRIED.get(facts.family) != kind:
            family = facts and f"{facts.family} ({CARRIED.get(facts.family)})"
            raise UnsupportedEngineError(
                f"state of {name}", f"{kind}, as the engine allocated it", family, NO_TRANSFER
            )
        return facts

    def _verify_state(self, name: str, spec: Any, sections: tuple[PlacedSection, ...]) -> None:
        """The model's configuration, vLLM's shapes and the tensor must tell the same story."""
        wanted = [(item.section, units_per_rank(item.section, self._tp_size)) for item in sections]
        conv = sum(units * part.unit_bytes for part, units in wanted if part.name != TEMPORAL)
        expected: list[tuple[int, int | None]] = [(conv, None)]
        expected += [(u * part.unit_bytes, u) for part, u in wanted if part.name == TEMPORAL]
        sizes = [
            prod(shape) * dtype.itemsize
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        ]
        # Equal bytes with other axes would be another state: its first axis is what TP splits.
        units = [None, *(shape[0] for shape in spec.shapes[1:])]
        if list(zip(sizes, units, strict=True)) != expected:
            raise UnsupportedEngineError(
                f"state of {name}",
                f"{' + '.join(str(size) for size, _ in expected)} bytes as its config.json says",
                spec.shapes,
            )
        tensor = self._kv_caches[name]
        if tensor.shape[-1] * tensor.element_size() != sum(sizes):
            raise UnsupportedEngineError(
                f"cache of {name}", f"a state of {sum(sizes)} bytes", tensor.shape
            )

    def _agree(self, field: str, value: Any) -> None:
        """All layers must share this setting: the transfer plan has one of each."""
        known = self._known.setdefault(field, value)
        if known != value:
            raise UnsupportedEngineError(field, f"{known} in every layer", value)
        setattr(self, field, value)
