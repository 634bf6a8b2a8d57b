"""Tails by templates: the bytes of geometry's zero runs, in few grids.

Every geometry test that carries a read out compares the two as well (``geometry_reads``).
"""

from geometry_cases import Pair, pairs, request_blocks
from geometry_reads import memories, zero_ranges
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridpd_connector import tail_zeros
from hybridpd_connector.tail_zeros import Tail, TailZeros
from hybridpd_geometry import (
    AttentionFacts,
    EngineFacts,
    ModelFacts,
    RankPlacement,
    RequestBlocks,
    layout_of,
    local_zero_runs,
    plan_pair,
)

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def reference(layout, placement, tokens, blocks):
    plan = plan_pair(layout, layout, placement.rank)
    return sorted(zero_ranges(local_zero_runs(plan, tokens, RequestBlocks(blocks)), placement))


def pieces(tails):
    return sorted(piece for tail in tails for piece in tail.ranges())


@SETTINGS
@given(pair=pairs(), data=st.data(), interleaved=st.booleans())
def test_requests_in_a_row_are_the_references(pair: Pair, data, interleaved):
    """Whole spare blocks too, which an engine claims for tokens that it may guess."""
    layout = pair.destination
    for memory in memories(layout, pair.tokens, 1 << 40, interleaved):
        zeros = TailZeros(layout, memory.placement)
        for tokens in (pair.tokens, data.draw(st.integers(0, pair.tokens)), pair.tokens):
            blocks = request_blocks(data, layout, tokens, data.draw(st.integers(0, 1))).groups
            tails = zeros.of(tokens, blocks)
            assert pieces(tails) == reference(layout, memory.placement, tokens, blocks)
            for tail in tails:
                assert tail.end == max(address + length for address, length in tail.ranges())


def dense(layers, kv_heads=2):
    model = ModelFacts("dense", tuple(range(layers)), (), AttentionFacts(2, kv_heads, 4, 4), None)
    return layout_of(model, EngineFacts(1, block_size=64), "dense")


def placed(layout, bases):
    return RankPlacement(
        rank=0,
        num_blocks=4,
        region_bases=bases,
        block_strides=(layout.page_bytes,) * len(bases),
        layer_region={layer.name: layer.slot for layer in layout.layers},
    )


def test_nothing_is_zeroed_behind_a_full_block():
    layout = dense(2)
    zeros = TailZeros(layout, placed(layout, (0, 1 << 20)))
    assert zeros.of(128, ((0, 3),)) == []


def test_layers_and_heads_are_one_grid_in_whatever_order_their_regions_lie():
    layout = dense(3)
    tails = TailZeros(layout, placed(layout, (1 << 22, 1 << 21, 3 << 21))).of(60, ((1,),))
    head = layout.page_bytes // 2
    first = (1 << 21) + layout.page_bytes + 60 * head // 64
    assert tails == [Tail(first, 3, 1 << 21, 2, head, 4 * head // 64)]


def test_layers_at_odd_distances_take_a_grid_for_each_distance():
    layout = dense(4, kv_heads=1)
    bases = (0, 1 << 20, 1 << 21, 1 << 30)
    tails = TailZeros(layout, placed(layout, bases)).of(60, ((1,),))
    assert [(tail.layers, tail.runs) for tail in tails] == [(3, 1), (1, 1)]
    assert pieces(tails) == reference(layout, placed(layout, bases), 60, ((1,),))


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(tail_zeros, "MAX_CACHED_TEMPLATES", 3)
    layout = dense(2)
    placement = placed(layout, (0, 1 << 20))
    zeros = TailZeros(layout, placement)
    for tokens in (*range(1, 64), *range(1, 64)):
        assert pieces(zeros.of(tokens, ((2,),))) == reference(layout, placement, tokens, ((2,),))
        assert zeros.kept <= 3
