"""What every tiny model is made of: sizes, one weight, and the layers that several models share.

Sizes are elements; axes are (output, input).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
class DeltaDims:
    """Gated-DeltaNet sizes of one layer, before any tensor parallelism."""

    key_heads: int
    value_heads: int
    head_dim: int

    @property
    def key_size(self) -> int:
        return self.key_heads * self.head_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True, slots=True)
class Mamba1Dims:
    """Mamba-1 sizes of one layer, before any tensor parallelism."""

    inner_size: int
    state_size: int
    step_rank: int


@dataclass(frozen=True, slots=True)
class LatentDims:
    """Sizes of one MLA layer: its cache holds ``rank + rope_dim`` elements a token."""

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class KimiDims:
    """Sizes of one KDA layer, before any tensor parallelism, and of the MLA layers beside it."""

    heads: int
    head_dim: int
    latent: LatentDims

    @property
    def inner_size(self) -> int:
        """Of each of q, k and v."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionDims:
    """Heads of one attention layer, before any tensor parallelism."""

    kv_heads: int
    query_heads: int = QUERY_HEADS
    head_dim: int = HEAD_DIM


def norm(name: str, size: int) -> Weight:
    return Weight(name, (size,), 0.1, 1.0)


def excess(name: str, size: int) -> Weight:
    """A norm of Qwen3-Next, stored as its difference from 1."""
    return Weight(name, (size,), 0.1)


def linear(name: str, outputs: int, inputs: int, gain: float = 1.0) -> Weight:
    """A matrix that maps unit-variance inputs to outputs of standard deviation ``gain``."""
    return Weight(name, (outputs, inputs), gain / inputs**0.5)


def gated_feed_forward(prefix: str) -> Iterator[Weight]:
    yield linear(f"{prefix}.gate_proj.weight", INTERMEDIATE_SIZE, HIDDEN_SIZE)
    yield linear(f"{prefix}.up_proj.weight", INTERMEDIATE_SIZE, HIDDEN_SIZE)
    yield linear(f"{prefix}.down_proj.weight", HIDDEN_SIZE, INTERMEDIATE_SIZE, 1.5)


def mamba(prefix: str, dims: MambaDims) -> Iterator[Weight]:
    projected = dims.inner_size + dims.conv_size + dims.heads
    yield linear(f"{prefix}.in_proj.weight", projected, HIDDEN_SIZE, 1.2)
    yield Weight(f"{prefix}.conv1d.weight", (dims.conv_size, 1, CONV_KERNEL), 0.8)
    yield Weight(f"{prefix}.conv1d.bias", (dims.conv_size,), 0.1)
    # exp(A_log) times dt is the decay per token: from a few tokens to a few hundred.
    yield Weight(f"{prefix}.A_log", (dims.heads,), 1.2, -2.5)
    yield Weight(f"{prefix}.D", (dims.heads,), 0.3, 0.5)
    yield Weight(f"{prefix}.dt_bias", (dims.heads,), 0.5, -1.0)
    yield norm(f"{prefix}.norm.weight", dims.inner_size)
    yield linear(f"{prefix}.out_proj.weight", HIDDEN_SIZE, dims.inner_size, 2.0)
