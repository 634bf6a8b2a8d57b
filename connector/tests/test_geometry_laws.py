"""The laws of a read plan, on real bytes: random models, TP pairs, block sizes, packings, prompts.

Every source rank's pages are cut out of one global state; the plan's descriptor ids are turned into
addresses and copied; every destination rank must then hold exactly what a single engine of the
destination's TP would hold, and nothing else may have changed.
"""

from itertools import accumulate

from geometry_cases import Pair, pairs, request_blocks
from geometry_reads import check_pages, content_map, memories, read_all, zero_tails
from geometry_reference import GlobalState, RankMemory, address_of, make_state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridpd_geometry import (
    CacheLayout,
    DescriptorTable,
    ReadRequest,
    RequestBlocks,
    build_table,
    plan_pair,
    predict,
)

SETTINGS = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
FEW = settings(SETTINGS, max_examples=30)


@SETTINGS
@given(pair=pairs(), data=st.data(), shape=st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_destination_pages_equal_a_single_engines(
    pair: Pair, data: st.DataObject, shape: tuple[bool, bool, bool]
) -> None:
    source_interleaved, interleaved, spare = shape
    made = make_state(pair.source, pair.tokens, seed=pair.tokens)
    source = memories(pair.source, pair.tokens, 1 << 32, source_interleaved)
    source_blocks = request_blocks(data, pair.source, pair.tokens)
    destination_blocks = request_blocks(data, pair.destination, pair.tokens, int(spare))
    for memory in source:
        memory.write_request(made, source_blocks)
    request = ReadRequest(pair.tokens, source_blocks, destination_blocks)
    for memory in memories(pair.destination, pair.tokens, 1 << 40, interleaved):
        before = memory.bytes.copy()
        moved, descriptors = read_all(source, memory, request)
        zero_tails(memory, request)
        check_pages(memory, before, made, destination_blocks)
        forecast = predict(
            plan_pair(pair.source, pair.destination, memory.placement.rank), pair.tokens
        )
        assert moved == forecast.bytes == sum(forecast.by_section.values())
        assert descriptors <= forecast.descriptors


@FEW
@given(pair=pairs(), data=st.data())
def test_there_and_back_is_the_identity(pair: Pair, data: st.DataObject) -> None:
    made = make_state(pair.source, pair.tokens, seed=1)
    blocks = request_blocks(data, pair.source, pair.tokens)
    middle_blocks = request_blocks(data, pair.destination, pair.tokens)
    start = memories(pair.source, pair.tokens, 1 << 32)
    middle = memories(pair.destination, pair.tokens, 1 << 40)
    end = memories(pair.source, pair.tokens, 1 << 44)
    for memory in start:
        memory.write_request(made, blocks)
    there = ReadRequest(pair.tokens, blocks, middle_blocks)
    for memory in middle:
        read_all(start, memory, there)
        zero_tails(memory, there)
    back = ReadRequest(pair.tokens, middle_blocks, blocks)
    for memory in end:
        before = memory.bytes.copy()
        read_all(middle, memory, back)
        zero_tails(memory, back)
        check_pages(memory, before, made, blocks)


@FEW
@given(pair=pairs(), data=st.data(), interleaved=st.booleans())
def test_ids_are_a_bijection(pair: Pair, data: st.DataObject, interleaved: bool) -> None:
    plan = plan_pair(pair.source, pair.destination, pair.destination.tp_size - 1)
    rank = data.draw(st.sampled_from(plan.sources))
    local, remote = (
        memories(layout, pair.tokens, base, interleaved)[number]
        for layout, base, number in (
            (pair.destination, 1 << 40, plan.destination_rank),
            (pair.source, 1 << 32, rank),
        )
    )
    table = build_table(plan, rank, local.placement, remote.placement)
    for side, memory in (("local", local), ("remote", remote)):
        ends = list(accumulate(row.count for row in getattr(table, f"{side}_rows")))
        any_ids = data.draw(st.lists(st.integers(0, ends[-1] - 1), max_size=40))
        ids = {0, *(end - 1 for end in ends), *any_ids}
        for descriptor_id in ids:
            check_id(table, side, memory, descriptor_id)


def check_id(table: DescriptorTable, side: str, memory: RankMemory, descriptor_id: int) -> None:
    location = getattr(table, f"locate_{side}")(descriptor_id)
    assert getattr(table, f"{side}_id")(location) == descriptor_id
    placement = memory.placement
    address, length = address_of(getattr(table, f"{side}_rows"), descriptor_id)
    assert length == location.length
    assert address == (
        placement.region_bases[location.region]
        + location.block * placement.block_strides[location.region]
        + location.offset
    )
    memory.span(address, length)
    assert 0 <= location.block < placement.num_blocks
    assert location.offset + location.length <= placement.block_strides[location.region]


@FEW
@given(pair=pairs())
def test_no_run_leaves_its_page_or_touches_another(pair: Pair) -> None:
    tokens = pair.tokens
    blocks = {
        side: RequestBlocks(
            tuple(tuple(range(-(-tokens // layout.block_tokens))) for _ in layout.group_kinds)
        )
        for side, layout in (("source", pair.source), ("destination", pair.destination))
    }
    request = ReadRequest(tokens, blocks["source"], blocks["destination"])
    for rank in range(pair.destination.tp_size):
        plan = plan_pair(pair.source, pair.destination, rank)
        seen: dict[tuple[str, int], list[tuple[int, int]]] = {}
        total = 0
        for source_rank in plan.sources:
            for read in plan.request_runs(source_rank, request):
                source_layer = pair.source.by_name[read.layer]
                assert read.length > 0
                assert read.source_offset >= 0
                assert read.source_offset + read.length <= pair.source.content_bytes(source_layer)
                place = (read.layer, read.destination_block)
                seen.setdefault(place, []).append((read.destination_offset, read.length))
                total += read.length
        for (layer, _), runs in seen.items():
            end = 0
            for offset, length in sorted(runs):
                assert offset >= end
                end = offset + length
            assert end <= pair.destination.content_bytes(pair.destination.by_name[layer])
        assert total == predict(plan, tokens).bytes


@FEW
@given(pair=pairs(), data=st.data())
def test_a_local_prefix_is_not_read_again(pair: Pair, data: st.DataObject) -> None:
    made = make_state(pair.source, pair.tokens, seed=2)
    first = 16 * data.draw(st.integers(0, pair.tokens // 16))
    blocks = request_blocks(data, pair.source, pair.tokens)
    own_blocks = request_blocks(data, pair.destination, pair.tokens)
    source = memories(pair.source, pair.tokens, 1 << 32)
    for memory in source:
        memory.write_request(made, blocks)
    request = ReadRequest(pair.tokens, blocks, own_blocks, first)
    for memory in memories(pair.destination, pair.tokens, 1 << 40):
        before = memory.bytes.copy()
        memory.write_request(first_tokens(made, first), own_blocks)
        moved, _ = read_all(source, memory, request)
        zero_tails(memory, request)
        memory.writes[:] = content_map(memory, own_blocks)
        check_pages(memory, before, made, own_blocks)
        plan = plan_pair(pair.source, pair.destination, memory.placement.rank)
        layer = plan.attention_pairs[0].destination
        per_token = pair.destination.content_bytes(layer) // pair.destination.block_tokens
        saved = predict(plan, pair.tokens).bytes - moved
        assert saved == first * per_token * len(plan.attention_pairs)


def first_tokens(made: GlobalState, count: int) -> GlobalState:
    """The same request after its first `count` tokens, with another recurrent state."""
    return GlobalState(
        state={
            layer: {name: 255 - units for name, units in sections.items()}
            for layer, sections in made.state.items()
        },
        keys={layer: keys[:count] for layer, keys in made.keys.items()},
        values={layer: values[:count] for layer, values in made.values.items()},
    )


@FEW
@given(pair=pairs())
def test_layouts_survive_the_wire(pair: Pair) -> None:
    for layout in (pair.source, pair.destination):
        assert CacheLayout.from_dict(layout.to_dict()) == layout
