"""How many bytes of a GPU each engine takes, and whether all fit beside each other.

vLLM is told a fixed cache for each engine (`--kv-cache-memory-bytes`), since measuring what is free
fails while neighbours start. So somebody must add up: weights by the model's shapes, a cache for
the sequences that an engine is to run, and what an engine takes beside (`ENGINE_BYTES`).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridpd_geometry import EngineFacts, facts_from_config, plan_engine

# CUDA's context, graphs, workspaces and activations of at most 4,096 tokens: a guess, from above.
ENGINE_BYTES = 2_200_000_000
GPU_BYTES = 143_771 << 20  # what nvidia-smi tells of an H200
KEPT_SHARE = 0.04  # never planned with
STEP_TOKENS = 4096
PARAMETER_BYTES = 2
SPARE_SEQUENCES = 8  # vLLM's null block, and requests on their way
# Attention of a page is cut at multiples of it; on GPUs.
ALIGNMENT_TOKENS = 16


@dataclass(frozen=True)
class Share:
    """What one engine takes of the GPU, in bytes."""

    name: str
    weights: int
    cache: int
    beside: int = ENGINE_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.beside


def weights_bytes(config: Mapping[str, Any]) -> int:
    """Of a model with the letters of Nemotron-H, in 16-bit numbers; norms and biases left out."""
    hidden = config["hidden_size"]
    heads = config["mamba_num_heads"]
    inner = heads * config["mamba_head_dim"]
    shared = config["n_groups"] * config["ssm_state_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key_value = 2 * config["num_key_value_heads"] * config["head_dim"]
    expert = 2 * hidden * config["moe_intermediate_size"]
    always = 2 * hidden * config["moe_shared_expert_intermediate_size"]
    experts = config["n_routed_experts"]
    of_layer = {
        "M": hidden * (2 * inner + 2 * shared + heads) + inner * hidden,
        "*": hidden * (query + key_value) + query * hidden,
        "E": experts * expert + always + experts * hidden,
        "-": 2 * hidden * config["intermediate_size"],
    }
    layers = sum(of_layer[letter] for letter in config["hybrid_override_pattern"])
    return PARAMETER_BYTES * (layers + 2 * config["vocab_size"] * hidden)


def cache_bytes(config: Mapping[str, Any], sequences: int, tokens: int) -> int:
    """A cache that holds so many sequences of so many tokens at once, at TP 1."""
    plan = plan_engine(facts_from_config(config), EngineFacts(1, alignment_tokens=ALIGNMENT_TOKENS))
    blocks = sum(
        -(-tokens // plan.block_tokens) if group.kind == "attention" else 1 for group in plan.groups
    )
    whole = (sequences + SPARE_SEQUENCES) * blocks
    return whole * plan.region_count * plan.page_bytes


def too_much(shares: Sequence[Share], gpu_bytes: int) -> str:
    """Why these engines do not fit on one GPU; "" when they do."""
    usable = int(gpu_bytes * (1 - KEPT_SHARE))
    wanted = sum(share.total for share in shares)
    if wanted <= usable:
        return ""
    largest = max(shares, key=lambda share: share.total)
    return (
        f"{len(shares)} engines want {wanted / 1e9:.1f} GB, {usable / 1e9:.1f} GB of "
        f"{gpu_bytes / 1e9:.1f} may be used: fewer engines or clients, or a smaller model "
        f"({largest.name} alone takes {largest.total / 1e9:.1f})"
    )


def used_mib() -> dict[str, str]:
    """MiB that each process has of the GPUs, and all together, as nvidia-smi tells; empty where
    there is none."""
    found = {}
    for what, keys in (("compute-apps", "pid,used_memory"), ("gpu", "name,memory.used")):
        query = ["nvidia-smi", f"--query-{what}={keys}", "--format=csv,noheader,nounits"]
        try:
            lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            continue
        found |= dict(re.findall(r"^(.*), *(.*)$", lines, re.MULTILINE))
    return found


def gpu_bytes() -> int:
    """Memory of the first GPU, in bytes; that of an H200 where there is none to ask."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        return int(found.split()[0]) << 20
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return GPU_BYTES
