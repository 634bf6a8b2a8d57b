"""Writes docs/explanation/geometry.md: one model worked through, every number computed.

`python docs/explanation/write_geometry.py` replaces the file; a test fails while it is not current.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[2] / part) for part in ("connector", "operator")]

from hybridpd_geometry import (
    ATTENTION,
    CacheLayout,
    EngineFacts,
    ModelFacts,
    facts_from_config,
    layout_of,
    plan_engine,
    plan_pair,
    predict,
    units_per_rank,
)
from hybridpd_operator.catalogue import config_of

OUTPUT = Path(__file__).resolve().parent / "geometry.md"
MODEL_ID = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
PREFILL_TP, DECODE_TP = 2, 4
ALIGNMENT_TOKENS = 16
PROMPT_TOKENS = 3000
READER = 1

INTRODUCTION = """# The geometry of a hand-over

Written by `docs/explanation/write_geometry.py`, which asks the same code that the operator and the
connector run; a test compares this page with what it prints. The model is Nemotron-3-Nano, prefill
at TP {prefill} and decode at TP {decode}, in bfloat16, on a GPU whose smallest attention block is
{alignment} tokens.

A request leaves two kinds of things behind in an engine's cache: for every attention layer the
keys and values of its tokens, and for every state layer one state, the same size after one token
or after a million. vLLM keeps both in pages of one length, so that any block can hold either."""


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; whole numbers get thousands separators and stand right."""
    body = [[_cell(value) for value in row] for row in rows]
    names = list(head)
    numeric = [all(row[i].replace(",", "").isdigit() for row in body) for i in range(len(names))]
    lines = [names, ["--:" if right else "---" for right in numeric], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def engine(tp_size: int, alignment_tokens: int = ALIGNMENT_TOKENS) -> EngineFacts:
    return EngineFacts(tp_size, alignment_tokens=alignment_tokens)


def the_model(model: ModelFacts) -> Iterator[str]:
    state, attention = model.state, model.attention
    assert state is not None
    yield "\n## The model\n"
    yield (
        f"{len(model.state_layers)} state layers (Mamba2) and {len(model.attention_layers)} of "
        f"attention; the other layers cache nothing. A state layer has {state.heads} heads of "
        f"{state.head_dim} channels, a state of {state.state_size} per channel, {state.groups} "
        f"groups of B and C, and a convolution over {state.conv_kernel} tokens, of which "
        f"{state.conv_kernel - 1} are kept. Attention has {attention.kv_heads} KV heads of "
        f"{attention.head_dim}."
    )


def the_state(model: ModelFacts) -> Iterator[str]:
    one, two = (layout_of(model, engine(tp), MODEL_ID) for tp in (PREFILL_TP, DECODE_TP))
    layers = [next(x for x in layout.layers if x.kind != ATTENTION) for layout in (one, two)]
    yield "\n## One state, cut two ways\n"
    yield (
        "A state page is a row of *sections*. A section is a number of *units*, and TP gives every "
        "rank an equal share of the units; a unit is never cut. The bytes of a rank's section are "
        "its units times the bytes of a unit, and the sections lie one behind the other.\n"
    )
    rows = []
    for first, second in zip(layers[0].sections, layers[1].sections, strict=True):
        section = first.section
        row: list[object] = [f"`{section.name}`", section.extent, section.unit_bytes]
        for item, layout in ((first, one), (second, two)):
            units = units_per_rank(item.section, layout.tp_size)
            row += [item.page_offset, units * section.unit_bytes]
        rows.append(row)
    head = ["section", "units", "bytes of a unit"]
    for tp_size in (PREFILL_TP, DECODE_TP):
        head += [f"TP {tp_size}: from byte", f"TP {tp_size}: bytes"]
    yield table(head, rows)
    yield (
        "\n`x`, `B` and `C` are the window of the convolution (bfloat16), `ssm` the recurrent "
        "state (float32: this model asks for it)."
    )


def the_block(model: ModelFacts) -> Iterator[str]:
    planned = plan_engine(model, engine(PREFILL_TP))
    yield "\n## How long a block is\n"
    yield (
        f"At TP {PREFILL_TP} a state is S = {planned.conv_bytes:,} + {planned.ssm_bytes:,} = "
        f"{planned.state_bytes:,} bytes on a rank, and a token of one attention layer T = "
        f"{planned.token_bytes:,} bytes. vLLM makes the attention block so long that its page "
        f"holds a state: N = A * ceil(S / (A * T)) tokens, A being the smallest block of the "
        f"attention kernel. With A = {ALIGNMENT_TOKENS}: N = {planned.block_tokens:,}, a page of "
        f"N * T = {planned.page_bytes:,} bytes, and {planned.padding_bytes:,} bytes of every state "
        "page are padding. A depends on the kernel, so it is an input everywhere:\n"
    )
    rows = []
    for tp_size in (1, 2, 4, 8):
        blocks = [plan_engine(model, engine(tp_size, a)).block_tokens for a in (16, 64, 128)]
        own = plan_engine(model, engine(tp_size))
        rows.append([tp_size, *blocks, own.page_bytes, own.state_bytes, own.padding_bytes])
    head = ["TP", "N at A = 16", "N at A = 64", "N at A = 128"]
    yield table([*head, "page at A = 16", "of it state", "of it padding"], rows)
    yield (
        f"\nPrefill and decode therefore count in other blocks, {planned.block_tokens:,} and "
        f"{plan_engine(model, engine(DECODE_TP)).block_tokens:,} tokens here. They need not divide "
        "each other: attention is paired by tokens."
    )


def the_groups(model: ModelFacts) -> Iterator[str]:
    planned = plan_engine(model, engine(PREFILL_TP))
    yield "\n## Groups, regions and a place without a layer\n"
    yield (
        f"Layers that share block ids are a *group*. vLLM makes groups of about equal length and "
        f"gives each position in a group a *region*, the pages of all blocks one behind the other; "
        f"here {planned.region_count} regions.\n"
    )
    rows = [
        (number, group.kind, len(group.layers), ", ".join(map(str, group.layers)))
        for number, group in enumerate(planned.groups)
    ]
    yield table(["group", "kind", "layers", "their numbers in the model"], rows)
    yield (
        f"\n{len(planned.groups)} groups times {planned.region_count} regions are "
        f"{len(planned.groups) * planned.region_count} places for "
        f"{sum(len(group.layers) for group in planned.groups)} layers: "
        f"{planned.padding_slots} place has none. Reads go by layer, so nothing is read for it."
    )


def the_readers(model: ModelFacts) -> Iterator[str]:
    source, destination = layouts(model)
    plan = plan_pair(source, destination, READER)
    yield "\n## Who reads what\n"
    yield (
        f"Both engines cut the same units, so a decode rank reads what it and a prefill rank both "
        f"own. Rank {READER} of {DECODE_TP} reads from rank "
        f"{' and '.join(map(str, plan.sources))} of {PREFILL_TP}; runs of one state layer, "
        "neighbours joined:\n"
    )
    pair = plan.state_pairs[0]
    rows = [
        (rank, run.source_offset, run.destination_offset, run.length)
        for rank in plan.sources
        for run in plan.state_runs(rank, pair)
    ]
    yield table(["prefill rank", "from byte", "to byte", "bytes"], rows)
    yield "\nThe same for every decode rank, in bytes of one state layer:\n"
    matrix = []
    for rank in range(DECODE_TP):
        own = plan_pair(source, destination, rank)
        counts = [
            sum(run.length for run in own.state_runs(other, own.state_pairs[0]))
            if other in own.sources
            else 0
            for other in range(PREFILL_TP)
        ]
        matrix.append([rank, *counts])
    yield table(["decode rank", *(f"from prefill {r}" for r in range(PREFILL_TP))], matrix)
    heads = model.attention.kv_heads
    yield (
        f"\nAttention has {heads} KV heads: one for each prefill rank, and on decode "
        f"{DECODE_TP // heads} neighbours hold a copy of each."
    )


def the_tokens(model: ModelFacts) -> Iterator[str]:
    plan = plan_pair(*layouts(model), READER)
    yield "\n## Tokens, cut at the borders of both engines\n"
    yield f"A prompt of {PROMPT_TOKENS:,} tokens, block by block:\n"
    rows = [
        (o.source_index, o.source_token, o.destination_index, o.destination_token, o.tokens)
        for o in plan.overlaps(PROMPT_TOKENS)
    ]
    head = ["prefill block", "from its token", "decode block", "to its token", "tokens"]
    yield table(head, rows)
    yield (
        "\nWhat lies behind the last token in the last block is not read; the reader zeroes it, "
        "since a kernel may look there."
    )


def the_bill(model: ModelFacts) -> Iterator[str]:
    source, destination = layouts(model)
    plan = plan_pair(source, destination, READER)
    expected = predict(plan, PROMPT_TOKENS)
    yield "\n## What it costs\n"
    rows: list[tuple[str, int]] = [(f"`{k}`", v) for k, v in expected.by_section.items()]
    yield table(["section", "bytes"], [*rows, ("together", expected.bytes)])
    blocks = -(-PROMPT_TOKENS // destination.block_tokens)
    attention = len(plan.attention_pairs) * blocks * destination.page_bytes
    kinds = destination.group_kinds
    states = kinds.count("state") * destination.region_count * destination.page_bytes
    yield (
        f"\nThat is what rank {READER} owns of the request and no byte more, in at most "
        f"{expected.descriptors:,} descriptors. Whole pages of every region would be "
        f"{attention + states:,} bytes: {attention:,} of attention, with the unused end of the "
        f"last block, and {states:,} of states, with the padding and the place without a layer."
    )


def layouts(model: ModelFacts) -> tuple[CacheLayout, CacheLayout]:
    source, destination = (layout_of(model, engine(tp), MODEL_ID) for tp in (PREFILL_TP, DECODE_TP))
    return source, destination


def document() -> str:
    """The whole page."""
    config = config_of(MODEL_ID)
    assert config is not None
    model = facts_from_config(config)
    parts = [INTRODUCTION.format(prefill=PREFILL_TP, decode=DECODE_TP, alignment=ALIGNMENT_TOKENS)]
    for chapter in (
        the_model,
        the_state,
        the_block,
        the_groups,
        the_readers,
        the_tokens,
        the_bill,
    ):
        parts += chapter(model)
    parts.append(
        "\nHow a new kind of state is described: [add a family](../howto/add-a-family.md). Why the "
        "plan is an intersection: [decision 3](../adr/0003-partition-intersection.md)."
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(document())
