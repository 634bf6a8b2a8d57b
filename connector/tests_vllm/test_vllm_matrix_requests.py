"""Requests beside the ordinary: an end at the first token, prompt log-probabilities; a P that works
in small pieces, and one that preempts.

Several prompts in one call and n > 1 are in test_vllm_requests.py, prompts of one token in
test_vllm_tokens.py, preemption on D in test_vllm_preemption.py.
"""

import pytest

from hybridpd_testkit.engines import EngineSpec
from hybridpd_testkit.expectations import MAX_TOKENS, random_prompt
from hybridpd_testkit.pd_client import (
    Pair,
    complete,
    evidence,
    measured,
    refused,
    require_nothing_left,
)

# 25 usable blocks; a prompt of 600 tokens needs three state blocks and five pages. Pieces of 32
# tokens let several prompts grow side by side, which the cache cannot hold.
SMALL_P = ("--max-num-batched-tokens", "256", "--long-prefill-token-threshold", "32")


@pytest.fixture(scope="module")
def small_p(pool):
    checkpoint = pool.checkpoint("nemotron-h")
    spec = EngineSpec("small-p", checkpoint, role="kv_producer", arguments=SMALL_P, num_blocks=26)
    with pool.own(spec) as (engine,):
        yield engine


def test_vllm_matrix_stop_at_the_first_token(nemotron):
    prompt = random_prompt(90, 810)
    (first, *_) = complete(nemotron.prefill, prompt, 4).tokens
    answer, counted = measured(
        nemotron.decode, lambda: nemotron.complete(prompt, MAX_TOKENS, stop_token_ids=[first])
    )
    assert answer.tokens == (first,)
    assert answer.choices[0].finish_reason == "stop"
    assert (counted.loads, counted.failures) == (1, 0)
    require_nothing_left(nemotron.prefill, nemotron.decode)


def test_vllm_matrix_one_token_asked_for(nemotron):
    prompt = random_prompt(91, 811)
    expected = complete(nemotron.prefill, prompt, 1).tokens
    answer, counted = measured(nemotron.decode, lambda: nemotron.complete(prompt, 1))
    assert answer.tokens == expected
    assert (counted.loads, counted.failures) == (1, 0)
    require_nothing_left(nemotron.prefill, nemotron.decode)


def test_vllm_matrix_p_stops_at_its_own_token(nemotron):
    """The token that P samples after N-1 tokens is nobody's; that it ends P is no failure."""
    prompt = random_prompt(92, 812)
    expected = complete(nemotron.prefill, prompt, MAX_TOKENS).tokens
    own = complete(nemotron.prefill, prompt[:-1], 1).tokens[0]
    params = nemotron.prefill_only(prompt, stop_token_ids=[own])
    answer, counted = measured(
        nemotron.decode, lambda: nemotron.decode_only(prompt, params, MAX_TOKENS)
    )
    assert answer.tokens == expected
    assert (counted.loads, counted.failures) == (1, 0)
    require_nothing_left(nemotron.prefill, nemotron.decode)


def test_vllm_matrix_prompt_logprobs_are_computed_on_d(nemotron):
    """vLLM reads no cached prefix for them, so nothing is handed over: D computes the prompt."""
    prompt = random_prompt(93, 813)
    expected = complete(nemotron.prefill, prompt, MAX_TOKENS).tokens
    answer, counted = measured(
        nemotron.decode, lambda: nemotron.complete(prompt, MAX_TOKENS, prompt_logprobs=1)
    )
    assert answer.tokens == expected
    assert (counted.loads, counted.failures, counted.external_tokens) == (0, 0, 0)
    assert counted.computed_tokens == len(prompt)
    require_nothing_left(nemotron.prefill, nemotron.decode)


def test_vllm_matrix_prompt_logprobs_on_d_alone_free_p_at_once(nemotron):
    prompt = random_prompt(94, 814)
    expected = complete(nemotron.prefill, prompt, MAX_TOKENS).tokens
    params = nemotron.prefill_only(prompt)
    answer, counted = measured(
        nemotron.decode,
        lambda: nemotron.decode_only(prompt, params, MAX_TOKENS, prompt_logprobs=1),
    )
    assert answer.tokens == expected
    assert (counted.loads, counted.failures, counted.recomputed) == (0, 0, 1)
    require_nothing_left(nemotron.prefill, nemotron.decode)


def test_vllm_matrix_prompt_logprobs_on_p_alone_are_refused_on_d(nemotron):
    """P has prefilled nothing that D could load; under policy ``fail`` D says so."""
    prompt = random_prompt(95, 815)
    params = nemotron.prefill_only(prompt, prompt_logprobs=1)
    counted = refused(nemotron.decode, lambda: nemotron.decode_only(prompt, params, MAX_TOKENS))
    assert (counted.loads, counted.failures) == (0, 1)
    require_nothing_left(nemotron.prefill, nemotron.decode)


def test_vllm_matrix_chunked_prefill(pool, small_p):
    """A state that P built in pieces of 32 tokens, at borders of pieces and pages and between."""
    reference, decode = pool.engines("nemotron-h", "p1", "d1")
    pair = Pair(small_p, decode)
    for length in (33, 34, 129, 300, 600):
        prompt = random_prompt(length, 820 + length)
        expected = complete(reference, prompt, MAX_TOKENS).tokens
        answer, counted = measured(decode, lambda p=prompt: pair.complete(p, MAX_TOKENS))
        assert answer.tokens == expected, f"{length} tokens"
        assert (counted.external_tokens, counted.computed_tokens) == (length - 1, 1)
        assert (counted.loads, counted.failures) == (1, 0)
    require_nothing_left(small_p, decode)


def test_vllm_matrix_preemption_on_p(pool, small_p):
    reference, decode = pool.engines("nemotron-h", "p1", "d1")
    pair = Pair(small_p, decode)
    prompts = [random_prompt(600, 840 + index) for index in range(6)]
    expected = [complete(reference, prompt, MAX_TOKENS).tokens for prompt in prompts]
    before_p, before_d = small_p.metrics(), decode.metrics()
    answers = pair.complete_all(prompts, MAX_TOKENS)
    assert [answer.tokens for answer in answers] == expected
    assert small_p.metrics().since(before_p).total("vllm:num_preemptions_total") > 0
    counted = evidence(decode.metrics().since(before_d))
    assert (counted.loads, counted.failures, counted.recomputed) == (len(prompts), 0, 0)
    require_nothing_left(small_p, decode)
