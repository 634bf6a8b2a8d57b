"""How D samples is D's own affair: with a state that was loaded as with one that it computed.

And what an operator does to engines that run: pauses, and caches that are thrown away.
"""

import threading

import pytest

from hybridpd_testkit.expectations import MAX_TOKENS, random_prompt
from hybridpd_testkit.pd_client import (
    complete,
    evidence,
    measured,
    require_nothing_left,
    wait_until,
)

PROMPT = random_prompt(150, 955)
LONG = 300
SAMPLING = {
    "structured-outputs": {"structured_outputs": {"regex": "[a-z]{3,9}"}},
    "logit-bias": {"logit_bias": {"7": 5.0}},
    "min-tokens": {"min_tokens": 4, "ignore_eos": False},
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 0.5},
    "seed": {"temperature": 1.0, "seed": 5},
    "logprobs": {"logprobs": 3},
    "echo": {"echo": True},
}


@pytest.mark.parametrize("fields", SAMPLING.values(), ids=SAMPLING)
def test_vllm_matrix_sampling_of_a_loaded_request(nemotron, fields):
    expected = complete(nemotron.prefill, PROMPT, MAX_TOKENS, **fields)
    params = nemotron.prefill_only(PROMPT)
    answer, counted = measured(
        nemotron.decode, lambda: nemotron.decode_only(PROMPT, params, MAX_TOKENS, **fields)
    )
    assert [choice.text for choice in answer.choices] == [c.text for c in expected.choices]
    assert answer.tokens == expected.tokens
    assert (counted.loads, counted.failures) == (1, 0)
    require_nothing_left(nemotron.prefill, nemotron.decode)


def test_vllm_matrix_sampling_by_beams_is_computed_on_d(brief):
    """vLLM does not pass the parameters on to the beams: P's blocks are free after the lease."""
    beams = {"use_beam_search": True, "n": 2}
    expected = complete(brief.prefill, PROMPT, 8, **beams)
    params = brief.prefill_only(PROMPT)
    answer, counted = measured(brief.decode, lambda: brief.decode_only(PROMPT, params, 8, **beams))
    assert [c.tokens for c in answer.choices] == [c.tokens for c in expected.choices]
    assert (counted.loads, counted.failures) == (0, 0)
    require_nothing_left(brief.prefill, brief.decode)


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_vllm_matrix_pauses_of_p_end_when_its_blocks_are_free(brief, mode):
    """Nobody reads this prefill: its lease ends, and with it the wait."""
    brief.prefill_only(PROMPT)
    before = brief.prefill.metrics()
    try:
        assert brief.prefill.post(f"/pause?mode={mode}", {}) == {"status": "paused"}
    finally:
        brief.prefill.post("/resume", {})
    assert brief.complete(PROMPT, 2).tokens
    require_nothing_left(brief.prefill, brief.decode)
    assert brief.prefill.metrics().since(before).total("hybridpd_leases_expired_total") == 1


def test_vllm_matrix_pauses_of_d_keep_its_request(nemotron):
    expected = complete(nemotron.prefill, PROMPT, MAX_TOKENS).tokens
    params = nemotron.prefill_only(PROMPT)
    nemotron.decode.post("/pause?mode=keep", {})
    answers = []
    request = threading.Thread(
        target=lambda: answers.append(nemotron.decode_only(PROMPT, params, MAX_TOKENS))
    )
    try:
        request.start()
    finally:
        nemotron.decode.post("/resume", {})
    request.join()
    assert answers[0].tokens == expected
    require_nothing_left(nemotron.prefill, nemotron.decode)


def test_vllm_matrix_pauses_and_caches_thrown_away_under_a_loaded_request(nemotron):
    """``reset_prefix_cache`` with running requests: D computes the prompt and its tokens again."""
    expected = complete(nemotron.prefill, PROMPT, LONG).tokens
    params = nemotron.prefill_only(PROMPT)
    before = nemotron.decode.metrics()
    answers = []
    request = threading.Thread(
        target=lambda: answers.append(nemotron.decode_only(PROMPT, params, LONG))
    )
    request.start()
    wait_until(lambda: evidence(nemotron.decode.metrics().since(before)).loads, "D has loaded it")
    thrown = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
    assert nemotron.decode.post(thrown, {}) == {"success": True}
    request.join()
    assert answers[0].tokens == expected
    assert nemotron.decode.metrics().since(before).total("vllm:num_preemptions_total") > 0
    require_nothing_left(nemotron.prefill, nemotron.decode)
