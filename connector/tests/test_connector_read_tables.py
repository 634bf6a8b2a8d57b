"""Rows and ranges as arrays: equal to what counting one by one gives."""

import numpy as np
from geometry_reads import zero_ranges
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector.read_tables import joined, row_array
from hybridpd_geometry import RankPlacement, Row, ZeroRun

PIECES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=60
)


@given(PIECES)
def test_joined_ranges_are_the_pieces_and_none_continues_another(pieces):
    """Each piece begins so many units behind the one before, on either side."""
    table, ours, theirs = [], 0, 1000
    for gap, their_gap, length in pieces:
        table.append((ours + gap, theirs + their_gap, length))
        ours, theirs = ours + gap + length, theirs + their_gap + length
    found = joined(np.array(table, dtype=np.int64))
    assert found.dtype == np.int64

    def units(ranges):
        return [(a + at, b + at) for a, b, length in ranges for at in range(length)]

    assert units(found.tolist()) == units(table)
    ends = [(a + length, b + length) for a, b, length in found.tolist()]
    begins = [(a, b) for a, b, _ in found.tolist()]
    assert all(end != begin for end, begin in zip(ends[:-1], begins[1:], strict=True))


def test_ranges_that_touch_on_one_side_stay_apart():
    for table in ([[0, 0, 64], [64, 128, 64]], [[0, 0, 64], [128, 64, 64]]):
        assert joined(np.array(table, dtype=np.int64)).tolist() == table


def test_rows_in_the_agents_order():
    rows = [
        Row(address=1 << 46, length=64, stride=4096, count=7, device_id=3),
        Row(address=128, length=32, stride=32, count=1, device_id=0),
    ]
    assert row_array(rows).tolist() == [[1 << 46, 64, 3, 4096, 7], [128, 32, 0, 32, 1]]


def test_zero_ranges_are_addresses():
    placement = RankPlacement(0, 10, (1000, 9000), (100, 200), {"a": 0, "b": 1})
    runs = [ZeroRun("a", 2, 5, 7), ZeroRun("b", 3, 0, 9)]
    assert zero_ranges(runs, placement) == [(1205, 7), (9600, 9)]
