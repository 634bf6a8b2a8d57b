"""What a single engine's pages hold, written from first principles with numpy.

Nothing here uses the planner: global tensors are made once, every rank's pages are cut out of them
the way vLLM's loaders and kernels do it, and tests compare them with what a read plan delivered.
"""

from dataclasses import dataclass, field

import numpy as np

from hybridpd_geometry import CacheLayout, LayerGeometry, RankPlacement, RequestBlocks, Row

Bytes = np.ndarray


@dataclass
class GlobalState:
    """A request's state, not divided by TP: per layer and section the bytes of every unit."""

    state: dict[str, dict[str, Bytes]] = field(default_factory=dict)  # [extent, unit_bytes]
    keys: dict[str, Bytes] = field(default_factory=dict)  # [tokens, heads, elements, element bytes]
    values: dict[str, Bytes] = field(default_factory=dict)


def make_state(layout: CacheLayout, tokens: int, seed: int) -> GlobalState:
    """Random bytes without zeros (zero means "nothing was written" in comparisons)."""
    random = np.random.default_rng(seed)
    made = GlobalState()
    for layer in layout.layers:
        if layer.kind == "state":
            made.state[layer.name] = {
                item.section.name: _noise(random, item.section.extent, item.section.unit_bytes)
                for item in layer.sections
            }
        else:
            heads = layer.sections[0].section.extent
            element = {"float32": 4, "bfloat16": 2, "fp8_e4m3": 1}[layout.kv_dtype]
            width, v_width = _widths(layer, element)
            made.keys[layer.name] = _noise(random, tokens, heads, width, element)
            made.values[layer.name] = _noise(random, tokens, heads, v_width, element)
    return made


def _noise(random: np.random.Generator, *shape: int) -> Bytes:
    return random.integers(1, 256, size=shape, dtype=np.uint8)


def _widths(layer: LayerGeometry, element: int) -> tuple[int, int]:
    """(K elements, V elements) of one head and token; a latent or packed head is all K."""
    planes = {plane.name: plane.lanes * plane.token_bytes // element for plane in layer.planes}
    if "k" in planes:
        return planes["k"], planes["v"]
    return next(iter(planes.values())), 0


def units_of(extent: int, tp_size: int, rank: int) -> slice:
    """vLLM's sharding: an equal slice, or (more ranks than units) one shared unit."""
    if extent >= tp_size:
        share = extent // tp_size
        return slice(rank * share, (rank + 1) * share)
    unit = rank // (tp_size // extent)
    return slice(unit, unit + 1)


def state_page(layout: CacheLayout, layer: LayerGeometry, made: GlobalState, rank: int) -> Bytes:
    """One rank's state page without padding: conv streams, then the temporal state."""
    parts = [
        made.state[layer.name][item.section.name][
            units_of(item.section.extent, layout.tp_size, rank)
        ].reshape(-1)
        for item in layer.sections
    ]
    return np.concatenate(parts)


def attention_page(
    layout: CacheLayout, layer: LayerGeometry, made: GlobalState, rank: int, block: int
) -> Bytes:
    """One rank's attention page of logical block `block`; tokens beyond the request are zero."""
    heads = units_of(layer.sections[0].section.extent, layout.tp_size, rank)
    size = layout.kernel_block_tokens
    parts = []
    for first in range(block * layout.block_tokens, (block + 1) * layout.block_tokens, size):
        keys = _window(made.keys[layer.name], first, size)[:, heads]
        values = _window(made.values[layer.name], first, size)[:, heads]
        parts += [
            pack_head(layout.packing, keys[:, head], values[:, head])
            for head in range(keys.shape[1])
        ]
    return np.concatenate(parts)


def _window(tensor: Bytes, first: int, size: int) -> Bytes:
    window = np.zeros((size, *tensor.shape[1:]), dtype=np.uint8)
    piece = tensor[first : first + size]
    window[: len(piece)] = piece
    return window


def pack_head(packing: str, keys: Bytes, values: Bytes) -> Bytes:
    """One head of one kernel block; `keys`, `values` are [tokens, elements, element bytes]."""
    tokens, width, element = keys.shape
    if packing in ("token", "latent"):
        return np.concatenate([keys, values], axis=1).reshape(-1)
    if packing == "cpu_vec":
        return np.concatenate([keys.transpose(1, 0, 2).reshape(-1), values.reshape(-1)])
    # cpu_amx: 16 tokens of K with pairs of features innermost; 16 features of V, token pairs.
    key_tiles = keys.reshape(tokens // 16, 16, width // 2, 2, element).transpose(0, 2, 1, 3, 4)
    lanes = values.shape[1] // 16
    value_lanes = values.reshape(tokens // 2, 2, lanes, 16, element).transpose(2, 0, 3, 1, 4)
    return np.concatenate([key_tiles.reshape(-1), value_lanes.reshape(-1)])


class RankMemory:
    """One rank's cache in one buffer, with addresses that look like another process's.

    Regions lie one behind the other, or (`interleaved`) all pages of a block side by side.
    """

    def __init__(
        self, layout: CacheLayout, rank: int, num_blocks: int, base: int, interleaved: bool
    ) -> None:
        self.layout = layout
        self.base = base
        regions, page = layout.region_count, layout.page_bytes
        total = regions * num_blocks * page
        self.bytes = np.random.default_rng(base % 97 + rank).integers(
            0, 256, size=total, dtype=np.uint8
        )
        self.writes = np.zeros(total, dtype=np.int32)
        region_stride, block_stride = num_blocks * page, page
        if interleaved:
            region_stride, block_stride = page, regions * page
        self.placement = RankPlacement(
            rank=rank,
            num_blocks=num_blocks,
            region_bases=tuple(base + region * region_stride for region in range(regions)),
            block_strides=(block_stride,) * regions,
            layer_region={layer.name: layer.slot for layer in layout.layers},
        )

    def page_at(self, layer: LayerGeometry, block: int) -> int:
        """Index of the page's first byte in `bytes`."""
        placement = self.placement
        region = placement.layer_region[layer.name]
        address = placement.region_bases[region] + block * placement.block_strides[region]
        return address - self.base

    def write_request(self, made: GlobalState, blocks: RequestBlocks) -> None:
        """Write all pages of a request as the engine's kernels would have."""
        for layer in self.layout.layers:
            for index, block in enumerate(blocks.groups[layer.group]):
                at = self.page_at(layer, block)
                page = self.expected_page(made, layer, index)
                self.bytes[at : at + len(page)] = page

    def expected_page(self, made: GlobalState, layer: LayerGeometry, index: int) -> Bytes:
        """The content of the layer's `index`-th page of the request (no padding)."""
        if layer.kind == "state":
            return state_page(self.layout, layer, made, self.placement.rank)
        return attention_page(self.layout, layer, made, self.placement.rank, index)

    def span(self, address: int, length: int) -> slice:
        """Where `length` bytes at `address` lie in `bytes`; fails outside of it."""
        start = address - self.base
        assert start >= 0
        assert start + length <= len(self.bytes)
        return slice(start, start + length)


def address_of(rows: tuple[Row, ...], descriptor_id: int) -> tuple[int, int]:
    """(address, length) of an id, by counting through the rows as NIXL does."""
    rest = descriptor_id
    for row in rows:
        if rest < row.count:
            return row.address + rest * row.stride, row.length
        rest -= row.count
    raise AssertionError(f"id {descriptor_id} lies behind the last row")
