"""Checksums on the engine's device, and on whole engines: right bytes pass, a wrong one does not.

The device's sums are compared with the reference word by word on random bytes; then one bit of a
pinned page is flipped on a real P, between its sums and D's read.
"""

import ctypes
import dataclasses
import random

import pytest
import torch

from hybridpd_connector import device_sums
from hybridpd_connector.agent_api import MemoryRegion
from hybridpd_connector.device_sums import DeviceSums
from hybridpd_connector.errors import SumError
from hybridpd_connector.sum_board import HEADER_WORDS, MARK, seal_of
from hybridpd_geometry import (
    AttentionFacts,
    EngineFacts,
    ModelFacts,
    RankPlacement,
    RankSums,
    RequestBlocks,
    StateFacts,
    SumRequest,
    layout_of,
    row_of,
)
from hybridpd_testkit.expectations import MAX_TOKENS, prompts, random_prompt, reference_tokens
from hybridpd_testkit.pd_client import (
    Pair,
    complete,
    evidence,
    leases_held,
    refused,
    require_nothing_left,
    wait_until,
)

BLOCKS = 12
STATES = {
    "mamba2": StateFacts("mamba2", inner=24, heads=12, head_dim=2, state_size=3, groups=4),
    "mamba1": StateFacts("mamba1", inner=24, state_size=2),
    "gdn": StateFacts("gdn", heads=12, head_dim=2, key_heads=4, key_head_dim=3),
    "short_conv": StateFacts("short_conv", inner=24),
    "dense": None,
}
PACKINGS = ["token", "cpu_vec", "cpu_amx", "latent"]


def model_of(family, packing):
    width = 16 if packing == "cpu_amx" else 4
    heads = 1 if packing == "latent" else 4
    state = STATES[family]
    return ModelFacts(
        family,
        attention_layers=(2, 4, 5),
        state_layers=(0, 1, 3) if state else (),
        attention=AttentionFacts(4, heads, width, width, 6 if packing == "latent" else None),
        state=state,
    )


class Cache:
    """One rank's cache of random bytes in ``allocations`` pieces."""

    def __init__(self, layout, rank=0, allocations=1, offset=0):
        self.layout = layout
        page, regions = layout.page_bytes, layout.region_count
        per = -(-regions // allocations)
        generator = torch.Generator().manual_seed(rank)
        self.storages = [
            torch.randint(0, 256, (offset + per * BLOCKS * page,), dtype=torch.uint8,
                          generator=generator)
            for _ in range(allocations)
        ]  # fmt: skip
        starts = [storage.data_ptr() + offset for storage in self.storages]
        self.placement = RankPlacement(
            rank=rank,
            num_blocks=BLOCKS,
            region_bases=tuple(
                starts[region // per] + region % per * BLOCKS * page for region in range(regions)
            ),
            block_strides=(page,) * regions,
            layer_region={layer.name: layer.slot for layer in layout.layers},
        )
        self.regions = [MemoryRegion(s.data_ptr(), s.numel()) for s in self.storages]

    def summer(self):
        return DeviceSums(self.layout, self.placement, self.regions, self.storages)

    def read(self, name, block, offset, length):
        region = self.placement.layer_region[name]
        address = self.placement.region_bases[region] + block * self.layout.page_bytes + offset
        return ctypes.string_at(address, length)


def request_of(layout, tokens, chunk_tokens=16, first_chunk=0, seed=1):
    ids = random.Random(seed).sample(range(1, BLOCKS), BLOCKS - 1)
    groups = []
    for kind in layout.group_kinds:
        count = -(-tokens // layout.block_tokens) if kind == "attention" else 1
        groups.append(tuple(ids[:count]))
        assert len(groups[-1]) == count
    return SumRequest(
        tokens, RequestBlocks(tuple(groups)), layout.tp_size, chunk_tokens, first_chunk
    )


def check_equal(cache, request):
    sums = RankSums(cache.layout, request.pieces_tp)
    expected = row_of(sums, request, cache.read)
    assert list(cache.summer().start(request).words()) == expected


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("family", STATES)
def test_vllm_checksums_of_a_device_equal_the_reference(family, packing):
    model = model_of(family, packing)
    for tp_size in (1, 2, 4):
        layout = layout_of(model, EngineFacts(tp_size, packing=packing, block_size=48), "m")
        for tokens in (1, 16, 47, 48, 100):
            check_equal(Cache(layout, tp_size - 1), request_of(layout, tokens))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kernel", [16, 48])
@pytest.mark.parametrize(("chunk_tokens", "first_chunk"), [(16, 0), (16, 3), (32, 1), (256, 0)])
def test_vllm_checksums_of_any_chunks(packing, kernel, chunk_tokens, first_chunk):
    facts = EngineFacts(2, packing=packing, block_size=96, kernel_block_tokens=kernel)
    layout = layout_of(model_of("dense", packing), facts, "m")
    assert layout.block_tokens == 96
    check_equal(Cache(layout), request_of(layout, 155, chunk_tokens, first_chunk))


@pytest.mark.parametrize("limits", [(1, 64), (1, 0), (3000, 0), (1 << 25, 0)])
def test_vllm_checksums_do_not_depend_on_batches(monkeypatch, limits):
    batch_bytes, few_pages = limits
    monkeypatch.setattr(device_sums, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(device_sums, "FEW_PAGES", few_pages)
    layout = layout_of(model_of("gdn", "token"), EngineFacts(1, block_size=48), "m")
    check_equal(Cache(layout), request_of(layout, 130))


@pytest.mark.parametrize("allocations", [1, 3])
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_vllm_checksums_do_not_depend_on_addresses(allocations, offset):
    layout = layout_of(model_of("mamba2", "token"), EngineFacts(1), "m")
    check_equal(Cache(layout, 0, allocations, offset), request_of(layout, 40))


def test_vllm_checksums_are_published_with_their_header():
    layout = layout_of(model_of("mamba2", "token"), EngineFacts(1), "m")
    cache = Cache(layout)
    summer, request = cache.summer(), request_of(layout, 40)
    address = summer.allocate(1 << 16)
    summer.publish(request, 77, address + 4096)
    ((_, board),) = summer._boards
    slot = board[4096:].view(torch.int64).tolist()
    expected = row_of(RankSums(layout, 1), request, cache.read)
    header, row = slot[:HEADER_WORDS], [word % (1 << 64) for word in slot[HEADER_WORDS:]]
    assert header[:3] == [MARK, 77, len(expected)]
    assert header[3] % (1 << 64) == seal_of(77, expected)
    assert row[: len(expected)] == expected
    assert not any(board[:4096].tolist())
    assert not any(row[len(expected) :])


def test_vllm_checksums_of_impossible_requests_are_our_errors():
    layout = layout_of(model_of("mamba2", "token"), EngineFacts(1), "m")
    cache = Cache(layout)
    request = request_of(layout, 40)
    bad = [(BLOCKS,) * len(ids) for ids in request.blocks.groups]
    with pytest.raises(SumError):
        cache.summer().start(dataclasses.replace(request, blocks=RequestBlocks(tuple(bad))))
    with pytest.raises(SumError):
        cache.summer().publish(request, 1, 4096)
    with pytest.raises(SumError, match="inside one allocation"):
        DeviceSums(layout, cache.placement, [MemoryRegion(4096, 10)], cache.storages)


CHECKSUMS = "hybridpd_checksums_total"
MISMATCH = "hybridpd_load_failures_total"
PROMPT = random_prompt(150, 77)


def compared(growth):
    """Checksum results that D counted, without those it did not."""
    names = ("ok", "different", "unchecked")
    found = {name: int(growth.total(CHECKSUMS, result=name)) for name in names}
    return {name: count for name, count in found.items() if count}


def check_all_right(pool, decode_kind):
    """Every prompt is loaded, compared by every rank of D, and right."""
    pair = Pair(*pool.engines("nemotron-h", "c1", decode_kind))
    expected = reference_tokens(pair.prefill)
    before = pair.decode.metrics()
    for prompt, tokens in zip(prompts(), expected, strict=True):
        assert pair.complete(prompt, MAX_TOKENS).tokens == tokens
    loads = sum(len(prompt) > 1 for prompt in prompts())
    answers = pair.complete_all(prompts(), MAX_TOKENS)
    assert [answer.tokens for answer in answers] == expected
    count = 2 * loads * pair.decode.spec.tp_size
    wait_until(
        lambda: compared(pair.decode.metrics().since(before)) == {"ok": count},
        f"{count} parts of loads were compared",
    )
    require_nothing_left(pair.prefill, pair.decode)


def test_vllm_checksums_nemotron_h_of_all_loads_tp1_to_tp1(pool):
    check_all_right(pool, "v1")


def test_vllm_checksums_nemotron_h_of_all_loads_tp1_to_tp2(pool):
    check_all_right(pool, "v2")


def flipped(pair, kind):
    """A prefill that is held, with one bit of its pages changed. (params, layer)."""
    params = pair.prefill_only(PROMPT)
    wait_until(lambda: leases_held(pair.prefill) == 1, "P holds it, so it was summed")
    (report,) = pair.prefill.worker_reports()
    kinds = [group["kind"] for group in report["groups"]]
    group = kinds.index(kind)
    block = params["remote_block_ids"][group][-1]
    (layer,) = pair.prefill.worker_reports("flip_bit", str(group), str(block))
    return params, layer


@pytest.mark.parametrize("kind", ["state", "attention"])
def test_vllm_checksums_nemotron_h_catch_a_flipped_bit(pool, kind):
    """Policy fail: the client sees an error, the log what was wrong, the next request is right."""
    pair = Pair(*pool.engines("nemotron-h", "c1", "v1"))
    before = pair.decode.metrics()
    params, layer = flipped(pair, kind)
    counted = refused(pair.decode, lambda: pair.decode_only(PROMPT, params, MAX_TOKENS))
    assert (counted.loads, counted.failures) == (0, 1)
    growth = pair.decode.metrics().since(before)
    assert growth.total(MISMATCH, reason="checksum_mismatch") == 1
    wait_until(
        lambda: compared(pair.decode.metrics().since(before)) == {"different": 1}, "D counts it"
    )
    lines = [line for line in pair.decode.log_path.read_text().splitlines() if layer in line]
    assert any("checksum_mismatch" in line and ", region" in line for line in lines)
    expected = complete(pair.prefill, PROMPT, MAX_TOKENS).tokens
    assert pair.complete(PROMPT, MAX_TOKENS).tokens == expected
    require_nothing_left(pair.prefill, pair.decode)


def test_vllm_checksums_nemotron_h_recompute_after_a_flipped_bit(pool):
    """Policy recompute, TP 1 to 2: the tokens are right, since none of the load was used."""
    pair = Pair(*pool.engines("nemotron-h", "c1", "v2"))
    expected = complete(pair.prefill, PROMPT, MAX_TOKENS).tokens
    before = pair.decode.metrics()
    params, _ = flipped(pair, "state")
    assert pair.decode_only(PROMPT, params, MAX_TOKENS).tokens == expected
    wait_until(lambda: evidence(pair.decode.metrics().since(before)).recomputed == 1, "D counts it")
    growth = pair.decode.metrics().since(before)
    assert growth.total(MISMATCH, reason="checksum_mismatch") == 1
    # The page's first byte belongs to rank 0 of D; what rank 1 read was right.
    assert compared(growth) == {"different": 1, "ok": 1}
    require_nothing_left(pair.prefill, pair.decode)


def test_vllm_checksums_nemotron_h_beside_an_engine_without(pool):
    """P samples, D compares all: D refuses P, and says what to set."""
    pair = Pair(*pool.engines("nemotron-h", "p1", "v1"))
    before = pair.decode.metrics()
    params = pair.prefill_only(PROMPT)
    counted = refused(pair.decode, lambda: pair.decode_only(PROMPT, params, MAX_TOKENS))
    assert (counted.loads, counted.failures) == (0, 1)
    growth = pair.decode.metrics().since(before)
    assert growth.total(MISMATCH, reason="peer_refused") == 1
    assert compared(growth) == {}
    log = pair.decode.log_path.read_text()
    assert "expected all on the prefill engine, as here, got sample" in log
    assert complete(pair.decode, PROMPT, 1).tokens  # its own requests go on
    # Nobody tells P: the lease has to run out.
    require_nothing_left(pair.prefill, pair.decode, timeout_seconds=60.0)
