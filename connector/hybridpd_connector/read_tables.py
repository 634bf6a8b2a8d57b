"""Geometry's closed forms as the integer arrays that the transfer agent takes.

Rows become N x 5 int64 (address, length in bytes, device, stride in bytes, count), ranges are
N x 3 int64 (our address, the peer's, length in bytes); `request_ranges` makes them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridpd_geometry import Row

Integers = NDArray[np.int64]


def row_array(rows: Sequence[Row]) -> Integers:
    """Rows of one side of a descriptor table, in id order."""
    array = np.empty((len(rows), 5), dtype=np.int64)
    for index, row in enumerate(rows):
        array[index] = (row.address, row.length, row.device_id, row.stride, row.count)
    return array


def joined(table: Integers) -> Integers:
    """Ranges (N x 3: our address, the peer's, length) in order of our addresses, as few as there
    can be: those that continue the one before on both sides are added to it."""
    ends = table[:-1, :2] + table[:-1, 2:]
    touch = ends[:, 0] == table[1:, 0]
    if not touch.any():
        return table
    touch &= ends[:, 1] == table[1:, 1]
    at = np.flatnonzero(np.concatenate(([True], ~touch)))
    found = table[at]
    found[:, 2] = np.add.reduceat(table[:, 2], at)
    return found
