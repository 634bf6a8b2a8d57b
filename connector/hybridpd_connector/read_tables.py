"""Geometry's closed forms as the integer arrays that the transfer agent takes.

Rows become N x 5 int64 (address, length in bytes, device, stride in bytes, count), a request's
runs of ids become two int32 arrays of equal length. Nothing here grows with the number of blocks
of an engine, and a request's arrays hold one id per piece that is read.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridpd_connector.errors import StateError
from hybridpd_geometry import IdBatch, RankPlacement, Row, ZeroRun

FEW_RUNS = 64
"""Up to here a batch is written out faster by Python than by numpy."""

Rows = NDArray[np.int64]
Ids = NDArray[np.int32]


def row_array(rows: Sequence[Row]) -> Rows:
    """Rows of one side of a descriptor table, in id order."""
    array = np.empty((len(rows), 5), dtype=np.int64)
    for index, row in enumerate(rows):
        array[index] = (row.address, row.length, row.device_id, row.stride, row.count)
    return array


def id_arrays(batches: Sequence[IdBatch]) -> tuple[Ids, Ids]:
    """(local ids, remote ids): the i-th remote piece is read into the i-th local one."""
    parts: list[NDArray[np.int64]] = []
    few: list[tuple[int, int, int]] = []
    for batch in batches:
        if batch.descriptors <= FEW_RUNS:
            few.extend(
                (local_base + local_unit, remote_base + remote_unit, units)
                for local_base, remote_base in batch.bases
                for local_unit, remote_unit, units in batch.runs
            )
            continue
        bases = np.array([(local, remote, 0) for local, remote in batch.bases], dtype=np.int64)
        runs = np.array(batch.runs, dtype=np.int64)
        parts.append((bases[:, None] + runs[None]).reshape(-1, 3))
    if few:
        parts.append(np.array(few, dtype=np.int64))
    if not parts:
        raise StateError("id runs", "at least one", 0)
    table = np.concatenate(parts)
    units = table[:, 2]
    ends = np.cumsum(units)
    # Position of each id inside its own run.
    inside = np.arange(ends[-1], dtype=np.int64) - np.repeat(ends - units, units)
    ids = np.repeat(table[:, :2], units, axis=0) + inside[:, None]
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
