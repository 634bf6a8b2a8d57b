"""Ids and rows as arrays: equal to what counting one by one gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector.errors import StateError
from hybridpd_connector.read_tables import id_arrays, row_array, zero_ranges
from hybridpd_geometry import IdBatch, RankPlacement, Row, ZeroRun

NUMBERS = st.integers(0, 2**29)
BATCHES = st.lists(
    st.builds(
        IdBatch,
        st.just(64),
        st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=12).map(tuple),
        st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(1, 9)), min_size=1, max_size=12).map(
            tuple
        ),
    ),
    min_size=1,
    max_size=4,
)


@given(BATCHES)
def test_ids_are_the_runs_written_out(batches):
    local, remote = id_arrays(batches)
    assert local.dtype == remote.dtype == np.int32
    assert len(local) * 64 == sum(batch.bytes for batch in batches)
    assert sorted(zip(local.tolist(), remote.tolist(), strict=True)) == sorted(
        (local_base + local_unit + i, remote_base + remote_unit + i)
        for batch in batches
        for local_base, remote_base in batch.bases
        for local_unit, remote_unit, units in batch.runs
        for i in range(units)
    )


def test_the_ids_of_a_run_stay_together():
    """NIXL joins what is consecutive in the lists, in a small batch and in a large one."""
    for layers in (2, 40):
        bases = tuple((1000 * layer, 5000 + 1000 * layer) for layer in range(layers))
        local, remote = id_arrays([IdBatch(64, bases, ((3, 7, 4), (9, 2, 1)))])
        assert local[:5].tolist() == [3, 4, 5, 6, 9]
        assert remote[5:10].tolist() == [6007, 6008, 6009, 6010, 6002]


def test_a_read_of_nothing_is_an_error():
    with pytest.raises(StateError, match="id runs"):
        id_arrays([])


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
