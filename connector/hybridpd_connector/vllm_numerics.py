"""What an engine was told that changes the numbers it computes, and no size of its cache.

With the model's name and revision it says which state a prompt has: a rotary base that one side
overrides, or weights that one side quantises by itself, give another one in the same bytes.
"""

import dataclasses
import hashlib
import json
from typing import Any

MAX_SHOWN_CHARS = 400

TOLD = ("quantization", "quantization_config", "hf_overrides", "hf_config_path")
"""Fields of vLLM's model configuration; those that hold nothing are left out."""


def numerics_of(model_config: Any) -> str:
    """Equal texts for engines that were told the same: ``dtype bfloat16, quantization fp8``."""
    parts = [f"dtype {str(model_config.dtype).removeprefix('torch.')}"]
    for field in TOLD:
        value = getattr(model_config, field, None)
        if value:
            parts.append(f"{field} {_shown(value)}")
    text = ", ".join(parts)
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    return f"{text[:MAX_SHOWN_CHARS]}... ({hashlib.sha256(text.encode()).hexdigest()})"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_named)


def _named(value: object) -> object:
    """What is no JSON, without its place in memory, which is of one process."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    return getattr(value, "__qualname__", None) or type(value).__qualname__
