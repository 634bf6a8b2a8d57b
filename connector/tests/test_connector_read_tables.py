"""Rows and ranges as arrays: equal to what counting one by one gives."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpd_connector.errors import StateError
from hybridpd_connector.read_tables import RangeTable, row_array, zero_ranges
from hybridpd_geometry import IdBatch, RankPlacement, Row, ZeroRun

ROWS = st.lists(
    st.builds(
        Row,
        address=st.integers(0, 2**46),
        length=st.just(64),
        stride=st.sampled_from([64, 64, 4096]),
        count=st.integers(30, 60),
        device_id=st.just(0),
    ),
    min_size=1,
    max_size=5,
)


@st.composite
def reads(draw):
    """Rows of both sides, and batches whose runs stay inside dense rows of them."""
    sides = draw(ROWS), draw(ROWS)
    places = []
    for rows in sides:
        firsts = [sum(row.count for row in rows[:at]) for at in range(len(rows))]
        places.append(list(zip(firsts, rows, strict=True)))
    batches = []
    for _ in range(draw(st.integers(1, 4))):
        (here, local), (there, remote) = (draw(st.sampled_from(side)) for side in places)
        dense = local.stride == remote.stride == 64
        runs = draw(
            st.lists(
                st.tuples(
                    st.integers(0, 20), st.integers(0, 20), st.integers(1, 9 if dense else 1)
                ),
                min_size=1,
                max_size=90,
            )
        )
        batches.append(IdBatch(64, ((here, there),), tuple(runs)))
    return (*sides, batches)


def address(rows, number):
    """Where a descriptor begins, found by counting."""
    for row in rows:
        if number < row.count:
            return row.address + number * row.stride
        number -= row.count
    raise AssertionError(number)


@settings(deadline=None)
@given(reads())
def test_ranges_are_the_runs_written_out(read):
    local_rows, remote_rows, batches = read
    table = RangeTable(local_rows, remote_rows).ranges(batches)
    assert table.dtype == np.int64
    pieces = sorted(
        (
            address(local_rows, local_base + local_unit + at),
            address(remote_rows, remote_base + remote_unit + at),
        )
        for batch in batches
        for local_base, remote_base in batch.bases
        for local_unit, remote_unit, units in batch.runs
        for at in range(units)
    )
    assert (
        sorted(
            (ours + at, theirs + at)
            for ours, theirs, length in table.tolist()
            for at in range(0, length, 64)
        )
        == pieces
    )
    assert table[:, 2].sum() == sum(batch.bytes for batch in batches)


def test_runs_that_touch_on_both_sides_are_one_range():
    """Units of two sizes over the same memory, as for the last tokens of a request."""
    large = Row(address=4096, length=256, stride=256, count=16, device_id=0)
    small = Row(address=4096, length=64, stride=64, count=64, device_id=0)
    table = RangeTable([large, small], [large, small])
    # Bytes 256-768 in large units, 768-832 and 896-960 in small ones.
    batches = [
        IdBatch(64, ((16, 16),), ((12, 12, 1), (14, 14, 1))),
        IdBatch(256, ((0, 0),), ((1, 1, 2),)),
    ]
    assert table.ranges(batches).tolist() == [
        [4096 + 256, 4096 + 256, 576],
        [4096 + 896, 4096 + 896, 64],
    ]


def test_runs_that_touch_on_one_side_stay_apart():
    row = Row(address=0, length=64, stride=64, count=64, device_id=0)
    batches = [IdBatch(64, ((0, 0),), ((0, 0, 1), (1, 2, 1)))]
    assert len(RangeTable([row], [row]).ranges(batches)) == 2


def test_many_layers_at_once_give_the_same():
    rows = [Row(1 << 20 + at, 64, 64, 100, 0) for at in range(6)]
    bases = tuple((100 * at, 100 * at) for at in range(6))
    runs = tuple((at, at, 1) for at in range(0, 60, 2))
    table = RangeTable(rows, rows)
    each = [table.ranges([IdBatch(64, (base,), runs)]).tolist() for base in bases]
    assert table.ranges([IdBatch(64, bases, runs)]).tolist() == [r for rows in each for r in rows]


def test_a_read_of_nothing_is_an_error():
    with pytest.raises(StateError, match="id runs"):
        RangeTable([Row(0, 64, 64, 4, 0)], [Row(0, 64, 64, 4, 0)]).ranges([])


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
