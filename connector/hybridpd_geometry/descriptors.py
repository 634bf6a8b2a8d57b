"""Descriptor tables: every piece of memory a pair of ranks can move, in closed form.

A row is (address, length, stride, count): `count` descriptors of `length` bytes, `stride` apart.
Rows stand behind each other; a descriptor's id is its position over all rows.  Both ranks of a pair
have such a table, a request is two equally long lists of ids, and the i-th id of one side is
read into the i-th of the other.  The tables do not grow with the number of blocks.

First come the attention rows: per region and unit size, the region as a dense array of units
(stride = length), so that NIXL itself joins consecutive ids into one descriptor.  There are up
to three unit sizes: `coarse` for whole overlaps of blocks (the page itself when both sides agree),
`fine` for the last tokens, and one in between that keeps the number of ids small.
Then the state rows: per region and run of the plan one row with one descriptor per block.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from hybridpd_geometry.errors import GeometryError
from hybridpd_geometry.placement import RankPlacement, check_placement
from hybridpd_geometry.read_plan import LayerPair, PairPlan, ReadRequest
from hybridpd_geometry.sharding import Run
from hybridpd_geometry.token_runs import TokenPairing

MAX_IDS = (1 << 31) - 1
"""Descriptor ids are int32 on the wire to NIXL."""
MIDDLE_UNITS = 64


@dataclass(frozen=True)
class Row:
    """`count` descriptors of `length` bytes from `address`, `stride` bytes apart."""

    address: int
    length: int
    stride: int
    count: int
    device_id: int


class IdRun(NamedTuple):
    """`units` consecutive ids on both sides, each of `unit_bytes`, inside one dense row.

    NIXL joins them, so one IdRun is one descriptor moved.
    """

    local_first: int
    remote_first: int
    units: int
    unit_bytes: int


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

    def __init__(self, placement: RankPlacement) -> None:
        self.placement = check_placement(placement)
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

    def locate(self, descriptor_id: int) -> Location:
        """The bytes that `descriptor_id` names."""
        if not 0 <= descriptor_id < self.size:
            raise GeometryError("descriptor id", f"0..{self.size - 1}", descriptor_id)
        at = bisect_right(self._places, descriptor_id, key=lambda place: place.first) - 1
        place = self._places[at]
        distance = place.offset + (descriptor_id - place.first) * place.row.stride
        block, offset = divmod(distance, place.block_stride)
        return Location(place.view, place.region, block, offset, place.row.length)

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


@dataclass(frozen=True)
class _Level:
    """A unit size and how many of its units lie between two blocks on each side."""

    unit_bytes: int
    local_step: int
    remote_step: int


@dataclass(frozen=True)
class _Batch:
    """Attention layers that share block ids, pairing and strides on both sides.

    `bases[level]` = for each layer the first local and remote id of its region at that level.
    """

    pair: LayerPair
    pairing: TokenPairing
    levels: tuple[_Level, ...]
    bases: tuple[tuple[tuple[int, int], ...], ...]


class _Piece(NamedTuple):
    """Part of a run in units of one level, relative to the two blocks."""

    level: int
    local_unit: int
    remote_unit: int
    units: int


@dataclass(frozen=True)
class _StateRows:
    """A state layer and its rows: (local first id, remote first id, bytes)."""

    pair: LayerPair
    rows: tuple[tuple[int, int, int], ...]


class DescriptorTable:
    """Both sides' rows for one destination rank and one source rank, and a request's ids."""

    def __init__(
        self, plan: PairPlan, source_rank: int, local: RankPlacement, remote: RankPlacement
    ) -> None:
        self.plan = plan
        self.source_rank = source_rank
        self._local = SideTable(local)
        self._remote = SideTable(remote)
        self._pieces: dict[tuple[int, Run], tuple[_Piece, ...]] = {}
        self._batches = tuple(self._build_attention())
        self._states = tuple(self._build_states())

    @property
    def local_rows(self) -> tuple[Row, ...]:
        """Rows over the destination rank's memory."""
        return self._local.rows

    @property
    def remote_rows(self) -> tuple[Row, ...]:
        """Rows over the source rank's memory."""
        return self._remote.rows

    def locate_local(self, descriptor_id: int) -> Location:
        """What a local id names."""
        return self._local.locate(descriptor_id)

    def locate_remote(self, descriptor_id: int) -> Location:
        """What a remote id names."""
        return self._remote.locate(descriptor_id)

    def local_id(self, location: Location) -> int:
        """The local id of a location."""
        return self._local.identify(location)

    def remote_id(self, location: Location) -> int:
        """The remote id of a location."""
        return self._remote.identify(location)

    def id_runs(self, request: ReadRequest) -> list[IdRun]:
        """The ids of a request, joined as NIXL joins them: one IdRun = one descriptor moved."""
        self.plan.check_request(request)
        runs: list[IdRun] = []
        for number, batch in enumerate(self._batches):
            relative = self._relative_runs(number, batch, request)
            for layer in range(len(batch.bases[0])):
                for level, local_unit, remote_unit, units in relative:
                    local_base, remote_base = batch.bases[level][layer]
                    runs.append(
                        IdRun(
                            local_base + local_unit,
                            remote_base + remote_unit,
                            units,
                            batch.levels[level].unit_bytes,
                        )
                    )
        for state in self._states:
            local_block = self._block(
                request.destination.groups[state.pair.destination.group][-1], self._local
            )
            remote_block = self._block(
                request.source.groups[state.pair.source.group][-1], self._remote
            )
            runs.extend(
                IdRun(local_first + local_block, remote_first + remote_block, 1, length)
                for local_first, remote_first, length in state.rows
            )
        return runs

    def _relative_runs(self, number: int, batch: _Batch, request: ReadRequest) -> list[_Piece]:
        """Ids of one batch relative to a region's first id, the same for all its layers."""
        local_ids = request.destination.groups[batch.pair.destination.group]
        remote_ids = request.source.groups[batch.pair.source.group]
        found: list[_Piece] = []
        for overlap in self.plan.overlaps(request.tokens, request.first_token):
            local_block = self._block(local_ids[overlap.destination_index], self._local)
            remote_block = self._block(remote_ids[overlap.source_index], self._remote)
            runs = batch.pairing.runs(
                overlap.source_token, overlap.destination_token, overlap.tokens
            )
            for run in runs:
                for piece in self._split(number, batch, run):
                    level = batch.levels[piece.level]
                    local_unit = piece.local_unit + local_block * level.local_step
                    remote_unit = piece.remote_unit + remote_block * level.remote_step
                    last = found[-1] if found else None
                    if (
                        last is not None
                        and last.level == piece.level
                        and last.local_unit + last.units == local_unit
                        and last.remote_unit + last.units == remote_unit
                    ):
                        found[-1] = last._replace(units=last.units + piece.units)
                    else:
                        found.append(_Piece(piece.level, local_unit, remote_unit, piece.units))
        return found

    def _split(self, number: int, batch: _Batch, run: Run) -> tuple[_Piece, ...]:
        key = (number, run)
        found = self._pieces.get(key)
        if found is None:
            if len(self._pieces) > MIDDLE_UNITS * 1024:
                self._pieces.clear()
            found = self._pieces[key] = tuple(_split_run(run, batch.levels, 0))
        return found

    @staticmethod
    def _block(block: int, side: SideTable) -> int:
        if not 0 <= block < side.placement.num_blocks:
            raise GeometryError(
                "block id",
                f"0..{side.placement.num_blocks - 1}",
                block,
                f"Rank {side.placement.rank} has no such block.",
            )
        return block

    def _build_attention(self) -> Iterator[_Batch]:
        grouped: dict[tuple[int, ...], list[LayerPair]] = {}
        for pair in self.plan.attention_pairs:
            pairing = self.plan.token_pairing(self.source_rank, pair)
            if pairing is not None:
                strides = self._strides(pair)
                key = (pair.source.group, pair.destination.group, id(pairing), *strides)
                grouped.setdefault(key, []).append(pair)
        for pairs in grouped.values():
            pairing = self.plan.token_pairing(self.source_rank, pairs[0])
            if pairing is not None:
                levels = _levels(pairing, *self._strides(pairs[0]))
                bases = tuple(
                    tuple(self._dense(pair, level.unit_bytes) for pair in pairs) for level in levels
                )
                yield _Batch(pairs[0], pairing, levels, bases)

    def _dense(self, pair: LayerPair, unit_bytes: int) -> tuple[int, int]:
        plan = self.plan
        local_region, remote_region = self._regions(pair)
        return (
            self._local.dense(
                local_region, unit_bytes, plan.destination.content_bytes(pair.destination)
            ),
            self._remote.dense(remote_region, unit_bytes, plan.source.content_bytes(pair.source)),
        )

    def _build_states(self) -> Iterator[_StateRows]:
        for pair in self.plan.state_pairs:
            local_region, remote_region = self._regions(pair)
            yield _StateRows(
                pair,
                tuple(
                    (
                        self._local.per_block(local_region, run.destination_offset, run.length),
                        self._remote.per_block(remote_region, run.source_offset, run.length),
                        run.length,
                    )
                    for run in self.plan.state_runs(self.source_rank, pair)
                ),
            )

    def _strides(self, pair: LayerPair) -> tuple[int, int]:
        local_region, remote_region = self._regions(pair)
        return (
            self._local.placement.block_strides[local_region],
            self._remote.placement.block_strides[remote_region],
        )

    def _regions(self, pair: LayerPair) -> tuple[int, int]:
        return _region(self._local, pair.name), _region(self._remote, pair.name)


def build_table(
    plan: PairPlan, source_rank: int, local: RankPlacement, remote: RankPlacement
) -> DescriptorTable:
    """The table of `plan`'s destination rank (local memory) for reads from `source_rank`."""
    if source_rank not in plan.sources:
        raise GeometryError("source_rank", f"one of {plan.sources}", source_rank)
    if local.rank != plan.destination_rank or remote.rank != source_rank:
        raise GeometryError(
            "placement.rank",
            f"local {plan.destination_rank}, remote {source_rank}",
            f"local {local.rank}, remote {remote.rank}",
        )
    return DescriptorTable(plan, source_rank, local, remote)


def _region(side: SideTable, layer: str) -> int:
    region = side.placement.layer_region.get(layer)
    if region is None:
        raise GeometryError(
            f"placement.layer_region[{layer}]",
            "a region",
            "nothing",
            f"Rank {side.placement.rank} does not place this layer.",
        )
    return region


def _levels(pairing: TokenPairing, local_stride: int, remote_stride: int) -> tuple[_Level, ...]:
    """Unit sizes, coarsest first; every one divides both strides."""
    strides = gcd(local_stride, remote_stride)
    fine = gcd(pairing.fine_unit_bytes, strides)
    coarse = gcd(pairing.coarse_unit_bytes, strides)
    sizes = {fine, coarse} if coarse % fine == 0 else {fine}
    middle = fine * MIDDLE_UNITS
    while middle > fine and coarse % middle:
        middle //= 2
    if fine * 8 <= middle < coarse:
        sizes.add(middle)
    return tuple(
        _Level(size, local_stride // size, remote_stride // size)
        for size in sorted(sizes, reverse=True)
    )


def _split_run(run: Run, levels: tuple[_Level, ...], level: int) -> Iterator[_Piece]:
    """Cover `run` with units, the coarsest that fit in the middle, finer ones at the ends."""
    unit = levels[level].unit_bytes
    if level + 1 < len(levels):
        head = -run.destination_offset % unit
        whole = (run.length - head) // unit if head <= run.length else 0
        if whole <= 0 or (run.source_offset + head) % unit:
            yield from _split_run(run, levels, level + 1)
            return
    else:
        head, whole = 0, run.length // unit
    body = head + whole * unit
    if head:
        yield from _split_run(
            Run(run.source_offset, run.destination_offset, head), levels, level + 1
        )
    yield _Piece(
        level, (run.destination_offset + head) // unit, (run.source_offset + head) // unit, whole
    )
    if body < run.length:
        yield from _split_run(
            Run(run.source_offset + body, run.destination_offset + body, run.length - body),
            levels,
            level + 1,
        )
