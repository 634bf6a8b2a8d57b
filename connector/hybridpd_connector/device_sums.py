"""Sums of a rank's cache, computed by the engine's own device: a GPU sums GPU memory.

The same operations run on a CPU. Each equals ``hybridpd_geometry.row_of`` word by word. On a GPU
they run on a stream of their own that first waits for the work the engine has launched so far:
sums of a prefill see its last kernel, and sums of a load also see what an earlier owner of its
blocks may still write. Nothing here waits for the device; results go to pinned host memory.
"""

import array
import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import gcd

import torch

from hybridpd_connector.agent_api import MemoryRegion
from hybridpd_connector.errors import SumError
from hybridpd_connector.sum_board import HEADER_WORDS, MARK, PAGE_BYTES, PendingSums
from hybridpd_geometry import CacheLayout, LayerGeometry, Plane, RankPlacement, RankSums, SumRequest
from hybridpd_geometry.checksums import (
    WEIGHT_MIX,
    WEIGHT_STEP,
    HeadSums,
    StateSums,
    chunk_words,
    word_bytes,
)
from hybridpd_geometry.packings import head_token_bytes

BATCH_BYTES = 32 << 20
"""Pages gathered at once; the products of their words take twice as much."""

FEW_PAGES = 64
"""Up to here pages are joined one by one; above, a list of their numbers goes to the device."""

_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


class DeviceSums:
    """The ``Summer`` of one rank. ``views``: its allocations as bytes, one for each region."""

    def __init__(
        self,
        layout: CacheLayout,
        placement: RankPlacement,
        regions: Sequence[MemoryRegion],
        views: Sequence[torch.Tensor],
    ) -> None:
        self._layout = layout
        self._placement = placement
        self._device = views[0].device
        self._pages = [
            _region_pages(layout, placement, index, regions, views)
            for index in range(len(placement.region_bases))
        ]
        self._orders: dict[int, RankSums] = {}
        self._weights = torch.empty(0, dtype=torch.int64)
        self._boards: list[tuple[int, torch.Tensor]] = []
        self._stream = torch.cuda.Stream(self._device) if self._on_gpu else None

    @property
    def _on_gpu(self) -> bool:
        return str(self._device.type) == "cuda"

    def allocate(self, size_bytes: int) -> int:
        """Zeroed host memory, pinned when there is a GPU, on a page border."""
        memory = torch.zeros(size_bytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=self._on_gpu)
        first = int(memory.data_ptr())
        address = -(-first // PAGE_BYTES) * PAGE_BYTES
        start = address - first
        self._boards.append((address, memory[start : start + size_bytes]))
        return address

    def publish(self, request: SumRequest, sequence: int, address: int) -> None:
        """Fill the slot at ``address`` with the row of ``request`` and its header."""
        with self._in_order():
            row = self._row(request)
            words = row.numel()
            weights = self._weights_up_to(words + 1)
            seal = (weights[:words] * row).sum() + weights[words] * sequence
            head = [self._word(MARK), self._word(sequence), self._word(words), seal.view(1)]
            slot = torch.cat([*head, row])
            self._board_at(address, (HEADER_WORDS + words) * 8).copy_(slot, non_blocking=True)

    def start(self, request: SumRequest) -> PendingSums:
        """Sum what a load brought."""
        with self._in_order():
            row = self._row(request)
            if not self._on_gpu:
                return _Pending(row, None)
            host = torch.empty(row.shape, dtype=torch.int64, pin_memory=True)
            host.copy_(row, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            return _Pending(host, event)

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[None]:
        """Behind the engine's work so far; the device's errors become ours."""
        try:
            with torch.inference_mode():
                if self._stream is None:
                    yield
                    return
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(self._stream):
                    yield
        except (RuntimeError, IndexError) as error:
            raise SumError("checksums", "a device that sums", str(error)) from error

    def _word(self, value: int) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.int64, device=self._device)

    def _board_at(self, address: int, size_bytes: int) -> torch.Tensor:
        for start, memory in self._boards:
            at = address - start
            if 0 <= at <= memory.numel() - size_bytes:
                return memory[at : at + size_bytes].view(torch.int64)
        raise SumError("checksum slot", "memory from allocate", hex(address))

    def _weights_up_to(self, count: int) -> torch.Tensor:
        if self._weights.numel() < count:
            index = torch.arange(1, 2 * count + 1, dtype=torch.int64, device=self._device)
            mixed = index * _signed(WEIGHT_STEP)
            mixed = (mixed ^ (mixed >> 32 & 0xFFFFFFFF)) * _signed(WEIGHT_MIX)
            self._weights = (mixed ^ (mixed >> 32 & 0xFFFFFFFF)) | 1
        return self._weights

    def _row(self, request: SumRequest) -> torch.Tensor:
        """The whole row, on the device."""
        sums = self._orders.get(request.pieces_tp)
        if sums is None:
            sums = self._orders[request.pieces_tp] = RankSums(self._layout, request.pieces_tp)
        row = torch.zeros(sums.words(request.chunks), dtype=torch.int64, device=self._device)
        for states in _alike_states(sums.states):
            self._sum_states(states, request, row)
        if request.chunks > 0:
            heads = row[sums.state_words :].view(sums.heads, request.chunks)
            for layers in _alike_heads(sums.attention):
                self._sum_heads(layers, request, heads)
        return row

    def _sum_states(
        self, layers: Sequence[Sequence[StateSums]], request: SumRequest, row: torch.Tensor
    ) -> None:
        """Layers of alike sections, one behind the other in the row."""
        step = max(1, BATCH_BYTES // self._layout.page_bytes)
        for first in range(0, len(layers), step):
            batch = layers[first : first + step]
            names = [sections[0].layer for sections in batch]
            blocks = [request.blocks.groups[layer.group][-1:] for layer in names]
            pages = self._gather(names, blocks)[:, 0]
            sums = torch.cat([self._piece_sums(pages, item) for item in batch[0]], dim=1)
            start = batch[0][0].first_word
            row[start : start + sums.numel()] = sums.flatten()

    def _piece_sums(self, pages: torch.Tensor, item: StateSums) -> torch.Tensor:
        """[layers, pieces] of one section, from pages [layers, bytes]."""
        start = item.placed.page_offset
        section = pages[:, start : start + item.pieces * item.piece_bytes]
        words = _words(section, item.piece_bytes).unflatten(-1, (item.pieces, -1))
        count = words.shape[-1]
        return (words * self._weights_up_to(count)[:count]).sum(-1)

    def _sum_heads(
        self, layers: Sequence[HeadSums], request: SumRequest, heads: torch.Tensor
    ) -> None:
        """Alike attention layers of one group. ``heads``: [heads of the rank, chunks], zero."""
        chunk_bytes = head_token_bytes(layers[0].layer.planes) * request.chunk_tokens
        chunk_bytes *= layers[0].heads
        chunk_step = min(request.chunks, max(1, BATCH_BYTES // chunk_bytes))
        layer_step = max(1, BATCH_BYTES // (chunk_bytes * chunk_step))
        for first in range(0, len(layers), layer_step):
            batch = layers[first : first + layer_step]
            rows = heads[batch[0].heads_before : batch[-1].heads_before + batch[-1].heads]
            for chunk in range(0, request.chunks, chunk_step):
                part = rows[:, chunk : chunk + chunk_step]
                self._sum_chunks(batch, request, request.first_chunk + chunk, part)

    def _sum_chunks(
        self, layers: Sequence[HeadSums], request: SumRequest, chunk: int, out: torch.Tensor
    ) -> None:
        """The chunks from ``chunk`` on of some layers into ``out``: [their heads, chunks]."""
        layout, planes, count = self._layout, layers[0].layer.planes, layers[0].heads
        first = chunk * request.chunk_tokens
        last = min(first + out.shape[1] * request.chunk_tokens, request.tokens)
        block = first // layout.block_tokens
        ids = request.blocks.groups[layers[0].layer.group][block : -(-last // layout.block_tokens)]
        pages = self._gather([item.layer for item in layers], [ids] * len(layers))
        kernel, head_bytes = layout.kernel_block_tokens, head_token_bytes(planes)
        content = pages[..., : layout.block_tokens * count * head_bytes]
        # [layers, blocks, kernel blocks, heads, bytes of a head]
        packed = content.unflatten(-1, (-1, count, kernel * head_bytes))
        start = weight = 0
        for plane in planes:
            size = plane.lanes * kernel * plane.token_bytes
            tiles = _tiles(packed[..., start : start + size], plane, kernel)
            inside = (first - block * layout.block_tokens) // plane.tile_tokens
            tiles = tiles[:, :, :, inside : inside - (first - last) // plane.tile_tokens]
            words = chunk_words(plane, request.chunk_tokens)
            weights = self._weights_up_to(weight + words)[weight : weight + words]
            _add_chunks(tiles, weights, request.chunk_tokens // plane.tile_tokens, out)
            start += size
            weight += words

    def _gather(
        self, layers: Sequence[LayerGeometry], blocks: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Bytes [layers, blocks of each, page bytes] of equally many blocks of each layer."""
        count = len(blocks[0])
        regions = [self._pages[self._placement.layer_region[layer.name]] for layer in layers]
        if count * len(layers) <= FEW_PAGES:
            rows = [
                pages[block] for pages, ids in zip(regions, blocks, strict=True) for block in ids
            ]
            return torch.stack(rows).view(torch.uint8).unflatten(0, (len(layers), count))
        found = []
        for pages, ids in zip(regions, blocks, strict=True):
            if not 0 <= min(ids) <= max(ids) < pages.shape[0]:
                # On a GPU an index out of range ends the process instead of raising.
                raise IndexError(f"blocks {min(ids)} to {max(ids)} of {pages.shape[0]}")
            index = torch.tensor(ids, dtype=torch.int64, pin_memory=self._on_gpu)
            found.append(pages.index_select(0, index.to(self._device, non_blocking=True)))
        return torch.stack(found).view(torch.uint8)


class _Pending:
    """A row on its way to the host. ``event`` is None when it is there already."""

    def __init__(self, row: torch.Tensor, event: "torch.cuda.Event | None") -> None:
        self._row = row
        self._event = event

    def words(self) -> Sequence[int] | None:
        if self._event is not None and not self._event.query():
            return None
        words = array.array("Q")
        words.frombytes(ctypes.string_at(self._row.data_ptr(), self._row.numel() * 8))
        return words


def _region_pages(
    layout: CacheLayout,
    placement: RankPlacement,
    region: int,
    memory: Sequence[MemoryRegion],
    views: Sequence[torch.Tensor],
) -> torch.Tensor:
    """A region as [blocks, words of a page], in the widest words that its addresses allow."""
    base, stride = placement.region_bases[region], placement.block_strides[region]
    for allocation, view in zip(memory, views, strict=True):
        start = base - allocation.address
        end = start + (placement.num_blocks - 1) * stride + layout.page_bytes
        if start >= 0 and end <= allocation.length_bytes:
            width = gcd(8, start, stride, layout.page_bytes, view.data_ptr(), view.numel())
            wide = {8: torch.int64, **_WORDS}[width]
            shape, strides = (
                (placement.num_blocks, layout.page_bytes // width),
                (stride // width, 1),
            )
            return view.view(wide).as_strided(shape, strides, start // width)
    raise SumError(f"region {region}", "inside one allocation", hex(base))


def _words(data: torch.Tensor, length: int) -> torch.Tensor:
    """Bytes as the words in which pieces of ``length`` bytes are summed."""
    width = word_bytes(length)
    if data.storage_offset() % width or any(step % width for step in data.stride()[:-1]):
        data = data.clone(memory_format=torch.contiguous_format)
    return data.view(_WORDS[width])


def _tiles(plane_bytes: torch.Tensor, plane: Plane, kernel: int) -> torch.Tensor:
    """[layers, blocks, kernel blocks, heads, bytes of the plane] as
    [layers, heads, lanes, tiles of all blocks in token order, words of a tile]."""
    words = _words(plane_bytes, plane.tile_tokens * plane.token_bytes)
    split = words.unflatten(-1, (plane.lanes, kernel // plane.tile_tokens, -1))
    return split.permute(0, 3, 4, 1, 2, 5, 6).flatten(3, 5)


def _add_chunks(
    tiles: torch.Tensor, weights: torch.Tensor, per_chunk: int, out: torch.Tensor
) -> None:
    """Add the sums of chunks of ``per_chunk`` tiles; the last one may be shorter."""
    layers, heads, lanes, count, words = tiles.shape
    shaped = weights.view(lanes, per_chunk, words)
    whole = count // per_chunk
    if whole:
        chunks = tiles[:, :, :, : whole * per_chunk].unflatten(3, (whole, per_chunk))
        sums = (chunks * shaped[:, None]).sum((2, 4, 5))
        out[:, :whole] += sums.view(layers * heads, whole)
    rest = count - whole * per_chunk
    if rest:
        sums = (tiles[:, :, :, whole * per_chunk :] * shaped[:, :rest]).sum((2, 3, 4))
        out[:, whole] += sums.view(layers * heads)


def _alike_states(states: Sequence[StateSums]) -> Iterator[list[list[StateSums]]]:
    """Layers in the order of the row, neighbours with alike sections together."""
    by_layer = [list(items) for _, items in groupby(states, key=lambda item: item.layer.name)]
    for _, layers in groupby(by_layer, key=lambda items: [_shape(item) for item in items]):
        yield list(layers)


def _shape(item: StateSums) -> tuple[int, int, int]:
    return item.placed.page_offset, item.pieces, item.piece_bytes


def _alike_heads(layers: Sequence[HeadSums]) -> Iterator[list[HeadSums]]:
    for _, alike in groupby(layers, key=lambda i: (i.layer.group, i.heads, i.layer.planes)):
        yield list(alike)


def _signed(value: int) -> int:
    """A 64-bit word as PyTorch writes it."""
    return value - (1 << 64) if value >> 63 else value
