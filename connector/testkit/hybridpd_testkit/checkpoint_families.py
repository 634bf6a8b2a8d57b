"""The tiny models: their config.json and the name, shape and scale of every weight.

Dimensions are the smallest that still have every trait the transfer must get right: two groups
of B/C or one, KV heads that TP 2 splits or replicates, state layers that do not fill their last
group, P and D with different block sizes. Sizes are elements; axes are (output, input).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from hybridpd_testkit.checkpoint_gpu import jamba_fields, jamba_layer, kimi_fields, kimi_layer
from hybridpd_testkit.checkpoint_hybrids import (
    granite_fields,
    granite_layer,
    lfm2_fields,
    lfm2_layer,
    qwen_fields,
    qwen_layer,
)
from hybridpd_testkit.checkpoint_weights import (
    CONV_KERNEL,
    HEAD_DIM,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    MAX_TOKENS,
    QUERY_HEADS,
    VOCABULARY_SIZE,
    AttentionDims,
    DeltaDims,
    KimiDims,
    LatentDims,
    Mamba1Dims,
    MambaDims,
    Weight,
    excess,
    gated_feed_forward,
    linear,
    mamba,
    norm,
)

__all__ = [
    "ALL_FAMILIES",
    "FAMILIES",
    "GPU_FAMILIES",
    "HEAD_DIM",
    "HIDDEN_SIZE",
    "MAX_TOKENS",
    "QUERY_HEADS",
    "VOCABULARY_SIZE",
    "Family",
    "Weight",
    "config_of",
    "weights_of",
]

GRANITE = "GraniteMoeHybridForCausalLM"
QWEN = "Qwen3NextForCausalLM"
LFM2 = "Lfm2ForCausalLM"
JAMBA = "JambaForCausalLM"
KIMI = "KimiLinearForCausalLM"
HYBRID_LETTERS = "GADQCFJTKN"
FINAL_NORMS = {
    "NemotronHForCausalLM": "norm_f",
    "FalconH1ForCausalLM": "final_layernorm",
    LFM2: "embedding_norm",
    JAMBA: "final_layernorm",
}

_Dims = TypeVar("_Dims", MambaDims, DeltaDims, Mamba1Dims, KimiDims)


@dataclass(frozen=True, slots=True)
class Family:
    """One tiny model. ``pattern`` has a letter a layer: M Mamba, * attention, - feed-forward,
    H both in parallel (Falcon-H1), L a Llama layer, others in ``checkpoint_hybrids``. ``seed`` was
    picked so that greedy outputs vary and the best token leads the second by far more than the
    order of a sum can change in ``dtype``, which is what engines compute in."""

    name: str
    architecture: str
    pattern: str
    attention: AttentionDims
    state: MambaDims | DeltaDims | Mamba1Dims | KimiDims | None
    seed: int
    dtype: str = "float32"

    @property
    def mamba(self) -> MambaDims:
        """Sizes of the Mamba-2 layers; ValueError in a family without any."""
        return self._sizes(MambaDims, "mamba", "Mamba-2")

    @property
    def delta(self) -> DeltaDims:
        """Sizes of the Gated-DeltaNet layers; ValueError in a family without any."""
        return self._sizes(DeltaDims, "delta", "Gated-DeltaNet")

    @property
    def mamba1(self) -> Mamba1Dims:
        """Sizes of the Mamba-1 layers; ValueError in a family without any."""
        return self._sizes(Mamba1Dims, "mamba1", "Mamba-1")

    @property
    def kimi(self) -> KimiDims:
        """Sizes of the layers of Kimi-Linear; ValueError in a family without any."""
        return self._sizes(KimiDims, "kimi", "KDA")

    def _sizes(self, kind: type[_Dims], field: str, layer: str) -> _Dims:
        if not isinstance(self.state, kind):
            raise ValueError(f"{field}: family {self.name} has no sizes for a {layer} layer")
        return self.state

    @property
    def tied(self) -> bool:
        """Whether the embeddings are the output matrix too."""
        return self.architecture == LFM2


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        # Five state layers over groups of two: the last group has a padding slot.
        Family(
            "nemotron-h",
            "NemotronHForCausalLM",
            "MM*-M*MM",
            AttentionDims(2),
            MambaDims(8, 16, 32, 2),
            7,
        ),
        # One KV head (TP 2 replicates it) and a state so large that TP 1 has 256-token blocks
        # while TP 2 has 128: the two sides of a pair page differently.
        Family(
            "nemotron-h-mqa",
            "NemotronHForCausalLM",
            "M*-MM*",
            AttentionDims(1),
            MambaDims(8, 16, 64, 2),
            3,
        ),
        # One B/C group, which every rank holds whole, and one KV head.
        Family(
            "falcon-h1", "FalconH1ForCausalLM", "HHH", AttentionDims(1), MambaDims(8, 16, 32, 1), 2
        ),
        # The same kind of state in groups of its own, beside two KV heads.
        Family("granite-4-h", GRANITE, "GGAG", AttentionDims(2, 2), MambaDims(8, 16, 32, 1), 2),
        # The CPU kernel takes bfloat16 and heads of 128 only. One KV head, and blocks of 640 tokens
        # at TP 1 but 384 at TP 2: neither divides the other.
        Family(
            "qwen3-next",
            QWEN,
            "DDDQ",
            AttentionDims(1, 2, 128),
            DeltaDims(2, 4, 128),
            1,
            "bfloat16",
        ),
        # A conv state and nothing else: a page of it is nearly all padding.
        Family("lfm2", LFM2, "CCFC", AttentionDims(2, 2), None, 1),
        Family("llama", "LlamaForCausalLM", "LLL", AttentionDims(2), None, 4),
    )
}
# Families whose state vLLM computes on GPUs only; seeds are picked with transformers' models.
GPU_FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        # Heads are as wide as hidden size and their number say. The last of three groups of state
        # layers has a padding slot, and the one KV head is replicated at TP 2.
        Family("jamba", JAMBA, "JTJJJTJ", AttentionDims(1, 2), Mamba1Dims(256, 16, 16), 9),
        # The widths of latent attention are the published ones, which are constants of a kernel
        # of vLLM's, and no backend computes it in float32.
        Family(
            "kimi-linear",
            KIMI,
            "KNKNK",
            AttentionDims(4),
            KimiDims(4, 128, LatentDims(512, 64, 128, 128)),
            6,
            "bfloat16",
        ),
    )
}
ALL_FAMILIES: dict[str, Family] = {**FAMILIES, **GPU_FAMILIES}


def config_of(family: Family) -> dict[str, Any]:
    """The config.json of a family, as transformers writes it."""
    common: dict[str, Any] = {
        "architectures": [family.architecture],
        "torch_dtype": family.dtype,
        "dtype": family.dtype,
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": len(family.pattern),
        "num_attention_heads": family.attention.query_heads,
        "num_key_value_heads": family.attention.kv_heads,
        "head_dim": family.attention.head_dim,
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    if family.name in GPU_FAMILIES:  # vLLM takes other widths than this for their heads
        del common["head_dim"]
    return {**common, **_family_fields(family)}


def _family_fields(family: Family) -> dict[str, Any]:
    if family.architecture == GRANITE:
        return granite_fields(family.pattern, family.mamba, family.attention)
    if family.architecture == QWEN:
        return qwen_fields(family.pattern, family.delta)
    if family.architecture == LFM2:
        return lfm2_fields(family.pattern)
    if family.architecture == JAMBA:
        return jamba_fields(family.pattern, family.mamba1)
    if family.architecture == KIMI:
        return kimi_fields(family.pattern, family.kimi)
    if family.architecture == "LlamaForCausalLM":
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
    output_scale = 3.0 / HIDDEN_SIZE**0.5
    yield Weight(
        f"{root}.{'embeddings' if nemotron else 'embed_tokens'}.weight",
        (VOCABULARY_SIZE, HIDDEN_SIZE),
        output_scale if family.tied else 2.0 if nemotron else 1.0,
    )
    for index, letter in enumerate(family.pattern):
        yield from _layer(f"{root}.layers.{index}", letter, family)
    final_norm = f"{root}.{FINAL_NORMS.get(family.architecture, 'norm')}.weight"
    yield (excess if family.architecture == QWEN else norm)(final_norm, HIDDEN_SIZE)
    if not family.tied:
        yield Weight("lm_head.weight", (VOCABULARY_SIZE, HIDDEN_SIZE), output_scale)


def _layer(prefix: str, letter: str, family: Family) -> Iterator[Weight]:
    if letter in HYBRID_LETTERS:
        yield from _hybrid_layer(prefix, letter, family)
        return
    if letter in "M*-":
        yield norm(f"{prefix}.norm.weight", HIDDEN_SIZE)
    if letter == "M":
        yield from mamba(f"{prefix}.mixer", family.mamba)
    elif letter == "*":
        yield from _attention(f"{prefix}.mixer", family)
    elif letter == "-":
        yield linear(f"{prefix}.mixer.up_proj.weight", INTERMEDIATE_SIZE, HIDDEN_SIZE)
        yield linear(f"{prefix}.mixer.down_proj.weight", HIDDEN_SIZE, INTERMEDIATE_SIZE, 0.2)
    elif letter == "H":
        yield norm(f"{prefix}.input_layernorm.weight", HIDDEN_SIZE)
        yield from _attention(f"{prefix}.self_attn", family)
        yield from mamba(f"{prefix}.mamba", family.mamba)
        yield norm(f"{prefix}.pre_ff_layernorm.weight", HIDDEN_SIZE)
        yield from gated_feed_forward(f"{prefix}.feed_forward")
    elif letter == "L":
        yield norm(f"{prefix}.input_layernorm.weight", HIDDEN_SIZE)
        yield from _attention(f"{prefix}.self_attn", family)
        yield norm(f"{prefix}.post_attention_layernorm.weight", HIDDEN_SIZE)
        yield from gated_feed_forward(f"{prefix}.mlp")
    else:
        raise ValueError(f"pattern: expected letters of M*-HL{HYBRID_LETTERS}, got {letter!r}")


def _hybrid_layer(prefix: str, letter: str, family: Family) -> Iterator[Weight]:
    if letter in "GA":
        dims = family.mamba if letter == "G" else None
        yield from granite_layer(prefix, dims, family.attention)
    elif letter in "DQ":
        last = prefix.endswith(f".{len(family.pattern) - 1}")
        dims_of_state = family.delta if letter == "D" else None
        yield from qwen_layer(prefix, last, dims_of_state, family.attention)
    elif letter in "JT":
        yield from jamba_layer(prefix, letter, family.mamba1, family.attention)
    elif letter in "KN":
        yield from kimi_layer(prefix, letter, family.kimi, family.attention.query_heads)
    else:
        yield from lfm2_layer(prefix, letter, family.attention)


def _attention(prefix: str, family: Family) -> Iterator[Weight]:
    # Queries and keys are large so that attention is sharp: what K holds must decide the output.
    yield linear(f"{prefix}.q_proj.weight", QUERY_HEADS * HEAD_DIM, HIDDEN_SIZE, 1.6)
    yield linear(f"{prefix}.k_proj.weight", family.attention.kv_heads * HEAD_DIM, HIDDEN_SIZE, 1.6)
    yield linear(f"{prefix}.v_proj.weight", family.attention.kv_heads * HEAD_DIM, HIDDEN_SIZE, 2.0)
    yield linear(f"{prefix}.o_proj.weight", HIDDEN_SIZE, QUERY_HEADS * HEAD_DIM, 1.5)
