"""P and D with different ``--block-size``: 128 and 96 tokens; neither divides the other."""

import pytest

from hybridpd_testkit.expectations import MAX_TOKENS, ideal_bytes, prompts, reference_tokens
from hybridpd_testkit.pd_client import Pair, measured

KINDS = pytest.mark.parametrize(("prefill", "decode"), [("p1", "k1"), ("k1", "d1")])
BLOCK_TOKENS = {"p1": 128, "d1": 128, "k1": 96}


def check_block_sizes(pool, family, prefill, decode):
    # All three together: whichever direction comes first, each engine starts once.
    engines = dict(zip(("p1", "d1", "k1"), pool.engines(family, "p1", "d1", "k1"), strict=True))
    pair = Pair(engines[prefill], engines[decode])
    reports = pair.decode.worker_reports()
    for kind, one in ((prefill, pair.prefill), (decode, pair.decode)):
        assert one.worker_reports()[0]["block_tokens"] == BLOCK_TOKENS[kind]
    for prompt, tokens in zip(prompts(), reference_tokens(engines["p1"]), strict=True):
        answer, counted = measured(pair.decode, lambda p=prompt: pair.complete(p, MAX_TOKENS))
        loaded = len(prompt) - 1
        assert answer.tokens == tokens, f"{len(prompt)} tokens"
        assert (counted.external_tokens, counted.computed_tokens) == (loaded, 1)
        assert counted.predicted_bytes == counted.read_bytes == ideal_bytes(reports, loaded)
        assert (counted.failures, counted.recomputed) == (0, 0)


@KINDS
def test_vllm_block_sizes_nemotron_h(pool, prefill, decode):
    check_block_sizes(pool, "nemotron-h", prefill, decode)


@KINDS
def test_vllm_block_sizes_llama(pool, prefill, decode):
    check_block_sizes(pool, "llama", prefill, decode)
