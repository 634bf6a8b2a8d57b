"""An fp8 KV cache through P and D: tokens, bytes and checksums; another dtype does not pair.

The models compute in float32, so that a tie cannot decide, and store fp8: every value that P stored
is used by D as it was stored. In bfloat16, where keys and values lie in tiles, near-ties count as
in ``near_ties``. What an engine would scale by itself is refused, see test_vllm_matrix_refusals.
"""

import functools

import pytest
from test_vllm_tokens import load_tokens

from hybridpd_testkit import near_ties
from hybridpd_testkit.engines import EngineSpec
from hybridpd_testkit.expectations import MAX_TOKENS, prompts, random_prompt, reference_tokens
from hybridpd_testkit.pd_client import (
    Pair,
    leases_held,
    refused,
    require_nothing_left,
    wait_until,
)

CHECKED = {"checksum": "all"}
PAIRS = {"tp1_to_tp1": (0, 1), "tp1_to_tp2": (0, 2), "tp2_to_tp1": (2, 1)}
pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module", params=["llama-fp8_e5m2", "nemotron-h-fp8"])
def engines(pool, request):
    """(P, D, both roles at TP 2, D with a cache of the model's dtype)"""
    family, dtype = request.param.rsplit("-", 1)
    start = functools.partial(EngineSpec, checkpoint=pool.checkpoint(family), extra_config=CHECKED)
    fp8 = ("--kv-cache-dtype", dtype)
    with pool.own(
        start("fp8-p", role="kv_producer", arguments=fp8),
        start("fp8-d", role="kv_consumer", arguments=fp8),
        start("fp8-both", role="kv_both", tp_size=2, arguments=fp8),
        start("wide-d", role="kv_consumer"),
    ) as started:
        yield started


@pytest.mark.parametrize("pair", PAIRS)
def test_vllm_matrix_fp8_tokens(engines, pair):
    prefill, decode = (engines[index] for index in PAIRS[pair])
    reports = decode.worker_reports()
    assert {g["item_bytes"] for g in reports[0]["groups"] if g["kind"] == "attention"} == {1}
    before = decode.metrics()
    expected = reference_tokens(engines[0])
    for prompt, tokens in zip(prompts(), expected, strict=True):
        loaded = load_tokens(Pair(prefill, decode), reports, prompt)
        assert loaded == tokens, f"{len(prompt)} tokens"
    growth = decode.metrics().since(before)
    assert growth.total("hybridpd_checksums_total", result="ok") > 0
    assert growth.total("hybridpd_checksums_total") == growth.total(
        "hybridpd_checksums_total", result="ok"
    )
    wait_until(lambda: leases_held(prefill) == 0, "P has freed every prompt")


def test_vllm_matrix_fp8_to_another_dtype_is_refused(engines):
    pair, prompt = Pair(engines[0], engines[3]), random_prompt(150, 911)
    params = pair.prefill_only(prompt)
    counted = refused(pair.decode, lambda: pair.decode_only(prompt, params, MAX_TOKENS))
    assert (counted.loads, counted.failures, counted.read_bytes) == (0, 1, 0)
    log = pair.decode.log_path.read_text()
    assert "kv_dtype is float32 here and fp8_" in log
    assert "Set the same --kv-cache-dtype" in log
    require_nothing_left(engines[3])


def test_vllm_matrix_fp8_in_tiles(pool):
    """bfloat16 on a CPU with AMX: keys in tiles of 16 tokens, values in lanes of 16 features."""
    start = functools.partial(
        EngineSpec,
        checkpoint=pool.checkpoint("nemotron-h"),
        dtype="bfloat16",
        extra_config=CHECKED,
        arguments=("--kv-cache-dtype", "fp8"),
    )
    with pool.own(start("tiles-p", role="kv_producer"), start("tiles-d", role="kv_consumer")) as (
        prefill,
        decode,
    ):
        load = functools.partial(load_tokens, Pair(prefill, decode), decode.worker_reports())
        ties = [
            near_ties.fallen_ties(near_ties.reference_of(prefill, prompt, MAX_TOKENS), prompt, load)
            for prompt in prompts()
        ]
        assert sum(ties) <= near_ties.MOST_TIES, ties
