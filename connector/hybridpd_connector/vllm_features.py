"""Features of vLLM that a hand-over breaks, or is broken by, where one switch tells.

vLLM refuses some of them itself beside connectors that it knows by name; ours is not one of them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PARTIAL_HITS = "prefix_match_unit"

# Field of vLLM's configuration -> what is wrong, and the way out.
FEATURES: Mapping[str, str] = MappingProxyType(
    {
        "enable_fault_tolerance": "what the ranks say in a step that fails is lost, and blocks "
        "would be held for ever: remove --enable-fault-tolerance",
        "enable_elastic_ep": "no test has shown hand-overs while ranks come and go: remove "
        "--enable-elastic-ep",
        "enable_return_routed_experts": "those of loaded tokens are not handed over: remove "
        "--enable-return-routed-experts",
        PARTIAL_HITS: "vLLM itself is wrong with it on a CPU, with a connector or without, and no "
        "test has shown its tokens right on a GPU: remove --prefix-match-unit",
        "is_diffusion": "the state of a prompt changes with what follows it: this model cannot be "
        "handed over between engines",
    }
)


def features_of(vllm_config: Any, *, has_state: bool) -> tuple[str, ...]:
    """Those of ``FEATURES`` that are on. ``has_state``: the model is no dense one."""
    parts = [
        getattr(vllm_config, name, None)
        for name in ("parallel_config", "model_config", "aux_output_config")
    ]
    on = [name for name in FEATURES if any(_is_on(part, name) for part in parts)]
    cache = getattr(vllm_config, "cache_config", None)
    unit = getattr(cache, PARTIAL_HITS, None)
    if has_state and unit is not None and getattr(cache, "enable_prefix_caching", False):
        # States are then copied and kept inside of blocks.
        on.append(PARTIAL_HITS)
    return tuple(on)


def _is_on(part: Any, name: str) -> bool:
    return part is not None and getattr(part, name, False) is True
