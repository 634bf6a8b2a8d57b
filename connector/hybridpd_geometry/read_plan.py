"""The read plan of a pair: what one destination rank reads from each source rank.

One rule for every case, the intersection of two partitions (`sharding.intersect`), applied to the
sections of every state layer and to the KV heads of every attention layer.  Equal TP, unequal TP in
both directions, sizes that do not divide each other, copies, other block sizes: no case is special.

Only real layers (layers pair by name, a padding slot has none), real tokens and owned shards are
read; padding never is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from hybridpd_geometry.compatibility import compare
from hybridpd_geometry.errors import GeometryError
from hybridpd_geometry.layers import ATTENTION, STATE, LayerGeometry
from hybridpd_geometry.layout import CacheLayout
from hybridpd_geometry.sections import PlacedSection, units_per_rank
from hybridpd_geometry.sharding import Run, Segment, intersect, merge_runs
from hybridpd_geometry.token_runs import AttentionSide, TokenPairing


class BlockOverlap(NamedTuple):
    """Tokens that lie in one source block and one destination block.

    `source_index`, `destination_index` number the blocks of the request from 0; the token
    positions are inside the blocks.
    """

    source_index: int
    source_token: int
    destination_index: int
    destination_token: int
    tokens: int


class PlannedRead(NamedTuple):
    """One run of a request: `length` bytes between two pages, by block id and page offset."""

    layer: str
    source_block: int
    source_offset: int
    destination_block: int
    destination_offset: int
    length: int


@dataclass(frozen=True)
class RequestBlocks:
    """Block ids of a request on one engine: for each KV-cache group the ids in token order.

    An attention group's i-th id holds tokens [i * block_tokens, (i + 1) * block_tokens); of a
    state group only the last id counts, the block that bears the state.
    """

    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ReadRequest:
    """What a destination rank wants: the state after `tokens` tokens, and tokens
    [`first_token`, `tokens`) of every attention layer."""

    tokens: int
    source: RequestBlocks
    destination: RequestBlocks
    first_token: int = 0


@dataclass(frozen=True)
class LayerPair:
    """The same layer on both engines."""

    source: LayerGeometry
    destination: LayerGeometry

    @property
    def name(self) -> str:
        """The layer's name."""
        return self.destination.name


@dataclass(frozen=True)
class PairPlan:
    """Everything a destination rank reads, per source rank. Built by `plan_pair`."""

    source: CacheLayout
    destination: CacheLayout
    destination_rank: int
    layers: tuple[LayerPair, ...]
    _states: dict[int, dict[int, tuple[Run, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _pairings: dict[tuple[int, int], TokenPairing | None] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The source ranks this rank reads from, ascending."""
        ranks: set[int] = set()
        for placed in {pair.destination.sections for pair in self.layers}:
            for item in placed:
                ranks.update(segment.source_rank for segment in self._intersect(item))
        return tuple(sorted(ranks))

    @cached_property
    def attention_pairs(self) -> tuple[LayerPair, ...]:
        """Attention layers."""
        return tuple(pair for pair in self.layers if pair.destination.kind == ATTENTION)

    @cached_property
    def state_pairs(self) -> tuple[LayerPair, ...]:
        """State layers."""
        return tuple(pair for pair in self.layers if pair.destination.kind == STATE)

    def state_runs(self, source_rank: int, pair: LayerPair) -> tuple[Run, ...]:
        """Page-relative runs of a state layer from `source_rank`, neighbours merged."""
        key = self._alike[pair.name]
        runs = self._states.get(key)
        if runs is None:
            runs = self._states[key] = self._plan_state(pair)
        return runs.get(source_rank, ())

    def token_pairing(self, source_rank: int, pair: LayerPair) -> TokenPairing | None:
        """How tokens of an attention layer come from `source_rank`; None = no head from there."""
        key = (self._alike[pair.name], source_rank)
        if key not in self._pairings:
            self._pairings[key] = self._plan_tokens(source_rank, pair.destination)
        return self._pairings[key]

    def overlaps(self, tokens: int, first_token: int = 0) -> Iterator[BlockOverlap]:
        """Cut tokens [first_token, tokens) at the block borders of both engines."""
        if not 0 <= first_token <= tokens:
            raise GeometryError("first_token", f"0..{tokens}", first_token)
        source_block, destination_block = self.source.block_tokens, self.destination.block_tokens
        token = first_token
        while token < tokens:
            source_index, source_token = divmod(token, source_block)
            destination_index, destination_token = divmod(token, destination_block)
            step = min(
                tokens - token, source_block - source_token, destination_block - destination_token
            )
            yield BlockOverlap(
                source_index, source_token, destination_index, destination_token, step
            )
            token += step

    def attention_runs(
        self, source_rank: int, pair: LayerPair, overlap: BlockOverlap
    ) -> tuple[Run, ...]:
        """Page-relative runs of one overlap of blocks, merged inside the page."""
        pairing = self.token_pairing(source_rank, pair)
        if pairing is None:
            return ()
        return pairing.runs(overlap.source_token, overlap.destination_token, overlap.tokens)

    def request_runs(self, source_rank: int, request: ReadRequest) -> Iterator[PlannedRead]:
        """Every run of `request` from `source_rank`: attention by layer and token, then states."""
        for pair in self.attention_pairs:
            source_ids = request.source.groups[pair.source.group]
            destination_ids = request.destination.groups[pair.destination.group]
            for overlap in self.overlaps(request.tokens, request.first_token):
                source_block = source_ids[overlap.source_index]
                destination_block = destination_ids[overlap.destination_index]
                for run in self.attention_runs(source_rank, pair, overlap):
                    yield _planned(pair, source_block, destination_block, run)
        for pair in self.state_pairs:
            source_block = request.source.groups[pair.source.group][-1]
            destination_block = request.destination.groups[pair.destination.group][-1]
            for run in self.state_runs(source_rank, pair):
                yield _planned(pair, source_block, destination_block, run)

    def check_request(self, request: ReadRequest) -> None:
        """Refuse a request whose block lists do not cover its tokens."""
        _check_blocks("source", self.source, request.source, request.tokens)
        _check_blocks("destination", self.destination, request.destination, request.tokens)
        if not 0 <= request.first_token <= request.tokens:
            raise GeometryError("first_token", f"0..{request.tokens}", request.first_token)
        for tile_tokens in self._tiles if request.first_token else ():
            if request.first_token % tile_tokens:
                raise GeometryError(
                    "first_token", f"a multiple of {tile_tokens}", request.first_token
                )

    def _intersect(self, item: PlacedSection) -> tuple[Segment, ...]:
        return intersect(
            item.section, self.source.tp_size, self.destination.tp_size, self.destination_rank
        )

    def _plan_state(self, pair: LayerPair) -> dict[int, tuple[Run, ...]]:
        found: dict[int, list[Run]] = {}
        for theirs, ours in zip(pair.source.sections, pair.destination.sections, strict=True):
            unit_bytes = ours.section.unit_bytes
            for segment in self._intersect(ours):
                run = Run(
                    theirs.page_offset + segment.source_unit * unit_bytes,
                    ours.page_offset + segment.destination_unit * unit_bytes,
                    segment.units * unit_bytes,
                )
                found.setdefault(segment.source_rank, []).append(run)
        return {rank: merge_runs(runs) for rank, runs in found.items()}

    def _plan_tokens(self, source_rank: int, layer: LayerGeometry) -> TokenPairing | None:
        item = layer.sections[0]
        heads = tuple(s for s in self._intersect(item) if s.source_rank == source_rank)
        if not heads:
            return None
        return TokenPairing(
            attention_side(self.source, item),
            attention_side(self.destination, item),
            layer.planes,
            heads,
        )

    @cached_property
    def _tiles(self) -> tuple[int, ...]:
        """Tile sizes of all attention planes, in tokens."""
        planes = {plane for pair in self.attention_pairs for plane in pair.destination.planes}
        return tuple(sorted({plane.tile_tokens for plane in planes}))

    @cached_property
    def _alike(self) -> dict[str, int]:
        """Layer name → number of its kind of page: layers of equal pages share one plan."""
        numbers: dict[object, int] = {}
        return {
            pair.name: numbers.setdefault(
                (pair.source.sections, pair.destination.sections, pair.destination.planes),
                len(numbers),
            )
            for pair in self.layers
        }


def attention_side(layout: CacheLayout, item: PlacedSection) -> AttentionSide:
    """Block sizes and heads per rank of one engine."""
    heads = units_per_rank(item.section, layout.tp_size)
    return AttentionSide(layout.block_tokens, layout.kernel_block_tokens, heads)


def plan_pair(source: CacheLayout, destination: CacheLayout, destination_rank: int) -> PairPlan:
    """The plan of `destination_rank`; GeometryError when the two engines cannot be paired."""
    if not 0 <= destination_rank < destination.tp_size:
        raise GeometryError("destination_rank", f"0..{destination.tp_size - 1}", destination_rank)
    for mismatch in compare(destination, source):
        if mismatch.fatal:
            raise GeometryError(
                mismatch.field, mismatch.ours, mismatch.theirs, f"{mismatch.reason} {mismatch.hint}"
            )
    pairs = tuple(LayerPair(source.by_name[item.name], item) for item in destination.layers)
    return PairPlan(source, destination, destination_rank, pairs)


def _planned(pair: LayerPair, source_block: int, destination_block: int, run: Run) -> PlannedRead:
    return PlannedRead(
        pair.name,
        source_block,
        run.source_offset,
        destination_block,
        run.destination_offset,
        run.length,
    )


def _check_blocks(side: str, layout: CacheLayout, blocks: RequestBlocks, tokens: int) -> None:
    if tokens < 0:
        raise GeometryError("tokens", "zero or more", tokens)
    kinds = layout.group_kinds
    if len(blocks.groups) != len(kinds):
        raise GeometryError(f"{side}.blocks", f"{len(kinds)} groups", len(blocks.groups))
    for group, (kind, ids) in enumerate(zip(kinds, blocks.groups, strict=True)):
        need = -(-tokens // layout.block_tokens) if kind == ATTENTION else 1
        if len(ids) < need:
            raise GeometryError(f"{side}.blocks[{group}]", f"at least {need} blocks", len(ids))
