"""Every family at every TP pair its dimensions allow, in both directions, on real bytes.

Per pair of TP sizes: equal blocks, unequal ones, and kernel blocks smaller than logical ones on
either side, under alignments of 16, 64 and 128 tokens. The pages after the plan must be a single
engine's, section by section, and nothing else may have changed.
"""

from dataclasses import replace
from itertools import cycle, product
from typing import NamedTuple

import pytest
from geometry_cases import block_count, dealt_blocks
from geometry_families import ROWS, TP_SIZES
from geometry_reads import check_pages, memories, read_all, zero_tails
from geometry_reference import make_state
from test_geometry_numbers import FALCON, GRANITE, JAMBA, KIMI, LFM2, NANO, QWEN_NEXT

from hybridpd_geometry import (
    CARRIED,
    CacheLayout,
    EngineFacts,
    ModelFacts,
    ReadRequest,
    RequestBlocks,
    build_table,
    layout_of,
    legal_tp_sizes,
    plan_engine,
    plan_pair,
)

ALIGNMENTS = (16, 64, 128)


class Blocks(NamedTuple):
    """One side: `--block-size` in alignments, and how many kernel blocks make a block at least."""

    multiple: int = 1
    ratio: int = 1


# At A = 16 the blocks are multiples of 48 and 32 tokens, and their kernel blocks of 24 and 16, so
# that borders of either side lie inside the other's.
VARIANTS: dict[str, tuple[Blocks, Blocks]] = {
    "equal": (Blocks(), Blocks()),
    "kernel blocks on the source": (Blocks(3, ratio=2), Blocks(2)),
    "kernel blocks on the destination": (Blocks(2), Blocks(3, ratio=2)),
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


def check_read(source: CacheLayout, destination: CacheLayout, tokens: int) -> None:
    """All of `destination`'s ranks read a request and hold what a single engine would."""
    made = make_state(source, tokens, seed=tokens)
    source_blocks = dealt_blocks(source, tokens, 0)
    blocks = dealt_blocks(destination, tokens, 1)
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
    # Each variant meets each alignment in some pairs of sizes; all nine each time are too many.
    alignments = cycle(ALIGNMENTS)
    for _ in range(sum(tp_sizes) % len(ALIGNMENTS)):
        next(alignments)
    for sides, alignment in zip(VARIANTS.values(), alignments, strict=False):
        source, destination = (
            layout(model, tp, alignment, blocks) for tp, blocks in zip(tp_sizes, sides, strict=True)
        )
        tokens = 2 * max(source.block_tokens, destination.block_tokens) + alignment // 2 + 1
        check_read(source, destination, tokens)


def test_of_a_state_group_only_the_last_block_is_read() -> None:
    """Prefix caching leaves null blocks before the one that bears the state."""
    model = ROWS["gdn"].model("gdn")
    source, destination = (layout(model, tp, 16, Blocks()) for tp in (1, 2))
    plan = plan_pair(source, destination, 1)
    memory = [memories(side, 9, 1 << shift) for side, shift in ((source, 32), (destination, 40))]
    table = build_table(plan, 0, memory[1][1].placement, memory[0][0].placement)
    read = []
    for before in ((), (0, 0)):
        ids = (
            RequestBlocks(
                tuple(
                    (*before, first) if kind == "state" else (first,)
                    for first, kind in enumerate(side.group_kinds, start=1)
                )
            )
            for side in (source, destination)
        )
        request = ReadRequest(9, *ids)
        read.append((list(plan.request_runs(0, request)), table.id_runs(request)))
    assert read[0] == read[1]
    assert any(run.layer.endswith("state") for run in read[0][0])


class Side(NamedTuple):
    """One engine of a named pair: TP, the block that vLLM makes, tokens of a kernel block."""

    tp_size: int
    block_tokens: int
    kernel_tokens: int | None = None


class Named(NamedTuple):
    """A published model's dimensions on two engines."""

    model: ModelFacts
    alignment: int
    one: Side
    other: Side


NAMED = [
    Named(NANO, 16, Side(2, 2096), Side(4, 1056)),
    Named(NANO, 16, Side(2, 2096, 16), Side(4, 1056)),
    Named(NANO, 16, Side(2, 2096), Side(4, 1056, 16)),
    Named(NANO, 16, Side(1, 2096, 16), Side(8, 528, 48)),
    Named(NANO, 64, Side(2, 2112, 64), Side(4, 1088, 64)),
    Named(NANO, 128, Side(2, 2176), Side(4, 1152)),
    Named(FALCON, 16, Side(1, 1568), Side(2, 1568)),
    Named(GRANITE, 16, Side(1, 528), Side(4, 528, 16)),
    Named(QWEN_NEXT, 16, Side(1, 544), Side(4, 272)),
    Named(KIMI, 64, Side(1, 1920, 64), Side(2, 1024, 128)),
    Named(JAMBA, 16, Side(1, 80), Side(4, 80, 16)),
    Named(LFM2, 16, Side(1, 16), Side(2, 16)),
]


def named_id(case: Named) -> str:
    sides = (
        f"tp{side.tp_size}-{side.block_tokens}-{side.kernel_tokens or 'whole'}"
        for side in (case.one, case.other)
    )
    return f"{case.model.name}-a{case.alignment}-{'-'.join(sides)}"


@pytest.mark.parametrize("case", NAMED, ids=named_id)
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_published_dimensions(case: Named, back: bool) -> None:
    # One layer of each kind has the real pages; more layers of the same kind would only repeat.
    model = replace(case.model, state_layers=(0,), attention_layers=(1,))
    made = []
    for side in (case.one, case.other):
        engine = EngineFacts(
            side.tp_size,
            alignment_tokens=case.alignment,
            kernel_block_tokens=side.kernel_tokens,
        )
        assert plan_engine(model, engine).block_tokens == side.block_tokens
        made.append(layout_of(model, engine, model.name))
    source, destination = reversed(made) if back else made
    check_read(source, destination, max(layout.block_tokens for layout in made) + 19)
