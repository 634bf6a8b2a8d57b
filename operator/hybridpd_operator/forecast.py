"""`status.geometry`: what the spec makes of the model's caches, before anything runs."""

from collections.abc import Mapping
from typing import Any, Final

from hybridpd_geometry import (
    ATTENTION,
    CacheLayout,
    EngineGeometry,
    attention_token_bytes,
    units_per_rank,
)

#: A larger page is no forecast but nonsense in the facts, and its multiples fit no status.
MOST_PAGE_BYTES: Final = 1 << 40


def forecast(
    facts_source: str,
    geometries: Mapping[str, EngineGeometry],
    layouts: Mapping[str, CacheLayout],
    kv_blocks: Mapping[str, int],
) -> dict[str, Any]:
    """The object under `status.geometry`; roles that could not be planned are left out."""
    out: dict[str, Any] = {"factsSource": facts_source}
    for role, geometry in geometries.items():
        if geometry.page_bytes > MOST_PAGE_BYTES:
            continue
        out[role] = {
            "tensorParallelSize": geometry.tp_size,
            "blockTokens": geometry.block_tokens,
            "pageBytes": geometry.page_bytes,
            "stateBytes": geometry.state_bytes,
            "paddingBytes": geometry.padding_bytes,
        }
        if role in kv_blocks:
            out[role]["kvBlocks"] = kv_blocks[role]
    if "decode" in layouts and "decode" in out:
        out["requestStateBytes"], out["requestTokenBytes"] = read_bytes(layouts["decode"])
    return out


def read_bytes(decode: CacheLayout) -> tuple[int, int]:
    """(state bytes per request, attention bytes per prompt token) that all decode ranks read.

    A rank reads the shards it owns: real layers and real bytes, no padding. Replicated pieces are
    read by every rank that holds a copy.
    """
    state = tokens = 0
    for layer in decode.layers:
        if layer.kind == ATTENTION:
            tokens += attention_token_bytes(layer, decode.tp_size)
        else:
            state += sum(
                units_per_rank(item.section, decode.tp_size) * item.section.unit_bytes
                for item in layer.sections
            )
    return state * decode.tp_size, tokens * decode.tp_size
