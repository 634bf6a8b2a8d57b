"""Descriptor tables: what a pair of ranks can move, and the ids of one request.

Both ranks of a pair have equally meant rows over their memory (`side_table`); a request is two
equally long lists of ids, and the i-th id of the source's rows is read into the i-th id of the
destination's.  The tables do not grow with the number of blocks.

First come the attention rows: per region and unit size, the region as a dense array of units
(stride = length), so that NIXL itself joins consecutive ids into one descriptor.  There are up
to three unit sizes: `coarse` for whole overlaps of blocks (the page itself when both sides agree),
`fine` for the last tokens, and one in between that keeps the number of ids small.
Then the state rows: per region and run of the plan one row with one descriptor per block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from hybridpd_geometry.errors import GeometryError
from hybridpd_geometry.placement import RankPlacement
from hybridpd_geometry.read_plan import BlockOverlap, LayerPair, PairPlan, ReadRequest
from hybridpd_geometry.request_check import RequestCheck
from hybridpd_geometry.sharding import Run
from hybridpd_geometry.side_table import Location, Row, SideTable
from hybridpd_geometry.token_runs import TokenPairing

MIDDLE_UNITS = 64
"""The unit in between is at most this many fine units (tokens, on a GPU)."""
SMALLEST_UNIT_BYTES = 16
"""Block strides that force smaller units would make the id lists of a request absurdly long."""
MAX_CACHED_TEMPLATES = 4096


class IdRun(NamedTuple):
    """`units` consecutive ids on both sides, each of `unit_bytes`, inside one dense row.

    NIXL joins them, so one IdRun is one descriptor moved.
    """

    local_first: int
    remote_first: int
    units: int
    unit_bytes: int


@dataclass(frozen=True)
class IdBatch:
    """Ids of one unit size for many layers at once.

    For every base and every run (local unit, remote unit, units) the ids
    `local_base + local_unit + i` and `remote_base + remote_unit + i`, i < units.
    """

    unit_bytes: int
    bases: tuple[tuple[int, int], ...]
    runs: tuple[tuple[int, int, int], ...]

    @property
    def descriptors(self) -> int:
        """Descriptors after joining consecutive ids."""
        return len(self.bases) * len(self.runs)

    @property
    def bytes(self) -> int:
        """Bytes moved."""
        return len(self.bases) * self.unit_bytes * sum(run[2] for run in self.runs)


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
    """State layers that share block ids: the rows' first ids by bytes of a descriptor."""

    pair: LayerPair
    bases: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


class DescriptorTable:
    """Both sides' rows for one destination rank and one source rank, and a request's ids."""

    def __init__(
        self, plan: PairPlan, source_rank: int, local: RankPlacement, remote: RankPlacement
    ) -> None:
        self.plan = plan
        self.source_rank = source_rank
        self.local, self.remote = local, remote
        self._local = SideTable(local, plan.destination.page_bytes)
        self._remote = SideTable(remote, plan.source.page_bytes)
        self._templates: dict[tuple[int, int, int, int], tuple[_Piece, ...]] = {}
        self._batches = tuple(self._build_attention())
        self._states = tuple(self._build_states())
        self._check = RequestCheck(plan, self._local, self._remote)

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

    def check(self, request: ReadRequest) -> None:
        """GeometryError when the request's blocks do not exist or do not cover its tokens."""
        self._check.check(request)

    def id_batches(self, request: ReadRequest) -> list[IdBatch]:
        """The ids of a request, per unit size and set of alike layers: attention, then states.

        GeometryError as of `check`.
        """
        self.check(request)
        found: list[IdBatch] = []
        for number, batch in enumerate(self._batches):
            per_level = self._unit_runs(number, batch, request)
            for level, bases, runs in zip(batch.levels, batch.bases, per_level, strict=True):
                if runs:
                    found.append(IdBatch(level.unit_bytes, bases, tuple(runs)))
        for state in self._states:
            pair = state.pair
            local_ids = request.destination.groups[pair.destination.group][-1:]
            remote_ids = request.source.groups[pair.source.group][-1:]
            block_run = (local_ids[0], remote_ids[0], 1)
            found.extend(IdBatch(length, bases, (block_run,)) for length, bases in state.bases)
        return found

    def id_runs(self, request: ReadRequest) -> list[IdRun]:
        """`id_batches` one run at a time, in the same order."""
        return [
            IdRun(local_base + local_unit, remote_base + remote_unit, units, batch.unit_bytes)
            for batch in self.id_batches(request)
            for local_base, remote_base in batch.bases
            for local_unit, remote_unit, units in batch.runs
        ]

    def ranges(self, request: ReadRequest) -> list[tuple[int, int, int]]:
        """The request in as few pieces as there can be: (our address, theirs, length in bytes).

        Pieces that touch on both sides are one, also across unit sizes.
        """
        joined: list[tuple[int, int, int]] = []
        for ours, theirs, length in sorted(
            (self._local.address(here), self._remote.address(there), units * unit_bytes)
            for here, there, units, unit_bytes in self.id_runs(request)
        ):
            if joined:
                first, remote_first, before = joined[-1]
                if (first + before, remote_first + before) == (ours, theirs):
                    joined[-1] = (first, remote_first, before + length)
                    continue
            joined.append((ours, theirs, length))
        return joined

    def _unit_runs(
        self, number: int, batch: _Batch, request: ReadRequest
    ) -> list[list[tuple[int, int, int]]]:
        """Per level the runs relative to a region's first id; the same for all layers."""
        levels = batch.levels
        found: list[list[tuple[int, int, int]]] = [[] for _ in levels]
        for local_block, remote_block, pieces in self._placed(number, batch, request):
            for level, local_at, remote_at, units in pieces:
                local_unit = local_at + local_block * levels[level].local_step
                remote_unit = remote_at + remote_block * levels[level].remote_step
                runs = found[level]
                if runs:
                    last_local, last_remote, last_units = runs[-1]
                    if (
                        last_local + last_units == local_unit
                        and last_remote + last_units == remote_unit
                    ):
                        runs[-1] = (last_local, last_remote, last_units + units)
                        continue
                runs.append((local_unit, remote_unit, units))
        return found

    def _placed(
        self, number: int, batch: _Batch, request: ReadRequest
    ) -> Iterator[tuple[int, int, tuple[_Piece, ...]]]:
        """(local block, remote block, pieces) for every overlap of blocks of the request."""
        local_ids = request.destination.groups[batch.pair.destination.group]
        remote_ids = request.source.groups[batch.pair.source.group]
        first, block = request.first_token, self.plan.destination.block_tokens
        if block == self.plan.source.block_tokens and first % block == 0:
            # Equal blocks meet one to one: all full ones have the same pieces.
            start, stop = first // block, request.tokens // block
            whole = self._pieces(number, batch, BlockOverlap(0, 0, 0, 0, block))
            for local_block, remote_block in zip(
                local_ids[start:stop], remote_ids[start:stop], strict=True
            ):
                yield local_block, remote_block, whole
            first = stop * block
        for overlap in self.plan.overlaps(request.tokens, first):
            yield (
                local_ids[overlap.destination_index],
                remote_ids[overlap.source_index],
                self._pieces(number, batch, overlap),
            )

    def _pieces(self, number: int, batch: _Batch, overlap: BlockOverlap) -> tuple[_Piece, ...]:
        """The runs of one overlap of blocks in units of the levels, relative to the blocks."""
        key = (number, overlap.source_token, overlap.destination_token, overlap.tokens)
        found = self._templates.get(key)
        if found is None:
            if len(self._templates) >= MAX_CACHED_TEMPLATES:
                self._templates.clear()
            runs = batch.pairing.runs(
                overlap.source_token, overlap.destination_token, overlap.tokens
            )
            pieces = [piece for run in runs for piece in _split_run(run, batch.levels, 0)]
            found = self._templates[key] = tuple(pieces)
        return found

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
        grouped: dict[tuple[int, int], list[LayerPair]] = {}
        for pair in self.plan.state_pairs:
            grouped.setdefault((pair.source.group, pair.destination.group), []).append(pair)
        for pairs in grouped.values():
            bases: dict[int, list[tuple[int, int]]] = {}
            for pair in pairs:
                local_region, remote_region = self._regions(pair)
                for run in self.plan.state_runs(self.source_rank, pair):
                    local = self._local.per_block(local_region, run.destination_offset, run.length)
                    remote = self._remote.per_block(remote_region, run.source_offset, run.length)
                    bases.setdefault(run.length, []).append((local, remote))
            yield _StateRows(pairs[0], tuple((size, tuple(ids)) for size, ids in bases.items()))

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
    if fine < min(pairing.fine_unit_bytes, SMALLEST_UNIT_BYTES):
        raise GeometryError(
            "placement.block_strides",
            f"multiples of {SMALLEST_UNIT_BYTES} bytes",
            f"{local_stride} here and {remote_stride} there",
        )
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
