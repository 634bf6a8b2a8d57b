"""Granite-4-H, Qwen3-Next and LFM2, tiny: what their config.json adds, and their layers.

A layer letter stands for the mixer and the feed-forward behind it: G Mamba-2 and A attention of
Granite-4-H, D Gated DeltaNet and Q gated attention of Qwen3-Next, C short convolution and F
attention of LFM2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridpd_testkit.checkpoint_weights import (
    CONV_KERNEL,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    AttentionDims,
    DeltaDims,
    MambaDims,
    Weight,
    excess,
    gated_feed_forward,
    linear,
    mamba,
    norm,
)

SHORT_CONV_KERNEL = 3
# All experts are always chosen: no rounding can choose another one.
EXPERTS = 2
EXPERT_SIZE = 64
_LAYER_KINDS = {
    "G": "mamba",
    "A": "attention",
    "D": "linear_attention",
    "Q": "full_attention",
    "C": "conv",
    "F": "full_attention",
}


def layer_types(pattern: str) -> list[str]:
    """The kinds of layers in the words of the published config.json."""
    return [_LAYER_KINDS[letter] for letter in pattern]


def granite_fields(pattern: str, dims: MambaDims, attention: AttentionDims) -> dict[str, Any]:
    return {
        "model_type": "granitemoehybrid",
        "layer_types": layer_types(pattern),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "attention_multiplier": attention.head_dim**-0.5,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": INTERMEDIATE_SIZE,
        "position_embedding_type": "nope",
        "mamba_n_heads": dims.heads,
        "mamba_d_head": dims.head_dim,
        "mamba_n_groups": dims.groups,
        "mamba_d_state": dims.state_size,
        "mamba_d_conv": CONV_KERNEL,
        "mamba_expand": dims.inner_size // HIDDEN_SIZE,
        "mamba_chunk_size": 128,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }


def qwen_fields(pattern: str, dims: DeltaDims) -> dict[str, Any]:
    layers = len(pattern)
    return {
        "model_type": "qwen3_next",
        "layer_types": layer_types(pattern),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "attention_bias": False,
        "linear_num_key_heads": dims.key_heads,
        "linear_num_value_heads": dims.value_heads,
        "linear_key_head_dim": dims.head_dim,
        "linear_value_head_dim": dims.head_dim,
        "linear_conv_kernel_dim": CONV_KERNEL,
        # vLLM wants experts in one layer at least; the others are dense.
        "mlp_only_layers": list(range(layers - 1)),
        "decoder_sparse_step": 1,
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS,
        "norm_topk_prob": True,
        "moe_intermediate_size": EXPERT_SIZE,
        "shared_expert_intermediate_size": EXPERT_SIZE,
    }


def lfm2_fields(pattern: str) -> dict[str, Any]:
    return {
        "model_type": "lfm2",
        "layer_types": layer_types(pattern),
        "norm_eps": 1e-5,
        # No dimension is rotated: LFM2's queries have an axis of heads, which vLLM's CPU rotation
        # takes for tokens, so that tokens would depend on TP size and on how a prompt is cut.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1 / 64,
        },
        "conv_L_cache": SHORT_CONV_KERNEL,
        "conv_bias": False,
        "conv_dim": HIDDEN_SIZE,
        "block_dim": HIDDEN_SIZE,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "tie_word_embeddings": True,
    }


def granite_layer(
    prefix: str, dims: MambaDims | None, attention: AttentionDims
) -> Iterator[Weight]:
    """``dims`` None is an attention layer."""
    yield norm(f"{prefix}.input_layernorm.weight", HIDDEN_SIZE)
    if dims is not None:
        yield from mamba(f"{prefix}.mamba", dims)
    else:
        yield from _projections(f"{prefix}.self_attn", attention)
        yield _output(f"{prefix}.self_attn.o_proj.weight", attention)
    yield norm(f"{prefix}.post_attention_layernorm.weight", HIDDEN_SIZE)
    feed = f"{prefix}.shared_mlp"
    yield linear(f"{feed}.input_linear.weight", 2 * INTERMEDIATE_SIZE, HIDDEN_SIZE)
    yield linear(f"{feed}.output_linear.weight", HIDDEN_SIZE, INTERMEDIATE_SIZE, 1.5)


def qwen_layer(
    prefix: str, last: bool, dims: DeltaDims | None, attention: AttentionDims
) -> Iterator[Weight]:
    """``dims`` None is an attention layer, ``last`` the layer with experts."""
    yield excess(f"{prefix}.input_layernorm.weight", HIDDEN_SIZE)
    if dims is not None:
        yield from _delta_net(f"{prefix}.linear_attn", dims)
    else:
        mixer = f"{prefix}.self_attn"
        yield from _projections(mixer, attention, gate=True)
        for side in ("q_norm", "k_norm"):
            yield Weight(f"{mixer}.{side}.weight", (attention.head_dim,), 0.1, 0.5)
        # The gate halves it, and three delta nets come before: attention must still decide tokens.
        yield _output(f"{mixer}.o_proj.weight", attention, 4.0)
    yield excess(f"{prefix}.post_attention_layernorm.weight", HIDDEN_SIZE)
    if last:
        yield from _experts(f"{prefix}.mlp")
    else:
        yield from gated_feed_forward(f"{prefix}.mlp")


def lfm2_layer(prefix: str, letter: str, attention: AttentionDims) -> Iterator[Weight]:
    yield norm(f"{prefix}.operator_norm.weight", HIDDEN_SIZE)
    if letter == "C":
        mixer = f"{prefix}.conv"
        yield linear(f"{mixer}.in_proj.weight", 3 * HIDDEN_SIZE, HIDDEN_SIZE, 1.2)
        yield Weight(f"{mixer}.conv.weight", (HIDDEN_SIZE, 1, SHORT_CONV_KERNEL), 0.8)
        yield linear(f"{mixer}.out_proj.weight", HIDDEN_SIZE, HIDDEN_SIZE, 2.0)
    else:
        mixer = f"{prefix}.self_attn"
        yield from _projections(mixer, attention)
        for side in ("q_layernorm", "k_layernorm"):
            yield Weight(f"{mixer}.{side}.weight", (attention.head_dim,), 0.1, 1.5)
        yield _output(f"{mixer}.out_proj.weight", attention)
    yield norm(f"{prefix}.ffn_norm.weight", HIDDEN_SIZE)
    feed = f"{prefix}.feed_forward"
    yield linear(f"{feed}.w1.weight", INTERMEDIATE_SIZE, HIDDEN_SIZE)
    yield linear(f"{feed}.w3.weight", INTERMEDIATE_SIZE, HIDDEN_SIZE)
    yield linear(f"{feed}.w2.weight", HIDDEN_SIZE, INTERMEDIATE_SIZE, 1.5)


def _projections(prefix: str, attention: AttentionDims, gate: bool = False) -> Iterator[Weight]:
    """Queries (with a gate of the same size behind each head's), keys and values."""
    queries = attention.query_heads * attention.head_dim * (2 if gate else 1)
    keys = attention.kv_heads * attention.head_dim
    yield linear(f"{prefix}.q_proj.weight", queries, HIDDEN_SIZE, 1.6)
    yield linear(f"{prefix}.k_proj.weight", keys, HIDDEN_SIZE, 1.6)
    yield linear(f"{prefix}.v_proj.weight", keys, HIDDEN_SIZE, 2.0)


def _output(name: str, attention: AttentionDims, gain: float = 1.5) -> Weight:
    return linear(name, HIDDEN_SIZE, attention.query_heads * attention.head_dim, gain)


def _delta_net(prefix: str, dims: DeltaDims) -> Iterator[Weight]:
    yield linear(
        f"{prefix}.in_proj_qkvz.weight", dims.conv_size + dims.value_size, HIDDEN_SIZE, 1.2
    )
    yield linear(f"{prefix}.in_proj_ba.weight", 2 * dims.value_heads, HIDDEN_SIZE)
    yield Weight(f"{prefix}.conv1d.weight", (dims.conv_size, 1, CONV_KERNEL), 0.8)
    # exp(A_log) times softplus(a + dt_bias) is the decay per token.
    yield Weight(f"{prefix}.A_log", (dims.value_heads,), 1.2, -2.5)
    yield Weight(f"{prefix}.dt_bias", (dims.value_heads,), 0.5, -1.0)
    yield norm(f"{prefix}.norm.weight", dims.head_dim)
    yield linear(f"{prefix}.out_proj.weight", HIDDEN_SIZE, dims.value_size, 2.0)


def _experts(prefix: str) -> Iterator[Weight]:
    yield linear(f"{prefix}.gate.weight", EXPERTS, HIDDEN_SIZE)
    yield linear(f"{prefix}.shared_expert_gate.weight", 1, HIDDEN_SIZE)
    for expert in (*(f"experts.{index}" for index in range(EXPERTS)), "shared_expert"):
        name = f"{prefix}.{expert}"
        yield linear(f"{name}.gate_proj.weight", EXPERT_SIZE, HIDDEN_SIZE)
        yield linear(f"{name}.up_proj.weight", EXPERT_SIZE, HIDDEN_SIZE)
        yield linear(f"{name}.down_proj.weight", HIDDEN_SIZE, EXPERT_SIZE, 1.5)
