"""A request's ranges by templates: equal to ``DescriptorTable.ranges``, in a few array operations.

What is read for one request of a link differs from another's in three things only: its block ids,
how many whole blocks it has, and which tokens its partly read blocks hold. So everything else is
made once, as templates of pieces (our address, the peer's, length in bytes) for block 0 of both
sides; a piece of a request is one of these, moved by its block ids times the strides of the blocks:

    states       one template for all layers, kept with the link
    attention    one template for each cut of a block, all layers in it: the cut of the whole block
                 serves every whole block of every request, that of a last block every request that
                 ends at the same token of it

Templates of cuts are kept, up to ``MAX_CACHED_PIECES`` pieces of a link in all. Nothing grows with
the number of blocks of an engine.

Why ranges and not ids: the library joins neighbouring ids only inside a row, so that a run of
tokens in units of several sizes would be moved in several pieces, and every piece costs a post.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from hybridpd_connector.errors import StateError
from hybridpd_connector.read_tables import Integers, joined
from hybridpd_geometry import DescriptorTable, LayerPair, ReadRequest, TokenPairing

MAX_CACHED_PIECES = 1 << 18
"""6 MB. A last block of Nano has 12 pieces, so that every place to end has room."""

Cut = tuple[int, int, int]
"""Tokens of a block that are read at once: first one in the source's block, first one in the
destination's block, how many."""


@dataclasses.dataclass(frozen=True)
class _Alike:
    """Attention layers that share block ids, heads and strides on both sides.

    ``bases``: L x 1 x 3 (our address of block 0, theirs, 0); ``strides``: (ours, theirs, 0).
    """

    local_group: int
    remote_group: int
    pairing: TokenPairing
    bases: Integers
    strides: Integers


class RequestRanges:
    """See the module. For one link and source rank; not thread-safe."""

    def __init__(self, table: DescriptorTable) -> None:
        self._table = table
        self._plan = table.plan
        self._attention = tuple(self._alike_layers())
        self._cached: dict[tuple[int, Cut], Integers] = {}
        self._cached_pieces = 0
        # Groups of (ours, theirs) whose last blocks hold states, and the pieces that lie in them:
        # N x 3 of block 0, N x 3 strides, N indexes into the groups.
        self._state_groups = tuple(
            dict.fromkeys((p.destination.group, p.source.group) for p in self._plan.state_pairs)
        )
        self._state_pieces, self._state_strides, self._state_at = self._state_template()

    def __repr__(self) -> str:
        return f"RequestRanges(source_rank={self._table.source_rank}, kept={self.pieces_kept})"

    @property
    def pieces_kept(self) -> int:
        """Pieces of all templates of cuts."""
        return self._cached_pieces

    def of(self, request: ReadRequest) -> Integers:
        """N x 3 (our address, the peer's address, length in bytes), as few as there can be, in
        order of our addresses. GeometryError when the request's blocks do not exist or do not
        cover its tokens."""
        self._table.check(request)
        parts = []
        if len(self._state_at):
            blocks = np.array(
                [
                    (request.destination.groups[ours][-1], request.source.groups[theirs][-1], 0)
                    for ours, theirs in self._state_groups
                ],
                dtype=np.int64,
            )
            parts.append(self._state_pieces + blocks[self._state_at] * self._state_strides)
        if self._attention:
            cuts = list(self._cuts(request))
            for number in range(len(self._attention)):
                parts += self._token_pieces(number, cuts, request)
        if not parts:
            raise StateError("ranges to read", "at least one", 0)
        table = np.concatenate(parts) if len(parts) > 1 else parts[0]
        return joined(table[table[:, 0].argsort()])

    def _token_pieces(
        self,
        number: int,
        cuts: Sequence[tuple[Cut, Sequence[int], Sequence[int]]],
        request: ReadRequest,
    ) -> Iterator[Integers]:
        """Of one set of alike layers, for each cut: all its blocks in all these layers."""
        alike = self._attention[number]
        local_ids = request.destination.groups[alike.local_group]
        remote_ids = request.source.groups[alike.remote_group]
        for cut, ours, theirs in cuts:
            blocks = [local_ids[at] for at in ours], [remote_ids[at] for at in theirs]
            moved = np.array([*blocks, [0] * len(ours)], dtype=np.int64).T * alike.strides
            yield (self._template(number, cut) + moved[:, None]).reshape(-1, 3)

    def _cuts(self, request: ReadRequest) -> Iterator[tuple[Cut, Sequence[int], Sequence[int]]]:
        """Each cut with the blocks it is made in: indexes into our ids and into the peer's."""
        plan = self._plan
        first, block = request.first_token, plan.destination.block_tokens
        if block == plan.source.block_tokens and first % block == 0:
            # Equal blocks meet one to one: all full ones are cut alike.
            whole = range(first // block, request.tokens // block)
            if whole:
                yield (0, 0, block), whole, whole
                first = whole.stop * block
        found: dict[Cut, tuple[list[int], list[int]]] = {}
        for overlap in plan.overlaps(request.tokens, first):
            cut = overlap.source_token, overlap.destination_token, overlap.tokens
            ours, theirs = found.setdefault(cut, ([], []))
            ours.append(overlap.destination_index)
            theirs.append(overlap.source_index)
        for cut, (ours, theirs) in found.items():
            yield cut, ours, theirs

    def _template(self, number: int, cut: Cut) -> Integers:
        """P x 3 pieces of a cut of block 0, in all layers of a set."""
        key = number, cut
        template = self._cached.get(key)
        if template is None:
            alike = self._attention[number]
            runs = [
                (run.destination_offset, run.source_offset, run.length)
                for run in alike.pairing.runs(*cut)
            ]
            template = (alike.bases + np.array(runs, dtype=np.int64)).reshape(-1, 3)
            self._cached_pieces += len(template)
            if self._cached_pieces > MAX_CACHED_PIECES:
                self._cached.clear()
                self._cached_pieces = len(template)
            self._cached[key] = template
        return template

    def _alike_layers(self) -> Iterator[_Alike]:
        plan, rank = self._plan, self._table.source_rank
        found: dict[tuple[int, int, TokenPairing, int, int], list[tuple[int, int, int]]] = {}
        for pair in plan.attention_pairs:
            pairing = plan.token_pairing(rank, pair)
            if pairing is not None:
                ours, theirs, stride, their_stride = self._place(pair)
                groups = pair.destination.group, pair.source.group
                key = (*groups, pairing, stride, their_stride)
                found.setdefault(key, []).append((ours, theirs, 0))
        for (group, their_group, pairing, *strides), bases in found.items():
            yield _Alike(
                group,
                their_group,
                pairing,
                np.array(bases, dtype=np.int64)[:, None],
                np.array((*strides, 0), dtype=np.int64),
            )

    def _state_template(self) -> tuple[Integers, Integers, Integers]:
        pieces, strides, groups = [], [], []
        for pair in self._plan.state_pairs:
            ours, theirs, our_stride, their_stride = self._place(pair)
            at = self._state_groups.index((pair.destination.group, pair.source.group))
            for run in self._plan.state_runs(self._table.source_rank, pair):
                pieces.append(
                    (ours + run.destination_offset, theirs + run.source_offset, run.length)
                )
                strides.append((our_stride, their_stride, 0))
                groups.append(at)
        return (
            np.array(pieces, dtype=np.int64),
            np.array(strides, dtype=np.int64),
            np.array(groups, dtype=np.int64),
        )

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
