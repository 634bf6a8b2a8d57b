"""Geometry's closed forms as the integer arrays that the transfer agent takes.

Rows become N x 5 int64 (address, length in bytes, device, stride in bytes, count), a request's
runs of ids become two int32 arrays of equal length. Nothing here grows with the number of blocks
of an engine, and a request's arrays hold one id per piece that is read.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridpd_connector.errors import StateError
from hybridpd_geometry import IdRun, RankPlacement, Row, ZeroRun

Rows = NDArray[np.int64]
Ids = NDArray[np.int32]


def row_array(rows: Sequence[Row]) -> Rows:
    """Rows of one side of a descriptor table, in id order."""
    array = np.empty((len(rows), 5), dtype=np.int64)
    for index, row in enumerate(rows):
        array[index] = (row.address, row.length, row.device_id, row.stride, row.count)
    return array


def id_arrays(runs: Sequence[IdRun]) -> tuple[Ids, Ids]:
    """(local ids, remote ids): the i-th remote piece is read into the i-th local one."""
    if not runs:
        raise StateError("id runs", "at least one", 0)
    first = np.array([(run.local_first, run.remote_first) for run in runs], dtype=np.int64)
    counts = np.array([run.units for run in runs], dtype=np.int64)
    ends = np.cumsum(counts)
    # Position of each id inside its own run.
    inside = np.arange(ends[-1], dtype=np.int64) - np.repeat(ends - counts, counts)
    ids = np.repeat(first, counts, axis=0) + inside[:, None]
    return (
        np.ascontiguousarray(ids[:, 0], dtype=np.int32),
        np.ascontiguousarray(ids[:, 1], dtype=np.int32),
    )


def zero_ranges(runs: Iterable[ZeroRun], placement: RankPlacement) -> list[tuple[int, int]]:
    """(address, length in bytes) of each run on this rank."""
    ranges: list[tuple[int, int]] = []
    for run in runs:
        region = placement.layer_region[run.layer]
        base = placement.region_bases[region] + run.block * placement.block_strides[region]
        ranges.append((base + run.offset, run.length))
    return ranges
