"""Every family at every TP pair its dimensions allow, in both directions, on real bytes.

Per pair of TP sizes: equal blocks, unequal ones, and kernel blocks smaller than logical ones on
either side, under alignments of 16, 64 and 128 tokens. The pages after the plan must be a single
engine's, section by section, and nothing else may have changed.
"""

from itertools import cycle, product
from typing import NamedTuple

import pytest
from geometry_cases import block_count
from geometry_families import ROWS, TP_SIZES
from geometry_reads import check_pages, memories, read_all, zero_tails
from geometry_reference import make_state

from hybridpd_geometry import (
    CARRIED,
    CacheLayout,
    EngineFacts,
    ModelFacts,
    ReadRequest,
    RequestBlocks,
    layout_of,
    legal_tp_sizes,
    plan_engine,
)

ALIGNMENTS = (16, 64, 128)


class Blocks(NamedTuple):
    """One side: `--block-size` in alignments, and how many kernel blocks make a block at least."""

    multiple: int = 1
    ratio: int = 1


VARIANTS: dict[str, tuple[Blocks, Blocks]] = {
    "equal": (Blocks(), Blocks()),
    "larger on the source, kernel blocks on the destination": (Blocks(3), Blocks(ratio=4)),
    "larger on the destination, kernel blocks on the source": (Blocks(ratio=2), Blocks(3)),
    "kernel blocks of other sizes on both": (Blocks(3, ratio=2), Blocks(2, ratio=4)),
}


def layout(model: ModelFacts, tp_size: int, alignment: int, blocks: Blocks) -> CacheLayout:
    """An engine for `model`; its block is inflated by the state as vLLM would."""
    engine = EngineFacts(
        tp_size, alignment_tokens=alignment, block_size=alignment * blocks.multiple
    )
    whole = plan_engine(model, engine).block_tokens
    kernel = EngineFacts(
        tp_size,
        alignment_tokens=alignment,
        block_size=alignment * blocks.multiple,
        kernel_block_tokens=whole // blocks.ratio,
    )
    return layout_of(model, kernel, model.name)


def consecutive(layout: CacheLayout, tokens: int, first: int) -> RequestBlocks:
    """Block ids `first`, `first + 1`, ... dealt to the groups in turn, highest first."""
    groups = []
    for kind in layout.group_kinds:
        count = -(-tokens // layout.block_tokens) if kind == "attention" else 1
        groups.append(tuple(range(first + count - 1, first - 1, -1)))
        first += count
    return RequestBlocks(tuple(groups))


def check_read(source: CacheLayout, destination: CacheLayout, tokens: int) -> None:
    """All of `destination`'s ranks read a request and hold what a single engine would."""
    made = make_state(source, tokens, seed=tokens)
    source_blocks = consecutive(source, tokens, 0)
    blocks = consecutive(destination, tokens, 1)
    assert max(map(max, blocks.groups)) < block_count(destination, tokens)
    origin = memories(source, tokens, 1 << 32)
    for memory in origin:
        memory.write_request(made, source_blocks)
    request = ReadRequest(tokens, source_blocks, blocks)
    for memory in memories(destination, tokens, 1 << 40):
        before = memory.bytes.copy()
        read_all(origin, memory, request)
        zero_tails(memory, request)
        check_pages(memory, before, made, blocks)


def test_every_carried_family_has_a_row() -> None:
    assert {row.state.family for row in ROWS.values() if row.state} == set(CARRIED)


@pytest.mark.parametrize("name", ROWS)
def test_the_rows_say_which_tp_sizes_their_dimensions_allow(name: str) -> None:
    legal = legal_tp_sizes(ROWS[name].model(name))
    assert tuple(tp for tp in TP_SIZES if tp in legal) == ROWS[name].tp_sizes


CASES = [(name, tp) for name, row in ROWS.items() for tp in product(row.tp_sizes, repeat=2)]


@pytest.mark.parametrize(("name", "tp_sizes"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_pages_equal_a_single_engines(name: str, tp_sizes: tuple[int, int]) -> None:
    model = ROWS[name].model(name)
    # Each variant meets each alignment in some pairs of sizes; all twelve each time are too many.
    alignments = cycle(ALIGNMENTS)
    for _ in range(sum(tp_sizes) % len(ALIGNMENTS)):
        next(alignments)
    for sides, alignment in zip(VARIANTS.values(), alignments, strict=False):
        source, destination = (
            layout(model, tp, alignment, blocks) for tp, blocks in zip(tp_sizes, sides, strict=True)
        )
        tokens = max(source.block_tokens, destination.block_tokens) + alignment // 2 + 1
        check_read(source, destination, tokens)
