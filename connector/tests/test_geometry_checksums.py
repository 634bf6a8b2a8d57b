"""Sums of what a rank read equal the sums of whom it read from, and nothing that is wrong passes.

Any model of the table, TP pairs, block sizes, kernel blocks, packings and prompts, on real bytes.
"""

from dataclasses import replace

import numpy as np
import pytest
from geometry_cases import Pair, pairs, request_blocks
from geometry_reference import RankMemory, make_state
from hypothesis import assume, given
from hypothesis import strategies as st
from test_geometry_laws import FEW, memories, read_all

from hybridpd_geometry import (
    AttentionFacts,
    EngineFacts,
    GeometryError,
    ModelFacts,
    RankSums,
    ReadRequest,
    RequestBlocks,
    StateFacts,
    SumPair,
    SumRequest,
    layout_of,
    plan_pair,
    row_of,
)
from hybridpd_geometry.checksums import CHUNK_WORDS, sum_bytes, weight


def rows_of(memory: RankMemory, sums: RankSums, request: SumRequest) -> list[int]:
    def read(name: str, block: int, offset: int, length: int) -> bytes:
        at = memory.page_at(memory.layout.by_name[name], block) + offset
        return memory.bytes[at : at + length].tobytes()

    row = row_of(sums, request, read)
    assert len(row) == sums.words(request.chunks)
    return row


class Read:
    """One destination rank after its read, with the rows that its sources state."""

    def __init__(self, pair: Pair, data: st.DataObject, rank: int, first_token: int = 0) -> None:
        made = make_state(pair.source, pair.tokens, seed=pair.tokens)
        sources = memories(pair.source, pair.tokens, 1 << 32)
        blocks = request_blocks(data, pair.source, pair.tokens)
        for memory in sources:
            memory.write_request(made, blocks)
        self.memory = memories(pair.destination, pair.tokens, 1 << 40)[rank]
        self.blocks = request_blocks(data, pair.destination, pair.tokens)
        read_all(sources, self.memory, ReadRequest(pair.tokens, blocks, self.blocks, first_token))
        plan = plan_pair(pair.source, pair.destination, rank)
        self.sums = SumPair(plan)
        self.request = self.sums.request(pair.tokens, self.blocks, first_token)
        stated = replace(self.request, blocks=blocks, first_chunk=0)
        self.rows = {
            rank: rows_of(sources[rank], self.sums.source, stated) for rank in plan.sources
        }
        words = {len(row) for row in self.rows.values()}
        assert words == {self.sums.source_words(self.request)}
        assert max(words) <= self.sums.source.capacity

    def differences(self) -> list[int]:
        """Words of the destination's row that are not what a source states."""
        ours = rows_of(self.memory, self.sums.destination, self.request)
        seen: list[int] = []
        wrong: list[int] = []
        for rank, theirs in self.rows.items():
            for span in self.sums.spans(rank, self.request):
                for step in range(span.words):
                    word = span.destination_word + step
                    seen.append(word)
                    if ours[word] != theirs[span.source_word + step]:
                        wrong.append(word)
        assert sorted(seen) == list(range(len(ours))), "every sum has one partner"
        return wrong


def drawn_read(pair: Pair, data: st.DataObject) -> Read:
    return Read(pair, data, data.draw(st.integers(0, pair.destination.tp_size - 1)))


@FEW
@given(pair=pairs(), data=st.data())
def test_a_right_copy_has_equal_sums(pair: Pair, data: st.DataObject) -> None:
    assert drawn_read(pair, data).differences() == []


@FEW
@given(pair=pairs(), data=st.data())
def test_any_byte_that_differs_is_found_at_its_place(pair: Pair, data: st.DataObject) -> None:
    read = drawn_read(pair, data)
    at = data.draw(st.sampled_from(np.flatnonzero(read.memory.writes).tolist()))
    read.memory.bytes[at] ^= data.draw(st.integers(1, 255))
    (word,) = read.differences()
    layout, rank = pair.destination, read.memory.placement.rank
    place = read.sums.destination.place_of(word, read.request, rank)
    layer = layout.by_name[place.layer]
    pages = [read.memory.page_at(layer, block) for block in read.blocks.groups[layer.group]]
    (page,) = [page for page in pages if page <= at < page + layout.page_bytes]
    if layer.kind == "attention":
        block = pages.index(page) * layout.block_tokens
        assert place.section == "kv"
        assert place.tokens.start < block + layout.block_tokens
        assert place.tokens.stop > block
    else:
        sections = [s for s in layer.sections if page + s.page_offset <= at]
        assert place.section == sections[-1].section.name


@FEW
@given(pair=pairs(), data=st.data())
def test_two_pages_that_changed_places_are_found(pair: Pair, data: st.DataObject) -> None:
    read = drawn_read(pair, data)
    groups = read.blocks.groups
    pages = [
        (layer.kind, read.memory.page_at(layer, block))
        for layer in pair.destination.layers
        for block in (
            groups[layer.group] if layer.kind == "attention" else groups[layer.group][-1:]
        )
    ]
    kind, first = data.draw(st.sampled_from(pages))
    others = [page for other, page in pages if other == kind and page != first]
    assume(others)
    second = data.draw(st.sampled_from(others))
    size = pair.destination.page_bytes
    held = read.memory.bytes[first : first + size].copy()
    assume(not np.array_equal(held, read.memory.bytes[second : second + size]))
    read.memory.bytes[first : first + size] = read.memory.bytes[second : second + size]
    read.memory.bytes[second : second + size] = held
    assert read.differences()


@FEW
@given(pair=pairs(), data=st.data())
def test_a_request_that_reads_other_blocks_is_found(pair: Pair, data: st.DataObject) -> None:
    read = drawn_read(pair, data)
    group = data.draw(st.integers(0, len(read.blocks.groups) - 1))
    used = {block for ids in read.blocks.groups for block in ids}
    spare = next(b for b in range(read.memory.placement.num_blocks) if b not in used)
    ids = (*read.blocks.groups[group][:-1], spare)
    groups = (*read.blocks.groups[:group], ids, *read.blocks.groups[group + 1 :])
    read.request = replace(read.request, blocks=RequestBlocks(groups))
    assert read.differences()


@FEW
@given(pair=pairs(), data=st.data())
def test_what_was_here_before_is_not_compared(pair: Pair, data: st.DataObject) -> None:
    """A local prefix of whole blocks: chunks that begin behind it are compared, no others."""
    block = pair.destination.block_tokens
    first = data.draw(st.integers(0, pair.tokens // block)) * block
    rank = data.draw(st.integers(0, pair.destination.tp_size - 1))
    read = Read(pair, data, rank, first)
    assert read.request.first_chunk * read.request.chunk_tokens >= min(first, pair.tokens)
    assert read.differences() == []


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_weights_are_odd_and_differ(first: int, second: int) -> None:
    assert weight(first) % 2 == 1
    assert weight(first) < 1 << 64
    assert (weight(first) == weight(second)) == (first == second)


@given(st.binary(min_size=1, max_size=64), st.data())
def test_two_bytes_that_changed_places_change_a_sum(data: bytes, drawn: st.DataObject) -> None:
    first, second = (drawn.draw(st.integers(0, len(data) - 1)) for _ in range(2))
    other = bytearray(data)
    other[first], other[second] = data[second], data[first]
    assert (sum_bytes(bytes(other)) == sum_bytes(data)) == (bytes(other) == data)


MODEL = ModelFacts(
    "m",
    attention_layers=(1,),
    state_layers=(0,),
    attention=AttentionFacts(query_heads=40, kv_heads=40, head_dim=4, v_head_dim=4),
    state=StateFacts("mamba2", inner=1920, heads=480, head_dim=4, state_size=4, groups=480),
)


def layout(tp_size: int):
    return layout_of(MODEL, EngineFacts(tp_size), "m")


@pytest.mark.parametrize("source_tp", [1, 2, 4, 5, 8, 10])
@pytest.mark.parametrize("destination_tp", [1, 2, 4, 8])
def test_usual_tp_sizes_cut_at_borders_of_pieces(source_tp, destination_tp):
    for rank in range(destination_tp):
        SumPair(plan_pair(layout(source_tp), layout(destination_tp), rank))


def test_tp_sizes_that_cut_pieces_are_told():
    with pytest.raises(GeometryError, match="cannot be compared"):
        SumPair(plan_pair(layout(1), layout(5), 0))


def test_long_prompts_have_longer_chunks():
    sums = RankSums(layout(1), 1)
    assert sums.heads == 40
    assert sums.chunk_tokens(1) == 16
    assert sums.chunk_tokens(16 * (CHUNK_WORDS // 40)) == 16
    long = sums.chunk_tokens(1 << 20)
    assert long % 16 == 0
    assert -(-(1 << 20) // long) * 40 <= CHUNK_WORDS
    assert sums.words(-(-(1 << 20) // long)) <= sums.capacity
