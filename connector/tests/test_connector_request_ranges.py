"""Ranges by templates: the reference's ranges, for any pair of engines and any requests in a row.

Every geometry test that carries a read out compares the two as well (``geometry_reads``): all
families, TP pairs, block sizes and first tokens.
"""

from unittest import mock

import pytest
from geometry_cases import Pair, block_count, dealt_blocks, pairs, request_blocks
from geometry_reads import memories
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridpd_connector import request_ranges
from hybridpd_connector.errors import StateError
from hybridpd_connector.request_ranges import FEW_PIECES, RequestRanges
from hybridpd_geometry import (
    AttentionFacts,
    EngineFacts,
    GeometryError,
    ModelFacts,
    ReadRequest,
    RequestBlocks,
    build_table,
    layout_of,
    plan_pair,
)

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def tables(pair: Pair, interleaved: bool):
    """The descriptor tables of every rank of the destination and each of its sources."""
    source = memories(pair.source, pair.tokens, 1 << 32, interleaved)
    for memory in memories(pair.destination, pair.tokens, 1 << 40, interleaved):
        plan = plan_pair(pair.source, pair.destination, memory.placement.rank)
        for rank in plan.sources:
            yield build_table(plan, rank, memory.placement, source[rank].placement)


@SETTINGS
@given(
    pair=pairs(),
    data=st.data(),
    interleaved=st.booleans(),
    few=st.sampled_from([0, 20, FEW_PIECES]),
)
def test_requests_in_a_row_are_the_references(pair, data, interleaved, few):
    """Templates that an earlier request has left behind serve the later ones, and stay as they
    are; some cuts written out by Python and some by numpy."""
    requests = []
    for _ in range(3):
        tokens = data.draw(st.integers(1, pair.tokens))
        requests.append(
            ReadRequest(
                tokens,
                request_blocks(data, pair.source, tokens, data.draw(st.integers(0, 1))),
                request_blocks(data, pair.destination, tokens),
                16 * data.draw(st.integers(0, tokens // 16)),
            )
        )
    with mock.patch.object(request_ranges, "FEW_PIECES", few):
        for table in tables(pair, interleaved):
            ranges = RequestRanges(table)
            for request in [*requests, requests[0]]:
                expected = table.ranges(request)
                if expected:
                    found, size = ranges.of(request)
                    assert [tuple(map(int, piece)) for piece in found] == expected
                    assert size == sum(length for _, _, length in expected)
                else:
                    with pytest.raises(StateError):
                        ranges.of(request)


@SETTINGS
@given(pair=pairs(), data=st.data())
def test_ids_that_do_not_exist_are_refused_as_by_the_reference(pair, data):
    """Never an address: a peer's ids would otherwise choose what is read, and what is written."""
    most = block_count(pair.source, pair.tokens), block_count(pair.destination, pair.tokens)
    sides = [dealt_blocks(layout, pair.tokens, 0) for layout in (pair.source, pair.destination)]
    at = data.draw(st.integers(0, 1))
    group = data.draw(st.integers(0, len(sides[at].groups) - 1))
    wrong = data.draw(
        st.one_of(
            st.just(()),
            st.tuples(st.sampled_from([-1, -(1 << 70), most[at], 1 << 31, 1 << 70])),
        )
    )
    bad = list(sides[at].groups)
    bad[group] = (*bad[group][: len(bad[group]) - 1], *wrong)
    sides[at] = RequestBlocks(tuple(bad))
    request = ReadRequest(pair.tokens, *sides)
    for table in tables(pair, interleaved=False):
        with pytest.raises(GeometryError) as expected:
            table.ranges(request)
        with pytest.raises(GeometryError) as found:
            RequestRanges(table).of(request)
        assert str(found.value) == str(expected.value)


def test_what_is_kept_is_bounded(monkeypatch):
    """Prompts that each end at another token leave a template behind, up to a number of pieces."""
    monkeypatch.setattr(request_ranges, "MAX_KEPT_PIECES", 10)
    model = ModelFacts("dense", (0, 1), (), AttentionFacts(2, 2, 2, 2), None)
    layout = layout_of(model, EngineFacts(1, block_size=64), "dense")
    pair = Pair(model, layout, layout, 70)
    (table,) = tables(pair, interleaved=False)
    ranges = RequestRanges(table)
    for tokens in range(1, 70):
        blocks = dealt_blocks(layout, tokens, 0)
        request = ReadRequest(tokens, blocks, blocks)
        assert ranges.of(request).ranges == table.ranges(request)
        assert ranges.pieces_kept <= 10
    assert ranges.pieces_kept > 0
