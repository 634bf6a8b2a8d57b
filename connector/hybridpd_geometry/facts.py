"""What the arithmetic starts from: the model's dimensions and the engine's settings.

Facts are plain integers and names; nothing here knows where they came from (a `config.json`, a
custom resource, or the running engine).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class StateFacts:
    """Dimensions of a recurrent or convolutional layer, over all ranks (nothing divided by TP).

    One set of names for all families; a family's row in `families.FAMILIES` says which it reads.

    `inner`         channels of the convolved input x (Mamba1, Mamba2, short conv)
    `heads`         SSM heads, or value heads of GDN and KDA
    `head_dim`      channels per head, or per value head
    `state_size`    SSM state per channel (N_s)
    `groups`        B/C groups of Mamba2
    `key_heads`, `key_head_dim`   of GDN and KDA
    `conv_kernel`   taps; the state keeps `conv_kernel - 1` (+ speculative tokens) columns
    `ssm_dtype`     the model's own wish for the temporal state; `auto` = the family's default
    """

    family: str
    inner: int = 0
    heads: int = 0
    head_dim: int = 0
    state_size: int = 0
    groups: int = 1
    key_heads: int = 0
    key_head_dim: int = 0
    conv_kernel: int = 4
    ssm_dtype: str = "auto"


@dataclass(frozen=True)
class AttentionFacts:
    """Dimensions of a full-attention layer. `latent_dim` (lora + rope) makes it MLA."""

    query_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    latent_dim: int | None = None


@dataclass(frozen=True)
class ModelFacts:
    """A model as the cache sees it.

    `attention_layers` and `state_layers` are model layer indices in ascending order; a layer that
    runs both in parallel (Falcon-H1) appears in both. Layers without a cache (MLP, MoE) in none.
    `dtype` is the model's dtype, which `auto` cache dtypes follow; for keys and values a quantised
    checkpoint may ask for its own, `kv_dtype`.
    """

    name: str
    attention_layers: tuple[int, ...]
    state_layers: tuple[int, ...]
    attention: AttentionFacts
    state: StateFacts | None
    dtype: str = "bfloat16"
    max_len: int | None = None
    vocab: int | None = None
    kv_dtype: str = "auto"


@dataclass(frozen=True)
class EngineFacts:
    """One engine's settings that change bytes.

    `block_size`           what `--block-size` asks for, in tokens; None = the platform's default
    `kernel_block_tokens`  the attention kernel's block; None = as large as the cache's block
    `alignment_tokens`     the platform's smallest block (16 on GPU, 128 on CPU); an inflated block
                           is a multiple of it
    `backend_alignment_tokens`  common multiple of all backends' smallest kernel blocks
    `packing`              a row of `packings.PACKINGS`; MLA always uses `latent`
    `conv_layout`          `DS` = (dim, state_len), `SD` = (state_len, dim)
    `spec_tokens`          draft tokens per step; widens the conv state of most families
    """

    tp_size: int
    kv_dtype: str = "auto"
    conv_dtype: str = "auto"
    ssm_dtype: str = "auto"
    block_size: int | None = None
    kernel_block_tokens: int | None = None
    alignment_tokens: int = 16
    backend_alignment_tokens: int = 1
    packing: str = "token"
    conv_layout: str = "DS"
    spec_tokens: int = 0
