"""Geometry's closed forms as the integer arrays that the transfer agent takes.

Rows become N x 5 int64 (address, length in bytes, device, stride in bytes, count), a request's
runs of ids become N x 3 int64 (our address, the peer's, length in bytes). Nothing here grows with
the number of blocks of an engine, and a request's array holds one range per piece that is read.

Why ranges and not ids: the library joins neighbouring ids only inside a row, so that a run of
tokens in units of several sizes would be moved in several pieces, and every piece costs a post.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridpd_connector.errors import StateError
from hybridpd_geometry import IdBatch, RankPlacement, Row, ZeroRun

FEW_RUNS = 64
"""Up to here a batch is written out faster by Python than by numpy."""

Integers = NDArray[np.int64]


def row_array(rows: Sequence[Row]) -> Integers:
    """Rows of one side of a descriptor table, in id order."""
    array = np.empty((len(rows), 5), dtype=np.int64)
    for index, row in enumerate(rows):
        array[index] = (row.address, row.length, row.device_id, row.stride, row.count)
    return array


class RangeTable:
    """Where the ids of one descriptor table lie: a request's ids become ranges of addresses."""

    def __init__(self, local_rows: Sequence[Row], remote_rows: Sequence[Row]) -> None:
        self._local = _Side(local_rows)
        self._remote = _Side(remote_rows)

    def ranges(self, batches: Sequence[IdBatch]) -> Integers:
        """N x 3 (our address, the peer's address, length in bytes), as few as there can be.

        Runs that touch on both sides become one range, also across unit sizes and layers.
        """
        table = _runs(batches)
        table[:, 0] = self._local.addresses(table[:, 0])
        table[:, 1] = self._remote.addresses(table[:, 1])
        return _joined(table[table[:, 0].argsort()])


class _Side:
    """Rows of one side as arrays: the first id of each, its address and its stride in bytes."""

    def __init__(self, rows: Sequence[Row]) -> None:
        counts = np.array([row.count for row in rows], dtype=np.int64)
        self._first: Integers = np.cumsum(counts, dtype=np.int64) - counts
        self._stride = np.array([row.stride for row in rows], dtype=np.int64)
        # Where id 0 would lie, were the row long enough: fewer steps for each request.
        address = np.array([row.address for row in rows], dtype=np.int64)
        self._origin: Integers = address - self._first * self._stride

    def addresses(self, ids: Integers) -> Integers:
        """Where the pieces of these ids begin."""
        row = self._first.searchsorted(ids, "right") - 1
        return self._origin[row] + ids * self._stride[row]


def _runs(batches: Sequence[IdBatch]) -> Integers:
    """N x 3 (first local id, first remote id, bytes) of every run of consecutive ids."""
    parts: list[Integers] = []
    few: list[tuple[int, int, int]] = []
    for batch in batches:
        size = batch.unit_bytes
        if batch.descriptors <= FEW_RUNS:
            few += [
                (local_base + local_unit, remote_base + remote_unit, units * size)
                for local_base, remote_base in batch.bases
                for local_unit, remote_unit, units in batch.runs
            ]
            continue
        bases = np.array([(local, remote, 0) for local, remote in batch.bases], dtype=np.int64)
        runs = np.array(batch.runs, dtype=np.int64) * (1, 1, size)
        parts.append((bases[:, None] + runs[None]).reshape(-1, 3))
    if few:
        parts.append(np.array(few, dtype=np.int64))
    if not parts:
        raise StateError("id runs", "at least one", 0)
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _joined(table: Integers) -> Integers:
    """Ranges in order of our addresses; those that continue the one before are added to it."""
    ends = table[:-1, :2] + table[:-1, 2:]
    apart = ends != table[1:, :2]
    begins = np.ones(len(table), dtype=bool)
    np.logical_or(apart[:, 0], apart[:, 1], out=begins[1:])
    at = begins.nonzero()[0]
    if len(at) == len(table):
        return table
    joined = table[at]
    joined[:, 2] = np.add.reduceat(table[:, 2], at)
    return joined


def zero_ranges(runs: Iterable[ZeroRun], placement: RankPlacement) -> list[tuple[int, int]]:
    """(address, length in bytes) of each run on this rank."""
    ranges: list[tuple[int, int]] = []
    for run in runs:
        region = placement.layer_region[run.layer]
        base = placement.region_bases[region] + run.block * placement.block_strides[region]
        ranges.append((base + run.offset, run.length))
    return ranges
