"""Ids and rows as arrays: equal to what counting one by one gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector.errors import StateError
from hybridpd_connector.read_tables import id_arrays, row_array, zero_ranges
from hybridpd_geometry import IdRun, RankPlacement, Row, ZeroRun

RUNS = st.lists(
    st.builds(
        IdRun, st.integers(0, 2**30), st.integers(0, 2**30), st.integers(1, 9), st.just(64)
    ),
    min_size=1,
    max_size=20,
)


@given(RUNS)
def test_ids_are_the_runs_written_out(runs):
    local, remote = id_arrays(runs)
    assert local.dtype == remote.dtype == np.int32
    assert local.tolist() == [run.local_first + i for run in runs for i in range(run.units)]
    assert remote.tolist() == [run.remote_first + i for run in runs for i in range(run.units)]


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
