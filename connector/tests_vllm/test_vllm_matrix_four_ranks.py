"""Six ranks: prefill at TP 2, decode at TP 4, whose ranks each load the metadata of both.

Falcon-H1 has one group of B and C and one KV head: all four ranks of decode hold them whole.
"""

import pytest

from hybridpd_testkit.engines import EngineSpec
from hybridpd_testkit.expectations import MAX_TOKENS, ideal_bytes, prompts, reference_tokens
from hybridpd_testkit.pd_client import Pair, measured, require_nothing_left

pytestmark = pytest.mark.matrix  # seven ranks


@pytest.fixture(scope="module")
def pair(pool):
    checkpoint = pool.checkpoint("falcon-h1")
    with pool.own(
        EngineSpec("two-p", checkpoint, tp_size=2, role="kv_producer"),
        EngineSpec("four-d", checkpoint, tp_size=4, role="kv_consumer"),
    ) as engines:
        yield Pair(*engines)


def test_vllm_matrix_four_ranks_falcon_h1_tp2_to_tp4(pool, pair):
    (single,) = pool.engines("falcon-h1", "p1")
    reports = pair.decode.worker_reports()
    assert len(reports) == 4
    for prompt, tokens in zip(prompts(), reference_tokens(single), strict=True):
        answer, counted = measured(pair.decode, lambda p=prompt: pair.complete(p, MAX_TOKENS))
        assert answer.tokens == tokens, f"{len(prompt)} tokens"
        assert counted.external_tokens == len(prompt) - 1
        assert counted.read_bytes == ideal_bytes(reports, len(prompt) - 1)
    (peers,) = {report["peers"] for report in pair.decode.worker_reports("report_agent")}
    assert peers == 2, "each rank of decode has met each rank of prefill"
    require_nothing_left(pair.prefill, pair.decode)
