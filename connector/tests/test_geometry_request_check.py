"""The one look at a request says no to exactly those that a look at each thing refuses."""

import contextlib

from geometry_cases import Pair, block_count, pairs, request_blocks
from geometry_reads import memories
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridpd_geometry import (
    GeometryError,
    ReadRequest,
    RequestBlocks,
    build_table,
    plan_pair,
)

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def bent(data: st.DataObject, blocks: RequestBlocks, blocks_there: int) -> RequestBlocks:
    """Blocks with, maybe, an id too few, one of no block, a group too many or none at all."""
    groups = [list(group) for group in blocks.groups]
    for group in groups:
        how = data.draw(st.sampled_from(["", "", "", "short", "strange"]))
        if how == "short":
            del group[-1:]
        elif how == "strange" and group:
            at = data.draw(st.integers(0, len(group) - 1))
            group[at] = data.draw(st.sampled_from([-1, 0, blocks_there - 1, blocks_there, 1 << 70]))
    change = data.draw(st.sampled_from([0, 0, 0, 0, -1, 1]))
    groups = groups[:change] if change < 0 else groups + [[1]] * change
    return RequestBlocks(tuple(map(tuple, groups)))


def is_refused(pair: Pair, table, request: ReadRequest) -> bool:
    """By the words of the contract: blocks that exist, and enough of them."""
    try:
        table.plan.check_request(request)
    except GeometryError:
        return True
    sides = (
        (request.destination, pair.destination, table.local.num_blocks),
        (request.source, pair.source, table.remote.num_blocks),
    )
    return any(
        not 0 <= block_id < count
        for blocks, layout, count in sides
        for kind, ids in zip(layout.group_kinds, blocks.groups, strict=True)
        for block_id in (ids if kind == "attention" else ids[-1:])
    )


@SETTINGS
@given(pair=pairs(), data=st.data())
def test_the_same_requests_are_refused(pair, data):
    source = memories(pair.source, pair.tokens, 1 << 32, False)
    local = memories(pair.destination, pair.tokens, 1 << 40, False)[0].placement
    plan = plan_pair(pair.source, pair.destination, local.rank)
    rank = plan.sources[0]
    table = build_table(plan, rank, local, source[rank].placement)
    for _ in range(4):
        tokens = data.draw(st.integers(1, pair.tokens))
        sides = [
            bent(
                data,
                request_blocks(data, layout, tokens, data.draw(st.integers(0, 1))),
                block_count(layout, pair.tokens),
            )
            for layout in (pair.source, pair.destination)
        ]
        tokens += data.draw(st.sampled_from([0, 0, 0, 1, 400, -tokens - 1]))
        first = data.draw(st.sampled_from([0, 0, 0, 16, -1, 1000]))
        request = ReadRequest(tokens, *sides, first)
        refused = is_refused(pair, table, request)
        with contextlib.suppress(GeometryError) if refused else contextlib.nullcontext():
            table.check(request)
            assert not refused, f"let through: {request}"
