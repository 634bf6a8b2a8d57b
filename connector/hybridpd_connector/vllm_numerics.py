"""What an engine was told that changes the numbers it computes, and no size of its cache.

With the model's name and revision it says which state a prompt has: a rotary base that one side
overrides, or weights that one side quantises by itself, give another one in the same bytes.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

MAX_SHOWN_CHARS = 400

TOLD = (
    "quantization",
    "quantization_config",
    "hf_overrides",
    "hf_config_path",
    "model_class_overrides",
)
"""Fields of vLLM's model configuration; those that hold nothing are left out."""

TOLD_OF_ITEMS = (
    "mm_processor_kwargs",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
)
"""The same of its part about images and other items: their names do not tell it."""

TOLD_OF_ADAPTERS = ("target_modules", "enable_tower_connector_lora")
"""The same of its part about LoRA: in which layers an adapter is used, whatever its name."""

TOLD_BY_ENVIRONMENT = (
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
)
"""Variables by which weights or inputs of layers are quantised, whatever the checkpoint says."""


def numerics_of(
    model_config: Any,
    environment: Mapping[str, str] = MappingProxyType({}),
    lora_config: Any = None,
) -> str:
    """Equal texts for engines that were told the same: ``dtype bfloat16, quantization fp8``."""
    parts = [f"dtype {str(model_config.dtype).removeprefix('torch.')}"]
    items = getattr(model_config, "multimodal_config", None)
    fields = [(model_config, name) for name in TOLD] + [(items, name) for name in TOLD_OF_ITEMS]
    fields += [(lora_config, name) for name in TOLD_OF_ADAPTERS]
    for part, field in fields:
        value = getattr(part, field, None)
        if value:
            # The order of modules says nothing.
            value = sorted(value) if field == "target_modules" else value
            parts.append(f"{field} {_shown(value)}")
    parts += _rope_factors(model_config)
    told = ((name, environment.get(name)) for name in TOLD_BY_ENVIRONMENT)
    parts += [f"{name} {value}" for name, value in told if value]
    text = ", ".join(parts)
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    return f"{text[:MAX_SHOWN_CHARS]}... ({hashlib.sha256(text.encode()).hexdigest()})"


def _rope_factors(model_config: Any) -> Iterator[str]:
    """vLLM takes the long or the short factors of a "longrope" model for all its prompts, by the
    longest that the engine takes (`Phi3LongRoPEScaledRotaryEmbedding`)."""
    text = getattr(model_config, "hf_text_config", None)
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    rope = found if isinstance(found, Mapping) else {}
    # One for all layers, or one for each kind of layer.
    for each in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
        if (each.get("rope_type") or each.get("type")) in ("longrope", "su"):
            bound = each.get("original_max_position_embeddings")
            bound = bound or getattr(text, "original_max_position_embeddings", None) or 0
            kind = "long" if model_config.max_model_len > bound else "short"
            yield f"{kind} rope factors (max_model_len up to {bound}, or above)"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(_sortable(value), sort_keys=True, separators=(",", ":"), default=_named)


def _sortable(value: object) -> object:
    """Keys as texts: JSON has no others, and numbers and texts have no order."""
    if isinstance(value, Mapping):
        return {str(key): _sortable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_sortable(item) for item in value]
    return value


def _named(value: object) -> object:
    """What is no JSON, without its place in memory, which is of one process."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    return getattr(value, "__qualname__", None) or type(value).__qualname__
