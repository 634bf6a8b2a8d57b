"""State families: what a recurrent layer's page holds. A new family is one row of `FAMILIES`.

A page is [conv | temporal | padding]. The conv state is a list of *streams* side by side, each
split over ranks on its own axis; the temporal state is split by heads (Mamba1: by channels).

    family      conv streams     conv columns        temporal (per unit)
    mamba1      x                k-1                 channel: N_s
    mamba2      x | B | C        k-1 + spec          head: head_dim x N_s
    gdn         q | k | v        k-1 + spec          value head: v_dim x k_dim
    kda         q | k | v        k-1 + spec          head: d x d          (float32 by default)
    short_conv  x                k-1 + spec          none

Source: `MambaStateShapeCalculator` and `MambaStateDtypeCalculator` in vLLM
`model_executor/layers/mamba/mamba_utils.py`; stream order from each layer's conv weight.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hybridpd_geometry.dtypes import element_bytes
from hybridpd_geometry.errors import GeometryError
from hybridpd_geometry.facts import StateFacts
from hybridpd_geometry.sections import Section

TEMPORAL = "ssm"
"""Name of the temporal section in every family that has one."""


@dataclass(frozen=True)
class Stream:
    """One convolved input: `units` shards of `channels` conv channels each."""

    name: str
    units: int
    channels: int = 1
    replicates: bool = False


@dataclass(frozen=True)
class Temporal:
    """The temporal state: `units` shards of `elements` elements each."""

    units: int
    elements: int


@dataclass(frozen=True)
class Family:
    """A row of the table.

    `vllm_type`     vLLM's name of the state (`MambaSpec.mamba_type`); KDA goes by GDN's
    `needs`         fields of StateFacts that must be positive
    `widened`       whether speculative tokens add columns to the conv state
    `ssm_dtype`     dtype of the temporal state when neither model nor engine says; `auto` = conv's
    """

    vllm_type: str
    needs: tuple[str, ...]
    streams: Callable[[StateFacts], tuple[Stream, ...]]
    temporal: Callable[[StateFacts], Temporal | None]
    widened: bool = True
    ssm_dtype: str = "auto"


def _x(facts: StateFacts) -> tuple[Stream, ...]:
    return (Stream("x", facts.inner),)


def _x_b_c(facts: StateFacts) -> tuple[Stream, ...]:
    # A single group cannot be split: vLLM gives every rank a whole copy of B and C.
    replicates = facts.groups == 1
    return (
        Stream("x", facts.inner),
        Stream("B", facts.groups, facts.state_size, replicates),
        Stream("C", facts.groups, facts.state_size, replicates),
    )


def _q_k_v(facts: StateFacts) -> tuple[Stream, ...]:
    return (
        Stream("q", facts.key_heads, facts.key_head_dim),
        Stream("k", facts.key_heads, facts.key_head_dim),
        Stream("v", facts.heads, facts.head_dim),
    )


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "mamba1": Family(
            vllm_type="MAMBA1",
            needs=("inner", "state_size"),
            streams=_x,
            temporal=lambda facts: Temporal(facts.inner, facts.state_size),
            widened=False,
        ),
        "mamba2": Family(
            vllm_type="MAMBA2",
            needs=("inner", "heads", "head_dim", "state_size", "groups"),
            streams=_x_b_c,
            temporal=lambda facts: Temporal(facts.heads, facts.head_dim * facts.state_size),
        ),
        "gdn": Family(
            vllm_type="GDN_ATTN",
            needs=("heads", "head_dim", "key_heads", "key_head_dim"),
            streams=_q_k_v,
            temporal=lambda facts: Temporal(facts.heads, facts.head_dim * facts.key_head_dim),
        ),
        "kda": Family(
            vllm_type="GDN_ATTN",
            needs=("heads", "head_dim", "key_heads", "key_head_dim"),
            streams=_q_k_v,
            temporal=lambda facts: Temporal(facts.heads, facts.head_dim * facts.head_dim),
            ssm_dtype="float32",
        ),
        "short_conv": Family(
            vllm_type="SHORT_CONV",
            needs=("inner",),
            streams=_x,
            temporal=lambda _facts: None,
        ),
    }
)

CARRIED: Mapping[str, str] = MappingProxyType(
    {family: row.vllm_type for family, row in FAMILIES.items()}
)
"""Families whose states are moved, with vLLM's name of each (`MambaSpec.mamba_type`)."""

STATE_MODES = ("none", "align")
"""Values of vLLM's `--mamba-cache-mode` in which one block holds all of a request's state."""

PROMPT_DRAFTS = ("ngram", "ngram_gpu", "suffix")
"""Speculative methods that draft from the prompt itself, without a model and a cache of its own."""

SOUND_SINCE: Mapping[str, tuple[int, int]] = MappingProxyType({"gdn": (0, 31), "kda": (0, 31)})
"""The first vLLM that computes a family's prompts of one token from an empty state: 0.30 takes
them for a decode step and goes on from what an earlier request left in the block."""


def family_of(facts: StateFacts) -> Family:
    """The table row of `facts`, after checking that every dimension it needs is there."""
    row = FAMILIES.get(facts.family)
    if row is None:
        raise GeometryError(
            "state.family",
            f"one of {', '.join(FAMILIES)}",
            facts.family,
            "This kind of state layer cannot be moved between engines.",
        )
    for name in (*row.needs, "conv_kernel"):
        value: int = getattr(facts, name)
        if value < 1:
            raise GeometryError(f"state.{name}", "a positive number", value)
    return row


def conv_columns(facts: StateFacts, spec_tokens: int) -> int:
    """state_len: columns the conv state keeps per channel."""
    return facts.conv_kernel - 1 + (spec_tokens if family_of(facts).widened else 0)


def conv_sections(facts: StateFacts, conv_dtype: str, spec_tokens: int) -> tuple[Section, ...]:
    """The conv state's sections in page order (DS layout: channel-major, columns innermost)."""
    column_bytes = conv_columns(facts, spec_tokens) * element_bytes(conv_dtype, "conv_dtype")
    return tuple(
        Section(stream.name, stream.units, stream.channels * column_bytes, stream.replicates)
        for stream in family_of(facts).streams(facts)
    )


def temporal_sections(facts: StateFacts, ssm_dtype: str) -> tuple[Section, ...]:
    """The temporal state as one section, or none."""
    temporal = family_of(facts).temporal(facts)
    if temporal is None:
        return ()
    unit_bytes = temporal.elements * element_bytes(ssm_dtype, "ssm_dtype")
    return (Section(TEMPORAL, temporal.units, unit_bytes),)


def state_sections(
    facts: StateFacts, conv_dtype: str, ssm_dtype: str, spec_tokens: int = 0
) -> tuple[Section, ...]:
    """All sections of a state page in page order: conv streams, then the temporal state."""
    conv = conv_sections(facts, conv_dtype, spec_tokens)
    return conv + temporal_sections(facts, ssm_dtype)
