"""Checksums of a request's cache that two engines can compare, whatever their TP and block sizes.

A rank's sums are 64-bit words in a fixed order, "row" for short::

    [ state layer, section, piece ... ][ attention layer, KV head, chunk of tokens ... ]

A *piece* is an equal part of a section, small enough that every usual TP size cuts on its borders;
a *chunk* is `chunk_tokens` consecutive tokens of one KV head.  Both are places in the request, not
in memory: block ids, block sizes, kernel blocks and page padding do not enter a sum.

A sum is the dot product, modulo 2**64, of the words of its bytes (signed, 4 bytes wide, or 2 or 1
where the length is no multiple) and of `weight(0), weight(1), ...`.  Weights are odd, so a change
of any one word changes the sum; they are mixed, so words that change places change it too.  Words
are half as wide as weights: the difference of two of them cannot cancel against even weights.

Only what a reader reads is summed: real tokens, rounded up to the packing's tile.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, lcm
from typing import NamedTuple

from hybridpd_geometry.errors import GeometryError
from hybridpd_geometry.exact import ceil_div
from hybridpd_geometry.layers import ATTENTION, LayerGeometry
from hybridpd_geometry.layout import CacheLayout
from hybridpd_geometry.packings import Plane, head_token_bytes
from hybridpd_geometry.read_plan import PairPlan, RequestBlocks
from hybridpd_geometry.sections import PlacedSection, owned, units_per_rank
from hybridpd_geometry.sharding import Segment, intersect

PIECES = 192
"""Pieces of a section, as far as it can be cut; 1, 2, 3, 4, 6, 8, 12, 16 ... 64 ranks divide it."""

SMALLEST_CHUNK_TOKENS = 16
"""A multiple of every packing's tile, and a divisor of nearly every block a prefix cache uses."""

CHUNK_WORDS = 16384
"""Words a row may have for chunks; longer prompts have longer chunks (doubled until they fit)."""

MASK = (1 << 64) - 1
WEIGHT_STEP = 0x9E3779B97F4A7C15
WEIGHT_MIX = 0xD6E8FEB86659FD93


@lru_cache(maxsize=1 << 16)
def weight(index: int) -> int:
    """Weight of the `index`-th word of a sum: odd, below 2**64."""
    mixed = (index + 1) * WEIGHT_STEP & MASK
    mixed = (mixed ^ mixed >> 32) * WEIGHT_MIX & MASK
    return (mixed ^ mixed >> 32) | 1


def word_bytes(length: int) -> int:
    """Width of the words in which `length` bytes are summed."""
    return gcd(length, 4)


def sum_bytes(data: bytes, first_weight: int = 0) -> int:
    """The sum of `data` with the weights from `first_weight` on."""
    view, width = memoryview(data), word_bytes(len(data))
    words = view.cast("i") if width == 4 else view.cast("h") if width == 2 else view
    return sum(weight(first_weight + index) * word for index, word in enumerate(words)) & MASK


@dataclass(frozen=True)
class StateSums:
    """The pieces of one section that a rank owns: words `first_word` to `first_word + pieces`."""

    layer: LayerGeometry
    placed: PlacedSection
    pieces: int
    piece_bytes: int
    first_word: int


@dataclass(frozen=True)
class HeadSums:
    """The KV heads of one attention layer; `heads_before` are those of earlier layers."""

    layer: LayerGeometry
    heads: int
    heads_before: int


class SumPlace(NamedTuple):
    """What one word of a row sums: `units` of a section, or `tokens` of one head (unit)."""

    layer: str
    section: str
    units: range
    tokens: range


@dataclass(frozen=True)
class SumRequest:
    """What a rank is to sum: the state after `tokens` tokens, and the chunks from `first_chunk`.

    `pieces_tp` is the TP size of the engine that states the sums, see `RankSums`.
    """

    tokens: int
    blocks: RequestBlocks
    pieces_tp: int
    chunk_tokens: int
    first_chunk: int = 0

    @property
    def chunks(self) -> int:
        """Chunks per head."""
        return ceil_div(self.tokens, self.chunk_tokens) - self.first_chunk


class RankSums:
    """The order of a row of any rank of one engine (all its ranks own equally much).

    `pieces_tp`: TP size of the engine that states the sums; its own ranks always cut on piece
    borders. GeometryError when this engine's do not.
    """

    def __init__(self, layout: CacheLayout, pieces_tp: int) -> None:
        self.layout = layout
        self.pieces_tp = pieces_tp
        self.states: tuple[StateSums, ...] = tuple(self._build_states())
        self.state_words = sum(item.pieces for item in self.states)
        self.attention: tuple[HeadSums, ...] = tuple(self._build_heads())
        self.heads = sum(item.heads for item in self.attention)

    def _build_states(self) -> Iterator[StateSums]:
        word = 0
        for layer in self.layout.layers:
            for placed in layer.sections if layer.kind != ATTENTION else ():
                section = placed.section
                piece_units = section.extent // gcd(section.extent, lcm(PIECES, self.pieces_tp))
                share = units_per_rank(section, self.layout.tp_size)
                if share % piece_units:
                    raise GeometryError(
                        f"checksums of {section.name}",
                        f"a multiple of {piece_units} units per rank",
                        share,
                        "Checksums of this pair of TP sizes cannot be compared.",
                    )
                pieces = share // piece_units
                yield StateSums(layer, placed, pieces, piece_units * section.unit_bytes, word)
                word += pieces

    def _build_heads(self) -> Iterator[HeadSums]:
        before = 0
        for layer in self.layout.layers:
            if layer.kind == ATTENTION:
                for plane in layer.planes:
                    if SMALLEST_CHUNK_TOKENS % plane.tile_tokens:
                        raise GeometryError(
                            f"checksums of {plane.name}",
                            f"tiles that divide {SMALLEST_CHUNK_TOKENS} tokens",
                            plane.tile_tokens,
                        )
                heads = units_per_rank(layer.sections[0].section, self.layout.tp_size)
                yield HeadSums(layer, heads, before)
                before += heads

    @property
    def capacity(self) -> int:
        """Words of the longest row."""
        return self.state_words + max(CHUNK_WORDS, self.heads)

    def chunk_tokens(self, tokens: int) -> int:
        """Tokens of a chunk of a request, as the engine that states the sums chooses them."""
        size = SMALLEST_CHUNK_TOKENS
        while size < tokens and ceil_div(tokens, size) * self.heads > CHUNK_WORDS:
            size *= 2
        return size

    def words(self, chunks: int) -> int:
        """Words of a row with `chunks` chunks a head."""
        return self.state_words + self.heads * chunks

    def head_word(self, head: int, chunks: int) -> int:
        """First word of the `head`-th head, counted over all layers of the rank."""
        return self.state_words + head * chunks

    def place_of(self, word: int, request: SumRequest, rank: int) -> SumPlace:
        """What `word` of the row of `request` on `rank` stands for."""
        tp_size = self.layout.tp_size
        for item in self.states:
            if item.first_word <= word < item.first_word + item.pieces:
                section = item.placed.section
                size = item.piece_bytes // section.unit_bytes
                first = owned(section, tp_size, rank).start + (word - item.first_word) * size
                return SumPlace(item.layer.name, section.name, range(first, first + size), range(0))
        head, chunk = divmod(word - self.state_words, max(1, request.chunks))
        for heads in self.attention:
            if heads.heads_before <= head < heads.heads_before + heads.heads:
                section = heads.layer.sections[0].section
                unit = owned(section, tp_size, rank).start + head - heads.heads_before
                first = (chunk + request.first_chunk) * request.chunk_tokens
                tokens = range(first, min(first + request.chunk_tokens, request.tokens))
                return SumPlace(heads.layer.name, section.name, range(unit, unit + 1), tokens)
        raise GeometryError("checksum word", f"below {self.words(request.chunks)}", word)


class SumSpan(NamedTuple):
    """`words` words that must be equal, from these places in the two rows."""

    source_word: int
    destination_word: int
    words: int


class SumPair:
    """Which sums of a destination rank must equal which ones of each source rank.

    GeometryError when the pair's TP sizes cut a section at places that no piece ends at.
    """

    def __init__(self, plan: PairPlan) -> None:
        self.plan = plan
        self.source = RankSums(plan.source, plan.source.tp_size)
        self.destination = RankSums(plan.destination, plan.source.tp_size)

    def request(self, tokens: int, blocks: RequestBlocks, first_token: int = 0) -> SumRequest:
        """What the destination rank must sum.  Of the tokens it reads, those before the first
        chunk border are left out: P's sum of that chunk covers tokens that are not read."""
        chunk_tokens = self.source.chunk_tokens(tokens)
        first_chunk = min(ceil_div(first_token, chunk_tokens), ceil_div(tokens, chunk_tokens))
        return SumRequest(tokens, blocks, self.plan.source.tp_size, chunk_tokens, first_chunk)

    def source_words(self, request: SumRequest) -> int:
        """Words of a source rank's row of the same request."""
        return self.source.words(request.chunks + request.first_chunk)

    def spans(self, source_rank: int, request: SumRequest) -> Iterator[SumSpan]:
        """The words to compare with the row of `source_rank`."""
        yield from self._state_spans.get(source_rank, ())
        if request.chunks <= 0:
            return
        there = request.chunks + request.first_chunk
        for source_head, destination_head in self._head_pairs.get(source_rank, ()):
            yield SumSpan(
                self.source.head_word(source_head, there) + request.first_chunk,
                self.destination.head_word(destination_head, request.chunks),
                request.chunks,
            )

    @cached_property
    def _state_spans(self) -> dict[int, list[SumSpan]]:
        theirs = {(item.layer.name, item.placed.section.name): item for item in self.source.states}
        found: dict[int, list[SumSpan]] = {}
        for ours in self.destination.states:
            section = ours.placed.section
            source = theirs[ours.layer.name, section.name]
            piece_units = ours.piece_bytes // section.unit_bytes
            for segment in self._segments(ours.placed):
                span = SumSpan(
                    source.first_word + segment.source_unit // piece_units,
                    ours.first_word + segment.destination_unit // piece_units,
                    segment.units // piece_units,
                )
                found.setdefault(segment.source_rank, []).append(span)
        return found

    @cached_property
    def _head_pairs(self) -> dict[int, list[tuple[int, int]]]:
        theirs = {item.layer.name: item for item in self.source.attention}
        found: dict[int, list[tuple[int, int]]] = {}
        for ours in self.destination.attention:
            source = theirs[ours.layer.name]
            for segment in self._segments(ours.layer.sections[0]):
                pairs = found.setdefault(segment.source_rank, [])
                pairs.extend(
                    (
                        source.heads_before + segment.source_unit + unit,
                        ours.heads_before + segment.destination_unit + unit,
                    )
                    for unit in range(segment.units)
                )
        return found

    def _segments(self, placed: PlacedSection) -> tuple[Segment, ...]:
        plan = self.plan
        return intersect(
            placed.section, plan.source.tp_size, plan.destination.tp_size, plan.destination_rank
        )


ReadPage = Callable[[str, int, int, int], bytes]
"""(layer, block, page offset, length) -> bytes of a rank's cache."""


def row_of(sums: RankSums, request: SumRequest, read: ReadPage) -> list[int]:
    """The row of one rank, computed byte by byte: what every faster way must equal."""
    row: list[int] = []
    for item in sums.states:
        block = request.blocks.groups[item.layer.group][-1]
        for piece in range(item.pieces):
            offset = item.placed.page_offset + piece * item.piece_bytes
            row.append(sum_bytes(read(item.layer.name, block, offset, item.piece_bytes)))
    for heads in sums.attention:
        for head in range(heads.heads):
            row.extend(
                _chunk_sum(sums, heads, head, request, chunk, read)
                for chunk in range(request.first_chunk, request.first_chunk + request.chunks)
            )
    return row


def _chunk_sum(
    sums: RankSums, heads: HeadSums, head: int, request: SumRequest, chunk: int, read: ReadPage
) -> int:
    layout, layer = sums.layout, heads.layer
    kernel = layout.kernel_block_tokens
    kernel_bytes = kernel * head_token_bytes(layer.planes)
    ids = request.blocks.groups[layer.group]
    total = first_weight = plane_base = 0
    for plane in layer.planes:
        tile_bytes = plane.tile_tokens * plane.token_bytes
        for lane, tile, position in _tiles(plane, request, chunk):
            index, inside = divmod(tile * plane.tile_tokens, layout.block_tokens)
            kernel_block, token = divmod(inside, kernel)
            offset = (kernel_block * heads.heads + head) * kernel_bytes + plane_base
            offset += lane * kernel * plane.token_bytes + token * plane.token_bytes
            at = first_weight + position * (tile_bytes // word_bytes(tile_bytes))
            total += sum_bytes(read(layer.name, ids[index], offset, tile_bytes), at)
        first_weight += chunk_words(plane, request.chunk_tokens)
        plane_base += plane.lanes * kernel * plane.token_bytes
    return total & MASK


def _tiles(plane: Plane, request: SumRequest, chunk: int) -> Iterator[tuple[int, int, int]]:
    """(lane, tile of the request, position of the tile in the order of weights) of one chunk."""
    per_chunk = request.chunk_tokens // plane.tile_tokens
    first = chunk * per_chunk
    last = min(first + per_chunk, ceil_div(request.tokens, plane.tile_tokens))
    for lane in range(plane.lanes):
        for tile in range(first, last):
            yield lane, tile, lane * per_chunk + tile - first


def chunk_words(plane: Plane, chunk_tokens: int) -> int:
    """Words of one plane in a whole chunk: as many weights it takes."""
    tile_bytes = plane.tile_tokens * plane.token_bytes
    return (
        plane.lanes * (chunk_tokens // plane.tile_tokens) * (tile_bytes // word_bytes(tile_bytes))
    )
