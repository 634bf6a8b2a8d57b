"""Worked examples, small enough to follow with pencil and paper."""

from dataclasses import replace

import pytest
from test_geometry_numbers import KIMI, NANO

from hybridpd_geometry import (
    AttentionFacts,
    CacheLayout,
    EngineFacts,
    GeometryError,
    IdRun,
    Location,
    ModelFacts,
    PlannedRead,
    RankPlacement,
    ReadRequest,
    RequestBlocks,
    Row,
    Run,
    Section,
    Segment,
    StateFacts,
    build_table,
    intersect,
    layout_of,
    local_zero_runs,
    plan_pair,
    predict,
)

# One Mamba2 layer (4 heads of 2 channels, state 3, one B/C group, 2 conv columns, bf16) and one
# attention layer (2 KV heads of 4): per rank at TP1
#   x   8 channels x 2 columns x 2 B = 32 B     at 0
#   B   3 x 2 x 2 = 12 B                        at 32
#   C   12 B                                    at 44
#   ssm 4 heads x (2 x 3) x 2 B = 48 B          at 56      state = 104 B
#   attention token: 2 heads x (4 + 4) x 2 B = 32 B; block of 16 tokens = 512 B, head 256 B
TINY = ModelFacts(
    "tiny",
    attention_layers=(1,),
    state_layers=(0,),
    attention=AttentionFacts(4, 2, 4, 4),
    state=StateFacts("mamba2", inner=8, heads=4, head_dim=2, state_size=3, groups=1, conv_kernel=3),
)
STATE, ATTENTION = "layers.0.state", "layers.1.attention"


def tiny(tp: int, **changes: object) -> CacheLayout:
    return layout_of(TINY, replace(EngineFacts(tp), **changes), "tiny")  # type: ignore[arg-type]


def placement(layout: CacheLayout, rank: int, base: int, blocks: int = 10) -> RankPlacement:
    return RankPlacement(
        rank=rank,
        num_blocks=blocks,
        region_bases=(base,),
        block_strides=(layout.page_bytes,),
        layer_region={STATE: 0, ATTENTION: 0},
    )


def state_runs(source_tp: int, destination_tp: int, rank: int) -> dict[int, tuple[Run, ...]]:
    plan = plan_pair(tiny(source_tp), tiny(destination_tp), rank)
    return {source: plan.state_runs(source, plan.state_pairs[0]) for source in plan.sources}


def test_equal_tp_moves_a_state_page_in_one_piece() -> None:
    assert state_runs(1, 1, 0) == {0: (Run(0, 0, 104),)}
    # TP2, rank 1: x 16, B 12, C 12, ssm 24 bytes; its own copies of B and C, so still one piece.
    assert state_runs(2, 2, 1) == {1: (Run(0, 0, 64),)}


def test_one_source_rank_feeds_two_destination_ranks() -> None:
    # x and ssm are halved, B and C are whole on both. Rank 0 wants the first half of ssm, which
    # follows C on both sides: B, C and ssm are one run.
    assert state_runs(1, 2, 0) == {0: (Run(0, 0, 16), Run(32, 16, 48))}
    # Rank 1: the second half of x ends where B begins, so x, B and C are one run here.
    assert state_runs(1, 2, 1) == {0: (Run(16, 0, 40), Run(80, 40, 24))}


def test_two_source_ranks_feed_one_destination_rank() -> None:
    # Both sources have a copy of B and C; the reader takes both from rank 0.
    assert state_runs(2, 1, 0) == {
        0: (Run(0, 0, 16), Run(16, 32, 48)),
        1: (Run(0, 16, 16), Run(40, 80, 24)),
    }


def test_tp_sizes_that_do_not_divide_each_other() -> None:
    # 6 KV heads: two source ranks hold 0-2 and 3-5, three destination ranks want 0-1, 2-3, 4-5.
    heads = Section("kv", 6, 16, replicates=True)
    assert [intersect(heads, 2, 3, rank) for rank in range(3)] == [
        (Segment(0, 0, 0, 2),),
        (Segment(0, 2, 0, 1), Segment(1, 0, 1, 1)),
        (Segment(1, 1, 0, 2),),
    ]


def test_copies_are_spread_over_the_sources() -> None:
    # One B/C group, read by 2 ranks from 4: from ranks 0 and 2, not both from 0.
    group = Section("B", 1, 12, replicates=True)
    assert [intersect(group, 4, 2, rank)[0].source_rank for rank in (0, 1)] == [0, 2]
    # 2 KV heads on 8 ranks (4 copies each), read by 4 ranks: ranks 0 and 1 both want head 0.
    heads = Section("kv", 2, 16, replicates=True)
    assert [intersect(heads, 8, 4, rank)[0].source_rank for rank in range(4)] == [0, 2, 4, 6]
    # One reader of both heads takes them from two ranks.
    assert [s.source_rank for s in intersect(heads, 8, 1, 0)] == [0, 4]
    # MLA is a copy on every rank: 4 readers of 4 sources take one each, of 2 sources two each.
    kimi = {tp: layout_of(KIMI, EngineFacts(tp), "kimi") for tp in (2, 4)}
    attention = plan_pair(kimi[4], kimi[4], 3)
    pair = attention.attention_pairs[0]
    assert [s for s in range(4) if attention.token_pairing(s, pair)] == [3]
    readers = [plan_pair(kimi[2], kimi[4], rank) for rank in range(4)]
    chosen = [
        [s for s in range(2) if plan.token_pairing(s, plan.attention_pairs[0])] for plan in readers
    ]
    assert chosen == [[0], [0], [1], [1]]


def test_tokens_of_a_partly_filled_block() -> None:
    plan = plan_pair(tiny(1), tiny(2), 1)
    blocks = RequestBlocks(((7,), (3, 5)))
    own = RequestBlocks(((1,), (2, 9)))
    reads = list(plan.request_runs(0, ReadRequest(20, blocks, own)))
    # Head 1 of a source block starts at byte 256; a token of a head is 16 B; 20 = 16 + 4 tokens.
    assert reads[:2] == [
        PlannedRead(ATTENTION, 3, 256, 2, 0, 256),
        PlannedRead(ATTENTION, 5, 256, 9, 0, 64),
    ]
    assert [read.layer for read in reads[2:]] == [STATE, STATE]
    zeros = local_zero_runs(plan, 20, own)
    assert [(z.block, z.offset, z.length) for z in zeros] == [(9, 64, 192)]


def test_different_block_sizes_meet_in_tokens() -> None:
    plan = plan_pair(tiny(2, block_size=32), tiny(2, block_size=48), 0)
    request = ReadRequest(50, RequestBlocks(((0,), (4, 5))), RequestBlocks(((0,), (6, 7))))
    reads = [r for r in plan.request_runs(0, request) if r.layer == ATTENTION]
    assert reads == [
        PlannedRead(ATTENTION, 4, 0, 6, 0, 512),  # tokens 0-31
        PlannedRead(ATTENTION, 5, 0, 6, 512, 256),  # tokens 32-47
        PlannedRead(ATTENTION, 5, 256, 7, 0, 32),  # tokens 48, 49
    ]


def test_kernel_blocks_cut_heads() -> None:
    # 32-token blocks of two 16-token kernel blocks on the source, one 32-token kernel on the other:
    # source page = [h0 k0][h1 k0][h0 k1][h1 k1], destination page = [h0][h1].
    plan = plan_pair(tiny(1, block_size=32, kernel_block_tokens=16), tiny(1, block_size=32), 0)
    pair = plan.attention_pairs[0]
    overlap = next(iter(plan.overlaps(32)))
    assert plan.attention_runs(0, pair, overlap) == (
        Run(0, 0, 256),
        Run(512, 256, 256),
        Run(256, 512, 256),
        Run(768, 768, 256),
    )


def test_rows_and_ids_of_an_equal_pair() -> None:
    layout = tiny(1)
    plan = plan_pair(layout, layout, 0)
    table = build_table(plan, 0, placement(layout, 0, 10_000), placement(layout, 0, 90_000))
    # Attention: pages (512 B), then tokens of a head (16 B). State: one row, real length only.
    assert table.local_rows == (
        Row(10_000, 512, 512, 10, 0),
        Row(10_000, 16, 16, 320, 0),
        Row(10_000, 104, 512, 10, 0),
    )
    request = ReadRequest(36, RequestBlocks(((4,), (1, 2, 6))), RequestBlocks(((8,), (5, 6, 0))))
    assert table.id_runs(request) == [
        IdRun(5, 1, 2, 512),  # blocks 5, 6 from 1, 2: neighbours on both sides, one descriptor
        IdRun(10, 10 + 6 * 32, 4, 16),  # head 0 of block 0 from 6: four tokens
        IdRun(10 + 16, 10 + 6 * 32 + 16, 4, 16),  # head 1
        IdRun(10 + 320 + 8, 10 + 320 + 4, 1, 104),
    ]
    assert table.locate_local(10 + 17) == Location("attention", 0, 0, 272, 16)
    assert table.locate_remote(334) == Location("state", 0, 4, 0, 104)
    assert table.remote_id(Location("state", 0, 4, 0, 104)) == 334


def test_tables_do_not_grow_with_the_cache() -> None:
    layouts = layout_of(NANO, EngineFacts(2), "n"), layout_of(NANO, EngineFacts(4), "n")
    plan = plan_pair(*layouts, 1)
    counts = []
    for blocks in (10, 6000):
        local, remote = (
            RankPlacement(
                rank,
                blocks,
                tuple(r << 40 for r in range(6)),
                (layout.page_bytes,) * 6,
                {layer.name: layer.slot for layer in layout.layers},
            )
            for rank, layout in ((0, layouts[0]), (1, layouts[1]))
        )
        table = build_table(
            plan,
            0,
            replace(local, rank=1, block_strides=remote.block_strides),
            replace(remote, rank=0, block_strides=local.block_strides),
        )
        counts.append(len(table.local_rows))
    assert counts[0] == counts[1] <= 6 * 6


def test_nano_moves_what_it_must_and_no_more() -> None:
    layout = layout_of(NANO, EngineFacts(2), "nano")
    forecast = predict(plan_pair(layout, layout, 1), 499)
    # 23 real states (not 24 slots), 6 layers of 499 real tokens (not a page of 2096).
    assert forecast.bytes == 23 * (18432 + 1048576) + 6 * 499 * 512
    assert forecast.by_section["kv"] == 6 * 499 * 512
    assert forecast.by_section["ssm"] == 23 * 1048576


def test_nano_tp2_to_tp4_has_other_blocks_and_still_reads_every_token_once() -> None:
    source, destination = (layout_of(NANO, EngineFacts(tp), "nano") for tp in (2, 4))
    assert (source.block_tokens, destination.block_tokens) == (2096, 1056)
    for rank in range(4):
        plan = plan_pair(source, destination, rank)
        assert plan.sources == (rank // 2,)
        assert predict(plan, 5000).bytes == 23 * (9216 + 524288) + 6 * 5000 * 512


def test_sd_conv_layout_moves_whole_between_equal_tp_only() -> None:
    plan = plan_pair(tiny(2, conv_layout="SD"), tiny(2, conv_layout="SD"), 1)
    assert plan.state_runs(1, plan.state_pairs[0]) == (Run(0, 0, 64),)
    with pytest.raises(GeometryError, match="VLLM_SSM_CONV_STATE_LAYOUT=DS"):
        plan_pair(tiny(1, conv_layout="SD"), tiny(2, conv_layout="SD"), 1)


def test_requests_that_do_not_fit_are_refused() -> None:
    layout = tiny(1)
    plan = plan_pair(layout, layout, 0)
    table = build_table(plan, 0, placement(layout, 0, 0), placement(layout, 0, 0))
    good = RequestBlocks(((1,), (2, 3)))
    cases = [
        (ReadRequest(33, good, good), "at least 3 blocks, got 2"),
        (ReadRequest(20, RequestBlocks(((1,),)), good), "source.blocks: expected 2 groups"),
        (ReadRequest(20, RequestBlocks(((10,), (2, 3))), good), "block id: expected 0..9, got 10"),
        (ReadRequest(20, good, RequestBlocks(((1,), (2, -1)))), "block id: expected 0..9, got -1"),
        (ReadRequest(20, RequestBlocks(((), (2, 3))), good), "at least 1 blocks, got 0"),
        (ReadRequest(-1, good, good), "tokens: expected zero or more"),
        (ReadRequest(20, good, good, 21), "first_token"),
    ]
    for request, message in cases:
        with pytest.raises(GeometryError, match=message):
            table.id_batches(request)


def test_tables_need_placements_of_the_right_ranks_and_layers() -> None:
    layout = tiny(2)
    plan = plan_pair(layout, layout, 1)
    good = placement(layout, 1, 0)
    with pytest.raises(GeometryError, match="source_rank"):
        build_table(plan, 0, good, placement(layout, 0, 0))
    with pytest.raises(GeometryError, match="local 1, remote 1"):
        build_table(plan, 1, placement(layout, 0, 0), good)
    for strides, message in (((100,), "at least a page"), ((good.block_strides[0] + 1,), "of 16")):
        with pytest.raises(GeometryError, match=message):
            build_table(plan, 1, replace(good, block_strides=strides), good)
    with pytest.raises(GeometryError, match="does not place this layer"):
        build_table(plan, 1, replace(good, layer_region={STATE: 0}), good)
