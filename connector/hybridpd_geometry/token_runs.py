"""Attention pages: which bytes hold a range of tokens, on two engines at once.

An attention page is `block_tokens / kernel_block_tokens` kernel blocks; a kernel block is one head
after the other; a head is its planes (see `packings`).  The two engines of a pair may differ in
block, in kernel block and in heads per rank, so a token range is cut at every kernel-block border
of either side; inside a piece each head's planes are contiguous lanes on both sides.
"""

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from hybridpd_geometry.errors import GeometryError
from hybridpd_geometry.exact import round_up
from hybridpd_geometry.packings import Plane, head_token_bytes
from hybridpd_geometry.sharding import Run, Segment, merge_runs

MAX_CACHED_TEMPLATES = 2048


@dataclass(frozen=True)
class AttentionSide:
    """One engine's side: tokens per block and per kernel block, KV heads on the rank."""

    block_tokens: int
    kernel_tokens: int
    heads: int


class TokenPairing:
    """Runs for token ranges of one kind of attention layer between one pair of ranks.

    `heads` are the KV heads both ranks own (units of the segment are heads).
    """

    def __init__(
        self,
        source: AttentionSide,
        destination: AttentionSide,
        planes: tuple[Plane, ...],
        heads: tuple[Segment, ...],
    ) -> None:
        self.source = source
        self.destination = destination
        self.planes = planes
        self.heads = heads
        self.head_token_bytes = head_token_bytes(planes)
        self.common_kernel_tokens = gcd(source.kernel_tokens, destination.kernel_tokens)
        self._cache: dict[tuple[int, int, int], tuple[Run, ...]] = {}
        for plane in planes:
            if self.common_kernel_tokens % plane.tile_tokens:
                raise GeometryError(
                    f"kernel_block_tokens ({plane.name})",
                    f"kernel blocks whose common divisor is a multiple of {plane.tile_tokens}",
                    f"{source.kernel_tokens} and {destination.kernel_tokens}",
                    "Give both engines block sizes that are multiples of the packing's tile.",
                )

    @cached_property
    def whole_kernels(self) -> bool:
        """Whether a kernel block is the same bytes on both sides (equal size, all heads)."""
        heads = self.source.heads
        return (
            self.source.kernel_tokens == self.destination.kernel_tokens
            and heads == self.destination.heads
            and len(self.heads) == 1
            and self.heads[0].units == heads
        )

    @cached_property
    def fine_unit_bytes(self) -> int:
        """Every run starts, ends and lies on a multiple of this."""
        return gcd(*(plane.tile_tokens * plane.token_bytes for plane in self.planes))

    @cached_property
    def coarse_unit_bytes(self) -> int:
        """Every run of a *full* overlap of two blocks starts and ends on a multiple of this."""
        if self.whole_kernels:
            tokens = gcd(self.source.block_tokens, self.destination.block_tokens)
            return tokens * self.source.heads * self.head_token_bytes
        if self.source.kernel_tokens == self.destination.kernel_tokens:
            heads = gcd(self.source.heads, self.destination.heads)
            for segment in self.heads:
                heads = gcd(heads, segment.units, segment.source_unit, segment.destination_unit)
            return self.source.kernel_tokens * heads * self.head_token_bytes
        lane = gcd(*(plane.token_bytes for plane in self.planes))
        return self.common_kernel_tokens * lane

    def runs(self, source_token: int, destination_token: int, tokens: int) -> tuple[Run, ...]:
        """Page-relative runs for `tokens` tokens that lie in one block on both sides.

        `source_token`, `destination_token` are positions inside the two blocks.  The end is
        rounded up to each plane's tile.
        """
        key = (source_token, destination_token, tokens)
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= MAX_CACHED_TEMPLATES:
                self._cache.clear()
            found = self._cache[key] = merge_runs(self._build(*key))
        return found

    def _build(self, source_token: int, destination_token: int, tokens: int) -> list[Run]:
        runs: list[Run] = []
        done = 0
        kernel = self.source.kernel_tokens
        if self.whole_kernels and source_token % kernel == 0 and destination_token % kernel == 0:
            row = self.source.heads * self.head_token_bytes
            done = tokens // kernel * kernel
            if done:
                runs.append(Run(source_token * row, destination_token * row, done * row))
        while done < tokens:
            source_at, destination_at = source_token + done, destination_token + done
            step = min(
                tokens - done,
                kernel - source_at % kernel,
                self.destination.kernel_tokens - destination_at % self.destination.kernel_tokens,
            )
            self._piece(source_at, destination_at, step, runs)
            done += step
        return runs

    def _piece(self, source_at: int, destination_at: int, tokens: int, runs: list[Run]) -> None:
        """Tokens inside one kernel block on both sides: whole heads if all of it, else lanes."""
        source, destination = self.source, self.destination
        source_block, source_in = divmod(source_at, source.kernel_tokens)
        destination_block, destination_in = divmod(destination_at, destination.kernel_tokens)
        source_head_bytes = source.kernel_tokens * self.head_token_bytes
        destination_head_bytes = destination.kernel_tokens * self.head_token_bytes
        whole = tokens == source.kernel_tokens == destination.kernel_tokens
        for segment in self.heads:
            source_head = source_block * source.heads + segment.source_unit
            destination_head = destination_block * destination.heads + segment.destination_unit
            source_base = source_head * source_head_bytes
            destination_base = destination_head * destination_head_bytes
            if whole:
                length = segment.units * source_head_bytes
                runs.append(Run(source_base, destination_base, length))
                continue
            lanes = self._lanes(source_in, destination_in, tokens)
            for head in range(segment.units):
                source_from = source_base + head * source_head_bytes
                destination_from = destination_base + head * destination_head_bytes
                runs.extend(
                    Run(source_from + lane_source, destination_from + lane_destination, length)
                    for lane_source, lane_destination, length in lanes
                )

    def _lanes(self, source_in: int, destination_in: int, tokens: int) -> list[Run]:
        """Runs of one head relative to the head, for tokens from `source_in` / `destination_in`."""
        runs: list[Run] = []
        source_plane = destination_plane = 0
        for plane in self.planes:
            length = round_up(tokens, plane.tile_tokens) * plane.token_bytes
            source_lane = self.source.kernel_tokens * plane.token_bytes
            destination_lane = self.destination.kernel_tokens * plane.token_bytes
            source_from = source_plane + source_in * plane.token_bytes
            destination_from = destination_plane + destination_in * plane.token_bytes
            runs.extend(
                Run(
                    source_from + lane * source_lane,
                    destination_from + lane * destination_lane,
                    length,
                )
                for lane in range(plane.lanes)
            )
            source_plane += plane.lanes * source_lane
            destination_plane += plane.lanes * destination_lane
        return runs


def tail_runs(
    side: AttentionSide, planes: tuple[Plane, ...], token: int
) -> tuple[tuple[int, int], ...]:
    """(page offset, bytes) of everything in a page behind its first `token` tokens.

    Each plane's tail starts behind the tile that holds the last token, where reads end.
    """
    per_head = head_token_bytes(planes)
    kernel = side.kernel_tokens
    first_block, inside = divmod(token, kernel)
    runs: list[Run] = []
    if inside:
        head_base = first_block * side.heads * kernel * per_head
        for _ in range(side.heads):
            plane_base = head_base
            for plane in planes:
                start = round_up(inside, plane.tile_tokens)
                lane_bytes = kernel * plane.token_bytes
                length = (kernel - start) * plane.token_bytes
                for lane in range(plane.lanes if length else 0):
                    offset = plane_base + lane * lane_bytes + start * plane.token_bytes
                    runs.append(Run(offset, offset, length))
                plane_base += plane.lanes * lane_bytes
            head_base += kernel * per_head
        first_block += 1
    blocks = side.block_tokens // kernel - first_block
    if blocks > 0:
        block_bytes = side.heads * kernel * per_head
        runs.append(Run(first_block * block_bytes, first_block * block_bytes, blocks * block_bytes))
    return tuple((run.source_offset, run.length) for run in merge_runs(runs))
