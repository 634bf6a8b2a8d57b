"""Speculative decoding by n-grams: on both sides right, on one side refused at the handshake.

The state slots are wider by the drafted tokens, and a request owns a slot for each of them; only
the one that bears the state moves. P's and D's numbers must be equal, since a row of the
convolution state has one column more for each. Both refusals name the field, both values and the
way out.

On a CPU, vLLM's Mamba2 convolution does not look at how many drafted tokens were accepted, so a
single engine that speculates gives other tokens than one that does not, from the third on. What a
load brought decides the first two, so those are compared here; all of them on a dense model; and on
a hybrid on a GPU, by benchmarks/gpu/matrix_on_gpu.py.
"""

import json

import pytest

from hybridpd_testkit.engines import EngineSpec
from hybridpd_testkit.expectations import ideal_bytes, random_prompt
from hybridpd_testkit.pd_client import (
    Pair,
    complete,
    evidence,
    measured,
    refused,
    require_nothing_left,
)

TOKENS = 2
DENSE_TOKENS = 40
DRAFTED = 2
NGRAM = (
    "--speculative-config",
    json.dumps(
        {
            "method": "ngram",
            "num_speculative_tokens": DRAFTED,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
    ),
    "--revision",
    "one",
)


@pytest.fixture(scope="module")
def drafting(pool):
    """(P, D) that both draft; the family's shared engines do not."""
    checkpoint = pool.checkpoint("nemotron-h")
    with pool.own(
        EngineSpec("draft-p", checkpoint, role="kv_producer", arguments=NGRAM),
        EngineSpec("draft-d", checkpoint, role="kv_consumer", arguments=NGRAM),
    ) as engines:
        yield engines


def repetitive(length, seed):
    """A prompt in which n-grams come again, so that something is drafted."""
    piece = random_prompt(11, seed)
    return (piece * (length // len(piece) + 1))[:length]


def test_vllm_matrix_speculation_on_both_sides(pool, drafting):
    pair = Pair(*drafting)
    (reference,) = pool.engines("nemotron-h", "p1")
    reports = pair.decode.worker_reports()
    for length in (2, 60, 129, 300):
        for prompt in (repetitive(length, length), random_prompt(length, length)):
            expected = complete(reference, prompt, TOKENS).tokens
            answer, counted = measured(pair.decode, lambda p=prompt: pair.complete(p, TOKENS))
            assert answer.tokens == expected, f"{length} tokens"
            assert (counted.external_tokens, counted.computed_tokens) == (length - 1, 1)
            assert counted.read_bytes == counted.predicted_bytes == ideal_bytes(reports, length - 1)
            assert (counted.loads, counted.failures, counted.recomputed) == (1, 0, 0)
    require_nothing_left(*drafting)


def test_vllm_matrix_speculation_eight_at_once(pool, drafting):
    pair = Pair(*drafting)
    (reference,) = pool.engines("nemotron-h", "p1")
    prompts = [repetitive(20 + 31 * index, 40 + index) for index in range(8)]
    expected = [complete(reference, prompt, TOKENS).tokens for prompt in prompts]
    before = pair.decode.metrics()
    assert [answer.tokens for answer in pair.complete_all(prompts, TOKENS)] == expected
    counted = evidence(pair.decode.metrics().since(before))
    assert (counted.loads, counted.failures) == (8, 0)
    require_nothing_left(*drafting)


@pytest.mark.parametrize("side", ["p", "d"])
def test_vllm_matrix_speculation_on_one_side_is_refused(pool, drafting, side):
    plain = pool.engines("nemotron-h", "p1", "d1")
    pair = Pair(drafting[0], plain[1]) if side == "p" else Pair(plain[0], drafting[1])
    here, there = (0, DRAFTED) if side == "p" else (DRAFTED, 0)
    prompt = random_prompt(150, 77)
    params = pair.prefill_only(prompt)
    counted = refused(pair.decode, lambda: pair.decode_only(prompt, params, TOKENS))
    assert (counted.loads, counted.failures, counted.read_bytes) == (0, 1, 0)
    log = pair.decode.log_path.read_text()
    assert f"spec_tokens is {here} here and {there} there" in log
    assert "Give both sides the same number of speculative tokens." in log


@pytest.mark.matrix
def test_vllm_matrix_speculation_on_a_dense_llama(pool):
    checkpoint = pool.checkpoint("llama")
    (reference,) = pool.engines("llama", "p1")
    with pool.own(
        EngineSpec("dense-p", checkpoint, role="kv_producer", arguments=NGRAM),
        EngineSpec("dense-d", checkpoint, role="kv_consumer", arguments=NGRAM),
    ) as engines:
        pair = Pair(*engines)
        before = pair.decode.metrics()
        prompts = [repetitive(20 + 31 * index, 40 + index) for index in range(8)]
        expected = [complete(reference, prompt, DENSE_TOKENS).tokens for prompt in prompts]
        answers = pair.complete_all(prompts, DENSE_TOKENS)
        growth = pair.decode.metrics().since(before)
        assert [answer.tokens for answer in answers] == expected
        assert growth.total("vllm:spec_decode_num_draft_tokens_total") > 0
        assert (evidence(growth).loads, evidence(growth).failures) == (8, 0)
        require_nothing_left(*engines)
