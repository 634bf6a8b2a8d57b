"""What a request will cost before it is read, and what the reader must zero afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hybridpd_geometry.descriptors import build_table
from hybridpd_geometry.errors import GeometryError
from hybridpd_geometry.exact import ceil_div, round_up
from hybridpd_geometry.layers import ATTENTION, LayerGeometry
from hybridpd_geometry.layout import CacheLayout
from hybridpd_geometry.placement import RankPlacement
from hybridpd_geometry.read_plan import (
    PairPlan,
    ReadRequest,
    RequestBlocks,
    attention_side,
)
from hybridpd_geometry.sections import units_per_rank
from hybridpd_geometry.token_runs import tail_runs


@dataclass(frozen=True)
class Prediction:
    """The cost of one request on one destination rank, over all its sources.

    `descriptors` after joining neighbours inside a page, but no two blocks of the request taken
    as neighbours: the number moved is at most this. `by_section` splits `bytes` by section name.
    """

    bytes: int
    descriptors: int
    by_section: Mapping[str, int]


class ZeroRun(NamedTuple):
    """`length` bytes at `offset` of `block`'s page of `layer` that nothing will have written."""

    layer: str
    block: int
    offset: int
    length: int


def predict(plan: PairPlan, tokens: int, first_token: int = 0) -> Prediction:
    """Bytes and descriptors of reading the state and tokens [first_token, tokens)."""
    by_section: dict[str, int] = {}
    tp_size = plan.destination.tp_size
    for pair in plan.layers:
        layer = pair.destination
        if layer.kind == ATTENTION:
            heads = units_per_rank(layer.sections[0].section, tp_size)
            for plane in layer.planes:
                span = round_up(tokens, plane.tile_tokens) - first_token if tokens else 0
                size = heads * plane.lanes * plane.token_bytes * max(span, 0)
                by_section[plane.name] = by_section.get(plane.name, 0) + size
        else:
            for item in layer.sections:
                size = units_per_rank(item.section, tp_size) * item.section.unit_bytes
                by_section[item.section.name] = by_section.get(item.section.name, 0) + size
    return Prediction(
        bytes=sum(by_section.values()),
        descriptors=_descriptors(plan, tokens, first_token),
        by_section=by_section,
    )


def _descriptors(plan: PairPlan, tokens: int, first_token: int) -> int:
    """Count them on made-up placements whose blocks are all two apart."""
    source, destination = (_spread(layout, tokens) for layout in (plan.source, plan.destination))
    request = ReadRequest(tokens, source, destination, first_token)
    local = _virtual(plan.destination, plan.destination_rank, tokens)
    count = 0
    for rank in plan.sources:
        table = build_table(plan, rank, local, _virtual(plan.source, rank, tokens))
        count += len(table.ranges(request))
    return count


def _spread(layout: CacheLayout, tokens: int) -> RequestBlocks:
    # No block twice, as in a real cache: pieces of two groups would be taken as neighbours.
    span = 2 * max(1, ceil_div(tokens, layout.block_tokens))
    return RequestBlocks(
        tuple(
            tuple(range(span * group, span * (group + 1), 2))
            for group in range(len(layout.group_kinds))
        )
    )


def _virtual(layout: CacheLayout, rank: int, tokens: int) -> RankPlacement:
    blocks = 2 * max(1, ceil_div(tokens, layout.block_tokens)) * len(layout.group_kinds)
    regions = layout.region_count
    size = blocks * layout.page_bytes
    return RankPlacement(
        rank=rank,
        num_blocks=blocks,
        region_bases=tuple(region * size for region in range(regions)),
        block_strides=(layout.page_bytes,) * regions,
        layer_region={layer.name: layer.slot for layer in layout.layers},
    )


def page_tail(layout: CacheLayout, layer: LayerGeometry, token: int) -> tuple[tuple[int, int], ...]:
    """(page offset, bytes) of what an attention page holds behind its first `token` tokens."""
    return tail_runs(attention_side(layout, layer.sections[0]), layer.planes, token)


def local_zero_runs(plan: PairPlan, tokens: int, destination: RequestBlocks) -> list[ZeroRun]:
    """What the reader must zero: the token tails of the attention blocks it claimed.

    The engine does not zero blocks that a connector loads, and a kernel may look behind the last
    token. State pages are read whole; their padding is never looked at.
    """
    layout = plan.destination
    if tokens < 0:
        raise GeometryError("tokens", "zero or more", tokens)
    found: list[ZeroRun] = []
    index, inside = divmod(tokens, layout.block_tokens)
    tails: dict[tuple[object, ...], tuple[tuple[int, int], ...]] = {}
    for pair in plan.attention_pairs:
        layer = pair.destination
        ids = destination.groups[layer.group]
        for position in range(index, len(ids)):
            start = inside if position == index else 0
            # Most models have one kind of attention layer: its tails are the same in all of them.
            key = layer.sections, layer.planes, start
            if key not in tails:
                tails[key] = page_tail(layout, layer, start)
            found.extend(
                ZeroRun(layer.name, ids[position], offset, length) for offset, length in tails[key]
            )
    return found
