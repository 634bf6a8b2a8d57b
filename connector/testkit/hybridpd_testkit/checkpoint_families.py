"""The tiny models: their config.json and the name, shape and scale of every weight.

Dimensions are the smallest that still have every trait the transfer must get right: two groups
of B/C or one, KV heads that TP 2 splits or replicates, state layers that do not fill their last
group, P and D with different block sizes. Sizes are elements; axes are (output, input).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

VOCABULARY_SIZE = 512
MAX_TOKENS = 4096
HIDDEN_SIZE = 64
INTERMEDIATE_SIZE = 128
QUERY_HEADS = 4
HEAD_DIM = 32  # the smallest that vLLM's CPU attention accepts
CONV_KERNEL = 4


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor: random normal values times ``scale`` plus ``offset`` (or uniform in a range)."""

    name: str
    shape: tuple[int, ...]
    scale: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class MambaDims:
    """Mamba-2 sizes of one layer, before any tensor parallelism."""

    heads: int
    head_dim: int
    state_size: int
    groups: int

    @property
    def inner_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner_size + 2 * self.groups * self.state_size


@dataclass(frozen=True, slots=True)
class Family:
    """One tiny model. ``pattern`` has a letter a layer: M Mamba, * attention, - feed-forward,
    H both in parallel (Falcon-H1), L a Llama layer. ``seed`` was picked so that greedy outputs vary
    and the best token leads the second by far more than the order of a float32 sum can change."""

    name: str
    architecture: str
    pattern: str
    kv_heads: int
    mamba: MambaDims | None
    seed: int


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        # Five state layers over groups of two: the last group has a padding slot.
        Family("nemotron-h", "NemotronHForCausalLM", "MM*-M*MM", 2, MambaDims(8, 16, 32, 2), 7),
        # One KV head (TP 2 replicates it) and a state so large that TP 1 has 256-token blocks
        # while TP 2 has 128: the two sides of a pair page differently.
        Family("nemotron-h-mqa", "NemotronHForCausalLM", "M*-MM*", 1, MambaDims(8, 16, 64, 2), 3),
        # One B/C group, which every rank holds whole, and one KV head.
        Family("falcon-h1", "FalconH1ForCausalLM", "HHH", 1, MambaDims(8, 16, 32, 1), 2),
        Family("llama", "LlamaForCausalLM", "LLL", 2, None, 4),
    )
}


def config_of(family: Family) -> dict[str, Any]:
    """The config.json of a family, as transformers writes it."""
    common: dict[str, Any] = {
        "architectures": [family.architecture],
        "torch_dtype": "float32",
        "dtype": "float32",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": len(family.pattern),
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": family.kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    return {**common, **_family_fields(family)}


def _family_fields(family: Family) -> dict[str, Any]:
    if family.mamba is None:
        return {
            "model_type": "llama",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
        }
    dims = family.mamba
    if family.architecture == "FalconH1ForCausalLM":
        return {
            "model_type": "falcon_h1",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "mamba_d_ssm": dims.inner_size,
            "mamba_n_heads": dims.heads,
            "mamba_d_head": dims.head_dim,
            "mamba_n_groups": dims.groups,
            "mamba_d_state": dims.state_size,
            "mamba_d_conv": CONV_KERNEL,
            "mamba_chunk_size": 128,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        }
    return {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": family.pattern,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": dims.heads,
        "mamba_head_dim": dims.head_dim,
        "ssm_state_size": dims.state_size,
        "n_groups": dims.groups,
        "conv_kernel": CONV_KERNEL,
        "chunk_size": 128,
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_ssm_cache_dtype": "float32",
        "mamba_hidden_act": "silu",
    }


def weights_of(family: Family) -> Iterator[Weight]:
    """Every tensor of the checkpoint, in a fixed order."""
    nemotron = family.architecture == "NemotronHForCausalLM"
    root = "backbone" if nemotron else "model"
    yield Weight(
        f"{root}.{'embeddings' if nemotron else 'embed_tokens'}.weight",
        (VOCABULARY_SIZE, HIDDEN_SIZE),
        2.0 if nemotron else 1.0,
    )
    for index, letter in enumerate(family.pattern):
        yield from _layer(f"{root}.layers.{index}", letter, family)
    final_norm = {"NemotronHForCausalLM": "norm_f", "FalconH1ForCausalLM": "final_layernorm"}
    yield _norm(f"{root}.{final_norm.get(family.architecture, 'norm')}.weight", HIDDEN_SIZE)
    yield Weight("lm_head.weight", (VOCABULARY_SIZE, HIDDEN_SIZE), 3.0 / HIDDEN_SIZE**0.5)


def _layer(prefix: str, letter: str, family: Family) -> Iterator[Weight]:
    if letter in "M*-":
        yield _norm(f"{prefix}.norm.weight", HIDDEN_SIZE)
    if letter == "M":
        yield from _mamba(f"{prefix}.mixer", family)
    elif letter == "*":
        yield from _attention(f"{prefix}.mixer", family)
    elif letter == "-":
        yield _linear(f"{prefix}.mixer.up_proj.weight", INTERMEDIATE_SIZE, HIDDEN_SIZE)
        yield _linear(f"{prefix}.mixer.down_proj.weight", HIDDEN_SIZE, INTERMEDIATE_SIZE, 0.2)
    elif letter == "H":
        yield _norm(f"{prefix}.input_layernorm.weight", HIDDEN_SIZE)
        yield from _attention(f"{prefix}.self_attn", family)
        yield from _mamba(f"{prefix}.mamba", family)
        yield _norm(f"{prefix}.pre_ff_layernorm.weight", HIDDEN_SIZE)
        yield from _gated_feed_forward(f"{prefix}.feed_forward")
    elif letter == "L":
        yield _norm(f"{prefix}.input_layernorm.weight", HIDDEN_SIZE)
        yield from _attention(f"{prefix}.self_attn", family)
        yield _norm(f"{prefix}.post_attention_layernorm.weight", HIDDEN_SIZE)
        yield from _gated_feed_forward(f"{prefix}.mlp")
    else:
        raise ValueError(f"pattern: expected letters of M*-HL, got {letter!r}")


def _norm(name: str, size: int) -> Weight:
    return Weight(name, (size,), 0.1, 1.0)


def _linear(name: str, outputs: int, inputs: int, gain: float = 1.0) -> Weight:
    """A matrix that maps unit-variance inputs to outputs of standard deviation ``gain``."""
    return Weight(name, (outputs, inputs), gain / inputs**0.5)


def _attention(prefix: str, family: Family) -> Iterator[Weight]:
    # Queries and keys are large so that attention is sharp: what K holds must decide the output.
    yield _linear(f"{prefix}.q_proj.weight", QUERY_HEADS * HEAD_DIM, HIDDEN_SIZE, 1.6)
    yield _linear(f"{prefix}.k_proj.weight", family.kv_heads * HEAD_DIM, HIDDEN_SIZE, 1.6)
    yield _linear(f"{prefix}.v_proj.weight", family.kv_heads * HEAD_DIM, HIDDEN_SIZE, 2.0)
    yield _linear(f"{prefix}.o_proj.weight", HIDDEN_SIZE, QUERY_HEADS * HEAD_DIM, 1.5)


def _gated_feed_forward(prefix: str) -> Iterator[Weight]:
    yield _linear(f"{prefix}.gate_proj.weight", INTERMEDIATE_SIZE, HIDDEN_SIZE)
    yield _linear(f"{prefix}.up_proj.weight", INTERMEDIATE_SIZE, HIDDEN_SIZE)
    yield _linear(f"{prefix}.down_proj.weight", HIDDEN_SIZE, INTERMEDIATE_SIZE, 1.5)


def _mamba(prefix: str, family: Family) -> Iterator[Weight]:
    dims = family.mamba
    if dims is None:
        raise ValueError(f"mamba: family {family.name} has a state layer but no dimensions for it")
    projected = dims.inner_size + dims.conv_size + dims.heads
    yield _linear(f"{prefix}.in_proj.weight", projected, HIDDEN_SIZE, 1.2)
    yield Weight(f"{prefix}.conv1d.weight", (dims.conv_size, 1, CONV_KERNEL), 0.8)
    yield Weight(f"{prefix}.conv1d.bias", (dims.conv_size,), 0.1)
    # exp(A_log) times dt is the decay per token: from a few tokens to a few hundred.
    yield Weight(f"{prefix}.A_log", (dims.heads,), 1.2, -2.5)
    yield Weight(f"{prefix}.D", (dims.heads,), 0.3, 0.5)
    yield Weight(f"{prefix}.dt_bias", (dims.heads,), 0.5, -1.0)
    yield _norm(f"{prefix}.norm.weight", dims.inner_size)
    yield _linear(f"{prefix}.out_proj.weight", HIDDEN_SIZE, dims.inner_size, 2.0)
