"""A request's ranges by templates: equal to ``DescriptorTable.ranges``, without its search.

What is read for one request of a link differs from another's in three things only: its block ids,
how many whole blocks it has, and which tokens its partly read blocks hold. So everything else is
made once, as templates of pieces (our address, the peer's, length in bytes) for block 0 of both
sides; a piece of a request is one of these, moved by its block ids times the strides of the blocks:

    states       one template for all layers of a pair of groups, kept with the link
    attention    one template for each cut of a block, all alike layers in it: the cut of the whole
                 block serves every whole block of every request, that of a last block every
                 request that ends at the same token of it

Templates of cuts are kept, up to ``MAX_KEPT_PIECES`` pieces of a link in all. Nothing grows with
the number of blocks of an engine.

Few pieces are written out by plain Python, many by numpy. A hybrid model's request has a few dozen,
and it often comes to an engine that has done something else before: each of numpy's dozen calls
then costs ten microseconds, more than all these pieces.

Why ranges and not ids: the library joins neighbouring ids only inside a row, so that a run of
tokens in units of several sizes would be moved in several pieces, and every piece costs a post.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hybridpd_connector.agent_api import Ranges
from hybridpd_connector.errors import StateError
from hybridpd_connector.read_tables import Integers, joined
from hybridpd_geometry import DescriptorTable, LayerPair, ReadRequest, TokenPairing

MAX_KEPT_PIECES = 1 << 16
"""10 MB. A last block of Nano has 12 pieces, so that every place to end has room."""

FEW_PIECES = 256
"""Of one cut: up to here Python is faster, also on an engine that does nothing else."""

Piece = tuple[int, int, int]
"""Our address, the peer's, length in bytes."""

Cut = tuple[int, int, int]
"""Tokens of a block that are read at once: first one in the source's block, first one in the
destination's block, how many."""


class PlannedRead(NamedTuple):
    """What is to be read for a request: ``ranges`` and the sum of their lengths."""

    ranges: Ranges
    bytes: int


class _States(NamedTuple):
    """State layers that share block ids and strides on both sides: pieces of block 0."""

    local_group: int
    remote_group: int
    local_stride: int
    remote_stride: int
    pieces: list[Piece]


class _Attention(NamedTuple):
    """Attention layers that share block ids, strides and heads on both sides; ``bases``: our
    address of block 0 and theirs, for each layer."""

    local_group: int
    remote_group: int
    local_stride: int
    remote_stride: int
    pairing: TokenPairing
    bases: list[tuple[int, int]]


class RequestRanges:
    """See the module. For one link and source rank; not thread-safe."""

    def __init__(self, table: DescriptorTable) -> None:
        self._table = table
        self._plan = table.plan
        self._states = tuple(self._alike_states())
        self._attention = tuple(self._alike_attention())
        self._kept: dict[tuple[int, Cut], list[Piece]] = {}
        self._pieces_kept = 0

    def __repr__(self) -> str:
        return f"RequestRanges(source_rank={self._table.source_rank}, kept={self._pieces_kept})"

    @property
    def pieces_kept(self) -> int:
        """Pieces of all templates of cuts."""
        return self._pieces_kept

    def of(self, request: ReadRequest) -> PlannedRead:
        """Its ranges, as few as there can be, in order of our addresses. GeometryError when the
        request's blocks do not exist or do not cover its tokens."""
        self._table.check(request)
        ours, theirs = request.destination.groups, request.source.groups
        pieces: list[Piece] = []
        many: list[Integers] = []
        for states in self._states:
            here = ours[states.local_group][-1] * states.local_stride
            there = theirs[states.remote_group][-1] * states.remote_stride
            pieces += [(at + here, to + there, length) for at, to, length in states.pieces]
        cuts = list(self._cuts(request)) if self._attention else []
        for number, alike in enumerate(self._attention):
            local_ids, remote_ids = ours[alike.local_group], theirs[alike.remote_group]
            for cut, local_at, remote_at in cuts:
                template = self._template(number, cut)
                here_of = [local_ids[at] * alike.local_stride for at in local_at]
                there_of = [remote_ids[at] * alike.remote_stride for at in remote_at]
                if len(template) * len(here_of) > FEW_PIECES:
                    many.append(_moved(template, here_of, there_of))
                    continue
                for here, there in zip(here_of, there_of, strict=True):
                    pieces += [(at + here, to + there, length) for at, to, length in template]
        if many:
            if pieces:
                many.append(np.array(pieces, dtype=np.int64))
            table = np.concatenate(many)
            table = joined(table[table[:, 0].argsort()])
            return PlannedRead(table, int(table[:, 2].sum()))
        return _planned(pieces)

    def _cuts(self, request: ReadRequest) -> Iterator[tuple[Cut, Sequence[int], Sequence[int]]]:
        """Each cut with the blocks it is made in: indexes into our ids and into the peer's."""
        plan = self._plan
        first, last = request.first_token, request.tokens
        block = plan.destination.block_tokens
        if block == plan.source.block_tokens and first % block == 0:
            # Equal blocks meet one to one: all full ones are cut alike, and one may be left.
            whole = range(first // block, last // block)
            if whole:
                yield (0, 0, block), whole, whole
            if last % block:
                yield (0, 0, last % block), (last // block,), (last // block,)
            return
        found: dict[Cut, tuple[list[int], list[int]]] = {}
        for overlap in plan.overlaps(last, first):
            cut = overlap.source_token, overlap.destination_token, overlap.tokens
            ours, theirs = found.setdefault(cut, ([], []))
            ours.append(overlap.destination_index)
            theirs.append(overlap.source_index)
        for cut, (ours, theirs) in found.items():
            yield cut, ours, theirs

    def _template(self, number: int, cut: Cut) -> list[Piece]:
        """The pieces of a cut of block 0, in all layers of a set."""
        template = self._kept.get((number, cut))
        if template is None:
            alike = self._attention[number]
            runs = alike.pairing.runs(*cut)
            template = [
                (ours + run.destination_offset, theirs + run.source_offset, run.length)
                for ours, theirs in alike.bases
                for run in runs
            ]
            self._pieces_kept += len(template)
            if self._pieces_kept > MAX_KEPT_PIECES:
                self._kept.clear()
                self._pieces_kept = len(template)
            self._kept[number, cut] = template
        return template

    def _alike_attention(self) -> Iterator[_Attention]:
        found: dict[tuple[int, int, int, int, TokenPairing], list[tuple[int, int]]] = {}
        for pair in self._plan.attention_pairs:
            pairing = self._plan.token_pairing(self._table.source_rank, pair)
            if pairing is not None:
                ours, theirs, *strides = self._place(pair)
                key = (pair.destination.group, pair.source.group, strides[0], strides[1], pairing)
                found.setdefault(key, []).append((ours, theirs))
        for key, bases in found.items():
            yield _Attention(*key, bases)

    def _alike_states(self) -> Iterator[_States]:
        found: dict[tuple[int, int, int, int], list[Piece]] = {}
        for pair in self._plan.state_pairs:
            ours, theirs, *strides = self._place(pair)
            pieces = [
                (ours + run.destination_offset, theirs + run.source_offset, run.length)
                for run in self._plan.state_runs(self._table.source_rank, pair)
            ]
            key = (pair.destination.group, pair.source.group, strides[0], strides[1])
            found.setdefault(key, []).extend(pieces)
        for key, pieces in found.items():
            yield _States(*key, pieces)

    def _place(self, pair: LayerPair) -> tuple[int, int, int, int]:
        """A layer's region: our address of block 0, theirs; bytes between our blocks, theirs."""
        local, remote = self._table.local, self._table.remote
        ours, theirs = local.layer_region[pair.name], remote.layer_region[pair.name]
        return (
            local.region_bases[ours],
            remote.region_bases[theirs],
            local.block_strides[ours],
            remote.block_strides[theirs],
        )


def _moved(template: list[Piece], here_of: list[int], there_of: list[int]) -> Integers:
    """N x 3: the template in each of many blocks, which lie so many bytes behind block 0."""
    moved = np.array([here_of, there_of, [0] * len(here_of)], dtype=np.int64).T
    return (np.array(template, dtype=np.int64) + moved[:, None]).reshape(-1, 3)


def _planned(pieces: list[Piece]) -> PlannedRead:
    """The pieces in order, those that continue the one before on both sides added to it."""
    if not pieces:
        raise StateError("ranges to read", "at least one", 0)
    pieces.sort()
    ranges: list[Piece] = []
    total = ours_end = theirs_end = 0
    for piece in pieces:
        ours, theirs, length = piece
        if ranges and ours == ours_end and theirs == theirs_end:
            first, their_first, before = ranges[-1]
            ranges[-1] = first, their_first, before + length
        else:
            ranges.append(piece)
        total += length
        ours_end, theirs_end = ours + length, theirs + length
    return PlannedRead(ranges, total)
