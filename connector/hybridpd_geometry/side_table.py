"""Rows of descriptors over one rank's memory, and what every id names.

A row is (address, length, stride, count): `count` descriptors of `length` bytes, `stride` apart.
Rows stand behind each other; a descriptor's id is its position over all rows.  Ids and
(region, block, offset, length) are in bijection, and both directions are closed form.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridpd_geometry.errors import GeometryError
from hybridpd_geometry.placement import RankPlacement, check_placement

MAX_IDS = (1 << 31) - 1
"""Descriptor ids are int32 on the wire to NIXL."""


@dataclass(frozen=True)
class Row:
    """`count` descriptors of `length` bytes from `address`, `stride` bytes apart."""

    address: int
    length: int
    stride: int
    count: int
    device_id: int


class Location(NamedTuple):
    """What an id names: `length` bytes at `offset` of the page of `block` in `region`."""

    view: str
    region: int
    block: int
    offset: int
    length: int


@dataclass(frozen=True)
class _Place:
    """A row and where it lies: region, offset of its first descriptor, blocks `stride` apart."""

    view: str
    region: int
    offset: int
    block_stride: int
    row: Row
    first: int


class SideTable:
    """The rows of one side, and ids to locations and back (a bijection)."""

    def __init__(self, placement: RankPlacement, page_bytes: int) -> None:
        self.placement = check_placement(placement)
        if min(placement.block_strides) < page_bytes:
            raise GeometryError(
                "placement.block_strides",
                f"at least a page of {page_bytes} bytes",
                min(placement.block_strides),
            )
        self.size = 0
        self._places: list[_Place] = []
        self._index: dict[tuple[int, int, int, str], int] = {}

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows, in id order."""
        return tuple(place.row for place in self._places)

    def dense(self, region: int, unit_bytes: int, content_bytes: int) -> int:
        """First id of `region` as an array of `unit_bytes`; content = real bytes of a page."""
        stride = self.placement.block_strides[region]
        extent = (self.placement.num_blocks - 1) * stride + content_bytes
        return self._add("attention", region, 0, unit_bytes, unit_bytes, extent // unit_bytes)

    def per_block(self, region: int, offset: int, length: int) -> int:
        """First id of the row with one descriptor per block: `length` bytes at `offset`."""
        stride = self.placement.block_strides[region]
        return self._add("state", region, offset, length, stride, self.placement.num_blocks)

    def _add(
        self, view: str, region: int, offset: int, length: int, stride: int, count: int
    ) -> int:
        key = (region, offset, length, view)
        if key in self._index:
            return self._places[self._index[key]].first
        placement = self.placement
        address = placement.region_bases[region] + offset
        row = Row(address, length, stride, count, placement.device_id)
        first = self.size
        self._index[key] = len(self._places)
        self._places.append(
            _Place(view, region, offset, placement.block_strides[region], row, first)
        )
        self.size += count
        if self.size > MAX_IDS:
            raise GeometryError(
                "descriptor ids",
                f"at most {MAX_IDS}",
                self.size,
                "Use larger block sizes, or more alike ones on the two sides.",
            )
        return first

    def check_blocks(self, ids: Sequence[int]) -> None:
        """Refuse block ids that this rank does not have (ids may come from a peer)."""
        if ids and not 0 <= min(ids) <= max(ids) < self.placement.num_blocks:
            bad = next(i for i in ids if not 0 <= i < self.placement.num_blocks)
            raise GeometryError(
                "block id",
                f"0..{self.placement.num_blocks - 1}",
                bad,
                f"Rank {self.placement.rank} has no such block.",
            )

    def locate(self, descriptor_id: int) -> Location:
        """The bytes that `descriptor_id` names."""
        place = self._place_of(descriptor_id)
        distance = place.offset + (descriptor_id - place.first) * place.row.stride
        block, offset = divmod(distance, place.block_stride)
        return Location(place.view, place.region, block, offset, place.row.length)

    def _place_of(self, descriptor_id: int) -> _Place:
        if not 0 <= descriptor_id < self.size:
            raise GeometryError("descriptor id", f"0..{self.size - 1}", descriptor_id)
        at = bisect_right(self._places, descriptor_id, key=lambda place: place.first) - 1
        return self._places[at]

    def address(self, descriptor_id: int) -> int:
        """Where the bytes that `descriptor_id` names begin."""
        place = self._place_of(descriptor_id)
        return place.row.address + (descriptor_id - place.first) * place.row.stride

    def identify(self, location: Location) -> int:
        """The id that names `location`; GeometryError when no row has it."""
        offset = location.offset if location.view == "state" else 0
        at = self._index.get((location.region, offset, location.length, location.view))
        if at is None:
            raise GeometryError("location", "a row of this table", location)
        place = self._places[at]
        distance = location.block * place.block_stride + location.offset - place.offset
        index, rest = divmod(distance, place.row.stride)
        if rest or not 0 <= index < place.row.count:
            raise GeometryError("location", "a descriptor of its row", location)
        return place.first + index
