"""Data parallel ranks on P and on D: each has a side channel and a name of its own.

Routers choose a rank with the header ``X-data-parallel-rank``; P's answer names the rank's port.
"""

import uuid

import pytest

from hybridpd_testkit.engines import EngineSpec
from hybridpd_testkit.expectations import MAX_TOKENS, random_prompt
from hybridpd_testkit.pd_client import (
    PREFILL_PARAMS,
    Pair,
    complete,
    completion_request,
    evidence,
    require_nothing_left,
)

RANKS = (0, 1)
pytestmark = pytest.mark.matrix  # four engine cores


@pytest.fixture(scope="module")
def ranks(pool):
    """(P, D) of two data parallel ranks each."""
    checkpoint = pool.checkpoint("nemotron-h")
    two = ("--data-parallel-size", "2")
    with pool.own(
        EngineSpec("dp-p", checkpoint, role="kv_producer", arguments=two),
        EngineSpec("dp-d", checkpoint, role="kv_consumer", arguments=two),
    ) as engines:
        yield Pair(*engines)


def post(engine, rank, prompt, tokens, params):
    body = completion_request(prompt, tokens, kv_transfer_params=params)
    headers = {"X-data-parallel-rank": str(rank), "X-Request-Id": uuid.uuid4().hex}
    return engine.post("/v1/completions", body, headers)


@pytest.mark.parametrize("source", RANKS)
@pytest.mark.parametrize("target", RANKS)
def test_vllm_matrix_parallel_rank_to_rank(pool, ranks, source, target):
    (reference,) = pool.engines("nemotron-h", "p1")
    prompt = random_prompt(150 + 20 * source + 10 * target, 960)
    expected = complete(reference, prompt, MAX_TOKENS).tokens
    before = ranks.decode.metrics()
    params = post(ranks.prefill, source, prompt, 1, dict(PREFILL_PARAMS))["kv_transfer_params"]
    assert f"_dp{source}" in params["remote_engine_id"]
    answer = post(ranks.decode, target, prompt, MAX_TOKENS, params)
    assert tuple(answer["choices"][0]["token_ids"]) == expected
    growth = ranks.decode.metrics().since(before)
    counted = evidence(growth)
    assert (counted.external_tokens, counted.loads, counted.failures) == (len(prompt) - 1, 1, 0)
    assert growth.total("hybridpd_loads_total", engine=str(target)) == 1
    require_nothing_left(ranks.prefill, ranks.decode)
