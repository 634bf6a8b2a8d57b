"""Every family's bytes between the agents of two engines: one class, run on every agent.

No engine runs. Both sides' caches are laid out by the geometry and lie in memory of their own, one
agent a rank; P's pages are filled with what a single engine's would hold, D's with noise. After the
posts of the connector's own tables each section of D must be the single engine's, each byte beside
it untouched, and the bytes that the agent counted the ones that were predicted.

A test file subclasses ``FamilyBytes`` and says how agents are made.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
from geometry_cases import block_count, dealt_blocks
from geometry_families import ROWS, Row
from geometry_reads import content_map, wrong_sections
from geometry_reference import RankMemory, make_state

from hybridpd_connector.agent_api import Agent, Memory, MemoryRegion, ReadState
from hybridpd_connector.read_tables import row_array
from hybridpd_connector.request_ranges import RequestRanges
from hybridpd_connector.tail_zeros import TailZeros
from hybridpd_geometry import (
    AttentionFacts,
    CacheLayout,
    EngineFacts,
    RankPlacement,
    ReadRequest,
    StateFacts,
    build_table,
    layout_of,
    plan_engine,
    plan_pair,
    predict,
)

EIGHT_BITS = Row(
    StateFacts("mamba2", inner=32, heads=16, head_dim=2, state_size=3, groups=8),
    AttentionFacts(16, 2, 16, 16),
    (1, 2, 4, 8),
)
"""A model whose cache is stored in fp8, with heads as wide as the CPU's lanes."""
PACKINGS = ("token", "cpu_vec", "cpu_amx")
TP_PAIRS = ((1, 1), (1, 2), (2, 1), (2, 4))
BLOCKS = {"equal blocks": ((1, 1), (1, 1)), "other blocks": ((3, 2), (2, 4))}
"""Per side: `--block-size` in units of 16 tokens, and kernel blocks in a block."""
MAX_POLLS = 5_000_000

_serial = itertools.count()


def layout(name: str, tp_size: int, multiple: int, ratio: int) -> CacheLayout:
    return layout_with(ROWS[name], EngineFacts(tp_size, block_size=16 * multiple), ratio, name)


def layout_with(row: Row, engine: EngineFacts, ratio: int, name: str) -> CacheLayout:
    model = row.model(name)
    kernel = plan_engine(model, engine).block_tokens // ratio
    return layout_of(model, dataclasses.replace(engine, kernel_block_tokens=kernel), name)


def request_between(source: CacheLayout, destination: CacheLayout) -> ReadRequest:
    """A little more than a block of either side."""
    tokens = max(source.block_tokens, destination.block_tokens) + 9
    return ReadRequest(
        tokens, dealt_blocks(source, tokens, 0), dealt_blocks(destination, tokens, 1)
    )


class Rank:
    """One rank: its cache in memory, the agent that registered it."""

    def __init__(self, layout: CacheLayout, rank: int, tokens: int, agent: Agent) -> None:
        memory = RankMemory(layout, rank, block_count(layout, tokens), 0, interleaved=False)
        memory.base = memory.bytes.ctypes.data
        bases = tuple(memory.base + base for base in memory.placement.region_bases)
        memory.placement = dataclasses.replace(memory.placement, region_bases=bases)
        self.memory = memory
        self.agent = agent
        agent.register([MemoryRegion(memory.base, len(memory.bytes))])

    def zero(self, address: int, length: int) -> None:
        self.memory.bytes[self.memory.span(address, length)] = 0

    def told(self) -> "Told":
        """What a reader is told of this rank."""
        return Told(self.memory.layout, self.memory.placement, self.agent.metadata())


class Told(NamedTuple):
    """A rank of P as its reader knows it, from the same process or from another."""

    layout: CacheLayout
    placement: RankPlacement
    metadata: bytes


def load(
    reader: Rank, sources: list[Told], request: ReadRequest, progress: Callable[[], object]
) -> int:
    """All reads of one rank of D, as the connector posts them; the bytes its agent counted.

    `progress`: what lets P's agents answer, where they do not by themselves.
    """
    plan = plan_pair(sources[0].layout, reader.memory.layout, reader.memory.placement.rank)
    counted = 0
    for rank in plan.sources:
        source = sources[rank]
        table = build_table(plan, rank, reader.memory.placement, source.placement)
        peer = reader.agent.add_peer(source.metadata)
        here = reader.agent.prepare(None, row_array(table.local_rows), Memory.DRAM)
        there = reader.agent.prepare(peer, row_array(table.remote_rows), Memory.DRAM)
        read = reader.agent.post_ranges(here, there, RequestRanges(table).of(request).ranges)
        for _ in range(MAX_POLLS):
            state = reader.agent.poll(read)
            if state is not ReadState.PENDING:
                break
            progress()
        assert state is ReadState.DONE
        counted += reader.agent.telemetry(read).total_bytes
        assert reader.agent.release_read(read)
        for prepared in (here, there):
            reader.agent.release_list(prepared)
    tails = TailZeros(reader.memory.layout, reader.memory.placement)
    for tail in tails.of(request.tokens, request.destination.groups):
        for address, length in tail.ranges():
            reader.zero(address, length)
    assert counted == predict(plan, request.tokens).bytes
    return counted


class FamilyBytes:
    """Subclass this as ``Test...`` and implement ``make_agent``."""

    def make_agent(self, name: str) -> Agent:
        raise AssertionError("the subclass makes the agent")

    def ranks(self, side: str, layout: CacheLayout, tokens: int) -> list[Rank]:
        serial = next(_serial)
        return [
            Rank(layout, rank, tokens, self.make_agent(f"{side}-{serial}-{rank}"))
            for rank in range(layout.tp_size)
        ]

    @pytest.mark.parametrize("blocks", BLOCKS)
    @pytest.mark.parametrize(("p_tp", "d_tp"), TP_PAIRS)
    @pytest.mark.parametrize("name", ROWS)
    def test_every_section_is_a_single_engines(
        self, name: str, p_tp: int, d_tp: int, blocks: str
    ) -> None:
        sides = BLOCKS[blocks]
        self.check(layout(name, p_tp, *sides[0]), layout(name, d_tp, *sides[1]))

    @pytest.mark.parametrize("blocks", BLOCKS)
    @pytest.mark.parametrize(("p_tp", "d_tp"), TP_PAIRS)
    @pytest.mark.parametrize("packing", PACKINGS)
    def test_every_section_of_an_fp8_cache_is_a_single_engines(
        self, packing: str, p_tp: int, d_tp: int, blocks: str
    ) -> None:
        sides = []
        for tp_size, (multiple, ratio) in zip((p_tp, d_tp), BLOCKS[blocks], strict=True):
            engine = EngineFacts(
                tp_size, kv_dtype="fp8_e4m3", block_size=64 * multiple, packing=packing
            )
            sides.append(layout_with(EIGHT_BITS, engine, ratio, "fp8"))
        assert {side.kv_dtype for side in sides} == {"fp8_e4m3"}
        self.check(*sides)

    def check(self, source: CacheLayout, destination: CacheLayout) -> None:
        request = request_between(source, destination)
        tokens = request.tokens
        made = make_state(source, tokens, seed=tokens)
        p = self.ranks("p", source, tokens)
        d = self.ranks("d", destination, tokens)
        for rank in p:
            rank.memory.write_request(made, request.source)
        for rank in d:
            before = rank.memory.bytes.copy()
            told = [source.told() for source in p]
            assert load(rank, told, request, lambda: [s.agent.take_notifications() for s in p]) > 0
            assert wrong_sections(rank.memory, made, request.destination) == []
            changed = rank.memory.bytes != before
            assert not changed[content_map(rank.memory, request.destination) == 0].any()
        for rank in (*d, *p):
            rank.agent.close()
