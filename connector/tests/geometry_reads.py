"""Reads carried out on real bytes, and what must be true of the pages afterwards.

The ids of a plan become addresses the way NIXL counts them, and bytes are copied between the
buffers of two made-up engines.
"""

from unittest import mock

import numpy as np
import pytest
from geometry_cases import block_count
from geometry_reference import GlobalState, RankMemory, address_of

from hybridpd_connector import request_ranges
from hybridpd_connector.errors import StateError
from hybridpd_connector.request_ranges import FEW_PIECES
from hybridpd_connector.tail_zeros import TailZeros
from hybridpd_geometry import (
    CacheLayout,
    DescriptorTable,
    IdRun,
    RankPlacement,
    ReadRequest,
    RequestBlocks,
    Row,
    ZeroRun,
    build_table,
    local_zero_runs,
    plan_pair,
    units_per_rank,
)


def memories(
    layout: CacheLayout, tokens: int, base: int, interleaved: bool = False
) -> list[RankMemory]:
    blocks = block_count(layout, tokens)
    return [
        RankMemory(layout, rank, blocks, base * (rank + 1) + 64, interleaved)
        for rank in range(layout.tp_size)
    ]


def read_all(
    source: list[RankMemory], destination: RankMemory, request: ReadRequest
) -> tuple[int, int]:
    """Run the whole plan of one destination rank; returns (bytes, descriptors) moved."""
    plan = plan_pair(source[0].layout, destination.layout, destination.placement.rank)
    moved = descriptors = 0
    for rank in plan.sources:
        table = build_table(plan, rank, destination.placement, source[rank].placement)
        local_rows, remote_rows = table.local_rows, table.remote_rows
        ranges = table.ranges(request)
        check_templates(table, request)
        descriptors += len(ranges)
        left = sum(length for _, _, length in ranges)
        for run in table.id_runs(request):
            length = run.units * run.unit_bytes
            here = _dense(local_rows, run.local_first, run)
            there = _dense(remote_rows, run.remote_first, run)
            # Inside one of the ranges, at the same distance from its begin on both sides.
            assert any(
                0 <= here - ours == there - theirs <= size - length for ours, theirs, size in ranges
            )
            left -= length
            into, origin = (
                memory.span(_dense(rows, first, run), length)
                for memory, rows, first in (
                    (destination, local_rows, run.local_first),
                    (source[rank], remote_rows, run.remote_first),
                )
            )
            destination.bytes[into] = source[rank].bytes[origin]
            destination.writes[into] += 1
            moved += length
        assert left == 0
    return moved, descriptors


def check_templates(table: DescriptorTable, request: ReadRequest) -> None:
    """What the connector posts, by templates, is the reference: the same ranges in the same order,
    whether it is written out by Python or by numpy. Of a request that has all its tokens already
    and no state nothing is to be read; the connector begins no such load, and is told so here."""
    expected = table.ranges(request)
    for few in (FEW_PIECES, 0):
        with mock.patch.object(request_ranges, "FEW_PIECES", few):
            templates = request_ranges.RequestRanges(table)
            if not expected:
                with pytest.raises(StateError, match="at least one"):
                    templates.of(request)
                continue
            ranges, size = templates.of(request)
        assert [tuple(map(int, piece)) for piece in ranges] == expected
        assert size == sum(length for _, _, length in expected)


def _dense(rows: tuple[Row, ...], first: int, run: IdRun) -> int:
    """Address of id `first`, whose following `units` ids must lie one behind the other."""
    address, length = address_of(rows, first)
    assert length == run.unit_bytes
    last = address_of(rows, first + run.units - 1)
    assert last == (address + (run.units - 1) * length, length)
    return address


def zero_tails(destination: RankMemory, request: ReadRequest) -> None:
    plan = plan_pair(destination.layout, destination.layout, destination.placement.rank)
    layout = destination.layout
    runs = local_zero_runs(plan, request.tokens, request.destination)
    # What the connector zeroes, by templates: the same bytes.
    tails = TailZeros(layout, destination.placement).of(request.tokens, request.destination.groups)
    pieces = [piece for tail in tails for piece in tail.ranges()]
    assert sorted(pieces) == sorted(zero_ranges(runs, destination.placement))
    for run in runs:
        at = destination.page_at(layout.by_name[run.layer], run.block) + run.offset
        destination.bytes[at : at + run.length] = 0
        destination.writes[at : at + run.length] += 1


def zero_ranges(runs: list[ZeroRun], placement: RankPlacement) -> list[tuple[int, int]]:
    """(address, length in bytes) of each run on this rank."""
    ranges: list[tuple[int, int]] = []
    for run in runs:
        region = placement.layer_region[run.layer]
        base = placement.region_bases[region] + run.block * placement.block_strides[region]
        ranges.append((base + run.offset, run.length))
    return ranges


def check_pages(
    memory: RankMemory, before: np.ndarray, made: GlobalState, blocks: RequestBlocks
) -> None:
    """Claimed pages hold the single engine's content; every other byte is untouched."""
    expected = before.copy()
    for layer in memory.layout.layers:
        for index, block in enumerate(blocks.groups[layer.group]):
            page = memory.expected_page(made, layer, index)
            at = memory.page_at(layer, block)
            expected[at : at + len(page)] = page
    assert np.array_equal(memory.bytes, expected), wrong_sections(memory, made, blocks)
    # Each byte of content is read or zeroed exactly once, each other byte never.
    assert np.array_equal(memory.writes, content_map(memory, blocks))


def content_map(memory: RankMemory, blocks: RequestBlocks) -> np.ndarray:
    """1 for every byte of the request's pages that is not padding."""
    written = np.zeros(len(memory.bytes), dtype=np.int32)
    for layer in memory.layout.layers:
        for block in blocks.groups[layer.group]:
            at = memory.page_at(layer, block)
            written[at : at + memory.layout.content_bytes(layer)] += 1
    return written


def wrong_sections(memory: RankMemory, made: GlobalState, blocks: RequestBlocks) -> list[str]:
    """Every section of the request's pages that differs from the single engine's, by name.

    Empty when what differs lies outside the request's pages or in their padding.
    """
    wrong = []
    for layer in memory.layout.layers:
        for index, block in enumerate(blocks.groups[layer.group]):
            page = memory.expected_page(made, layer, index)
            at = memory.page_at(layer, block)
            for item in layer.sections:
                start, end = item.page_offset, len(page)
                if layer.kind == "state":
                    share = units_per_rank(item.section, memory.layout.tp_size)
                    end = start + share * item.section.unit_bytes
                if not np.array_equal(memory.bytes[at + start : at + end], page[start:end]):
                    wrong.append(f"{layer.name}.{item.section.name}, block {index}")
    return wrong
