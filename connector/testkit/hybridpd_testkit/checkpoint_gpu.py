"""Jamba and Kimi-Linear, tiny: what their config.json adds, and their layers.

vLLM has no CPU kernels for their states. A layer letter stands for the mixer and the feed-forward
behind it, which is dense in every layer, since rounding could choose another expert: J Mamba-1 and
T attention of Jamba, K Kimi delta attention and N latent attention of Kimi-Linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridpd_testkit.checkpoint_weights import (
    CONV_KERNEL,
    HIDDEN_SIZE,
    AttentionDims,
    KimiDims,
    LatentDims,
    Mamba1Dims,
    Weight,
    gated_feed_forward,
    linear,
    norm,
)


def jamba_fields(pattern: str, dims: Mamba1Dims) -> dict[str, Any]:
    """ValueError when attention layers are not at equal distances: the config cannot say so."""
    at = [index for index, letter in enumerate(pattern) if letter == "T"]
    period = at[1] - at[0]
    if [i for i in range(len(pattern)) if i % period == at[0] % period] != at:
        raise ValueError(f"pattern: expected T at equal distances, got {pattern!r}")
    return {
        "model_type": "jamba",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attn_layer_period": period,
        "attn_layer_offset": at[0],
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": dims.state_size,
        "mamba_d_conv": CONV_KERNEL,
        "mamba_expand": dims.inner_size // HIDDEN_SIZE,
        "mamba_dt_rank": dims.step_rank,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }


def kimi_fields(pattern: str, dims: KimiDims) -> dict[str, Any]:
    kinds = {"K": "kda_layers", "N": "full_attn_layers"}
    # The published config counts layers from 1.
    layers = {
        kind: [index + 1 for index, found in enumerate(pattern) if found == letter]
        for letter, kind in kinds.items()
    }
    return {
        "model_type": "kimi_linear",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "linear_attn_config": {
            **layers,
            "num_heads": dims.heads,
            "head_dim": dims.head_dim,
            "short_conv_kernel_size": CONV_KERNEL,
        },
        "q_lora_rank": None,
        "kv_lora_rank": dims.latent.rank,
        "qk_rope_head_dim": dims.latent.rope_dim,
        "qk_nope_head_dim": dims.latent.nope_dim,
        "v_head_dim": dims.latent.value_dim,
        "mla_use_nope": True,
        # Dense up to the last layer.
        "num_experts": None,
        "first_k_dense_replace": len(pattern),
    }


def jamba_layer(
    prefix: str, letter: str, dims: Mamba1Dims, attention: AttentionDims
) -> Iterator[Weight]:
    yield norm(f"{prefix}.input_layernorm.weight", HIDDEN_SIZE)
    if letter == "J":
        yield from _mamba1(f"{prefix}.mamba", dims)
    else:
        mixer = f"{prefix}.self_attn"
        queries = attention.query_heads * attention.head_dim
        keys = attention.kv_heads * attention.head_dim
        yield linear(f"{mixer}.q_proj.weight", queries, HIDDEN_SIZE, 1.6)
        yield linear(f"{mixer}.k_proj.weight", keys, HIDDEN_SIZE, 1.6)
        yield linear(f"{mixer}.v_proj.weight", keys, HIDDEN_SIZE, 2.0)
        yield linear(f"{mixer}.o_proj.weight", HIDDEN_SIZE, queries, 1.5)
    yield norm(f"{prefix}.pre_ff_layernorm.weight", HIDDEN_SIZE)
    yield from gated_feed_forward(f"{prefix}.feed_forward")


def kimi_layer(prefix: str, letter: str, dims: KimiDims, query_heads: int) -> Iterator[Weight]:
    yield norm(f"{prefix}.input_layernorm.weight", HIDDEN_SIZE)
    if letter == "K":
        yield from _kimi_delta(f"{prefix}.self_attn", dims)
    else:
        yield from _latent(f"{prefix}.self_attn", dims.latent, query_heads)
    yield norm(f"{prefix}.post_attention_layernorm.weight", HIDDEN_SIZE)
    yield from gated_feed_forward(f"{prefix}.mlp")


def _mamba1(prefix: str, dims: Mamba1Dims) -> Iterator[Weight]:
    inner, state, rank = dims.inner_size, dims.state_size, dims.step_rank
    yield linear(f"{prefix}.in_proj.weight", 2 * inner, HIDDEN_SIZE, 1.2)
    yield Weight(f"{prefix}.conv1d.weight", (inner, 1, CONV_KERNEL), 0.8)
    yield Weight(f"{prefix}.conv1d.bias", (inner,), 0.1)
    yield linear(f"{prefix}.x_proj.weight", rank + 2 * state, inner)
    for name, size in (("dt", rank), ("b", state), ("c", state)):
        yield norm(f"{prefix}.{name}_layernorm.weight", size)
    yield linear(f"{prefix}.dt_proj.weight", inner, rank)
    yield Weight(f"{prefix}.dt_proj.bias", (inner,), 0.5, -1.0)
    # exp(A_log) times the step is the decay per token: from a few tokens to a few hundred.
    yield Weight(f"{prefix}.A_log", (inner, state), 1.2, -2.5)
    yield Weight(f"{prefix}.D", (inner,), 0.3, 0.5)
    yield linear(f"{prefix}.out_proj.weight", HIDDEN_SIZE, inner, 2.0)


def _kimi_delta(prefix: str, dims: KimiDims) -> Iterator[Weight]:
    inner = dims.inner_size
    for stream in "qkv":
        yield linear(f"{prefix}.{stream}_proj.weight", inner, HIDDEN_SIZE, 1.2)
        yield Weight(f"{prefix}.{stream}_conv1d.weight", (inner, 1, CONV_KERNEL), 0.8)
    yield linear(f"{prefix}.b_proj.weight", dims.heads, HIDDEN_SIZE)
    for gate in "fg":  # of the decay, and of the output
        yield linear(f"{prefix}.{gate}_a_proj.weight", dims.head_dim, HIDDEN_SIZE)
        yield linear(f"{prefix}.{gate}_b_proj.weight", inner, dims.head_dim)
    # exp(A_log) times softplus(f + dt_bias) is the decay per token.
    yield Weight(f"{prefix}.A_log", (1, 1, dims.heads, 1), 1.2, -2.5)
    yield Weight(f"{prefix}.dt_bias", (inner,), 0.5, -1.0)
    yield norm(f"{prefix}.o_norm.weight", dims.head_dim)
    yield linear(f"{prefix}.o_proj.weight", HIDDEN_SIZE, inner, 2.0)


def _latent(prefix: str, dims: LatentDims, heads: int) -> Iterator[Weight]:
    queries = heads * (dims.nope_dim + dims.rope_dim)
    expanded = heads * (dims.nope_dim + dims.value_dim)
    yield linear(f"{prefix}.q_proj.weight", queries, HIDDEN_SIZE, 1.6)
    yield linear(f"{prefix}.kv_a_proj_with_mqa.weight", dims.rank + dims.rope_dim, HIDDEN_SIZE, 1.6)
    yield norm(f"{prefix}.kv_a_layernorm.weight", dims.rank)
    yield linear(f"{prefix}.kv_b_proj.weight", expanded, dims.rank, 1.8)
    yield linear(f"{prefix}.o_proj.weight", HIDDEN_SIZE, heads * dims.value_dim, 3.0)
