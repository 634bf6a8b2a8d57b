"""Blocks under a late read, in vLLM's own pool; and what ranks say of them, joined as vLLM does."""

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch's import

BLOCKS = 8


@pytest.mark.parametrize("caching", [False, True])
def test_vllm_held_blocks_are_nobodys_until_the_read_has_landed(caching):
    from vllm.v1.core.block_pool import BlockPool

    from hybridpd_connector.held_blocks import HeldBlocks

    pool = BlockPool(BLOCKS, caching, 16)
    held = HeldBlocks(ranks=2)
    held.bind(pool)
    loaded = pool.get_new_blocks(3)
    ids = [block.block_id for block in loaded]
    free = pool.get_num_free_blocks()
    assert held.hold("r", [[pool.null_block.block_id, *ids[:2]], ids[2:]])
    pool.free_blocks(reversed(loaded))  # vLLM is done with the request
    assert pool.get_num_free_blocks() == free
    others = pool.get_new_blocks(free)
    assert set(ids).isdisjoint(block.block_id for block in others)
    held.landed({"r": 1})
    assert pool.get_num_free_blocks() == 0
    held.landed({"r": 1})
    assert pool.get_num_free_blocks() == 3
    assert {block.block_id for block in pool.get_new_blocks(3)} == set(ids)


def test_vllm_held_blocks_are_told_of_by_all_ranks():
    from hybridpd_connector.connector import RankReport

    first = RankReport({"a": "deadline"}, frozenset({"a"}), {"a": 1, "b": 1})
    second = RankReport({"a": "other", "c": "why"}, frozenset({"d"}), {"b": 1})
    joined = first.aggregate(second)
    assert joined.reasons == {"a": "deadline", "c": "why"}
    assert (joined.late, joined.landed) == ({"a", "d"}, {"a": 1, "b": 2})
