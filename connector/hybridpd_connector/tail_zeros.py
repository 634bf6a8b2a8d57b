"""What D zeroes itself, by templates: geometry's ``local_zero_runs`` as addresses.

Behind a request's last token its attention blocks hold bytes of requests before it, which no read
overwrites. They lie alike in every layer and head, so a few ``Tail``s, each of them a grid of equal
pieces, name them all, and whoever zeroes them needs one launch for each. All that differs between
requests is the token where the tail begins and the ids of the blocks.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hybridpd_geometry import ATTENTION, CacheLayout, LayerGeometry, RankPlacement, page_tail

MAX_CACHED_TEMPLATES = 4096


class Tail(NamedTuple):
    """``layers`` x ``runs`` pieces of ``length`` bytes, the first one at ``address``, neighbours
    ``layer_step`` and ``run_step`` bytes apart."""

    address: int
    layers: int
    layer_step: int
    runs: int
    run_step: int
    length: int

    @property
    def end(self) -> int:
        """The address behind the last byte."""
        layers, runs = (self.layers - 1) * self.layer_step, (self.runs - 1) * self.run_step
        return self.address + layers + runs + self.length

    def ranges(self) -> Iterator[tuple[int, int]]:
        """(address, length in bytes) of every piece."""
        for layer in range(self.layers):
            for run in range(self.runs):
                yield self.address + layer * self.layer_step + run * self.run_step, self.length


Progression = tuple[int, int, int, int]
"""(first position, count, step, length): pieces of equal length at equal distances."""


class _Alike(NamedTuple):
    """Attention layers with equal pages that share block ids and the stride between blocks;
    ``regions``: where these begin, as progressions."""

    layer: LayerGeometry
    block_stride: int
    regions: list[Progression]


class TailZeros:
    """See the module. For one rank; not thread-safe."""

    def __init__(self, layout: CacheLayout, placement: RankPlacement) -> None:
        self._layout = layout
        found: dict[tuple[object, ...], tuple[LayerGeometry, int, list[int]]] = {}
        for layer in layout.layers:
            if layer.kind == ATTENTION:
                region = placement.layer_region[layer.name]
                stride = placement.block_strides[region]
                key = layer.group, layer.sections, layer.planes, stride
                _, _, bases = found.setdefault(key, (layer, stride, []))
                bases.append(placement.region_bases[region])
        self._alike = tuple(
            _Alike(layer, stride, _progressions([(base, 0) for base in sorted(bases)]))
            for layer, stride, bases in found.values()
        )
        self._templates: dict[tuple[int, int], tuple[Tail, ...]] = {}

    def __repr__(self) -> str:
        return f"TailZeros(sets={len(self._alike)}, kept={self.kept})"

    @property
    def kept(self) -> int:
        """Templates that are kept."""
        return len(self._templates)

    def of(self, tokens: int, block_ids: Sequence[Sequence[int]]) -> list[Tail]:
        """The tails of a request of ``tokens`` tokens in the blocks that it claims, per group."""
        index, inside = divmod(tokens, self._layout.block_tokens)
        found: list[Tail] = []
        for number, alike in enumerate(self._alike):
            ids = block_ids[alike.layer.group]
            for position in range(index, len(ids)):
                moved = ids[position] * alike.block_stride
                token = inside if position == index else 0
                found += [
                    Tail(address + moved, *shape)
                    for address, *shape in self._template(number, token)
                ]
        return found

    def _template(self, number: int, token: int) -> tuple[Tail, ...]:
        """The tails of block 0 behind its first ``token`` tokens, in all layers of a set."""
        key = number, token
        template = self._templates.get(key)
        if template is None:
            alike = self._alike[number]
            runs = _progressions(page_tail(self._layout, alike.layer, token))
            template = tuple(
                Tail(base + offset, layer_count, layer_step, run_count, run_step, length)
                for base, layer_count, layer_step, _ in alike.regions
                for offset, run_count, run_step, length in runs
            )
            if len(self._templates) >= MAX_CACHED_TEMPLATES:
                self._templates.clear()
            self._templates[key] = template
        return template


def _progressions(pieces: Sequence[tuple[int, int]]) -> list[Progression]:
    """Ascending (position, length) with as many neighbours in each progression as there are."""
    found: list[Progression] = []
    for position, length in pieces:
        if found and found[-1][3] == length:
            first, count, step, _ = found[-1]
            if count == 1 or position == first + count * step:
                found[-1] = first, count + 1, (position - first) // count, length
                continue
        found.append((position, 1, 0, length))
    return found
