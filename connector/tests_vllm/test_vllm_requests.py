"""A load belongs to its prompt, whatever routers and clients send; nothing stays pinned."""

import pytest

from hybridpd_testkit.expectations import MAX_TOKENS, random_prompt
from hybridpd_testkit.pd_client import (
    OpenRequest,
    Pair,
    complete,
    evidence,
    measured,
    refused,
    require_nothing_left,
    wait_until,
)
from hybridpd_testkit.processes import HttpError

IN_FLIGHT = 16
# vLLM refuses n > 1 with temperature 0; the most likely token alone is greedy too.
GREEDY_SAMPLES = {"temperature": 1.0, "top_k": 1}


def two_prompts():
    return random_prompt(140, 71), random_prompt(140, 72)


@pytest.mark.parametrize("kind", ["d1", "e2"])
def test_vllm_requests_16_at_once(pool, kind):
    """TP 1 to TP 1 and to TP 2: requests of different lengths do not mix."""
    pair = Pair(*pool.engines("nemotron-h", "p1", kind))
    prompts = [random_prompt(3 + 17 * index, 100 + index) for index in range(IN_FLIGHT)]
    expected = [complete(pair.prefill, prompt, MAX_TOKENS).tokens for prompt in prompts]
    before = pair.decode.metrics()
    answers = pair.complete_all(prompts, MAX_TOKENS)
    assert [answer.tokens for answer in answers] == expected
    counted = evidence(pair.decode.metrics().since(before))
    assert counted.external_tokens == sum(len(prompt) - 1 for prompt in prompts)
    assert counted.computed_tokens == IN_FLIGHT
    assert counted.read_bytes == counted.predicted_bytes > 0
    assert (counted.loads, counted.failures, counted.recomputed) == (IN_FLIGHT, 0, 0)
    require_nothing_left(pair.prefill, pair.decode)


def test_vllm_requests_another_prompt_of_equal_length_is_refused(nemotron):
    first, second = two_prompts()
    params = nemotron.prefill_only(first)
    counted = refused(nemotron.decode, lambda: nemotron.decode_only(second, params, MAX_TOKENS))
    assert (counted.loads, counted.failures, counted.read_bytes) == (0, 1, 0)
    require_nothing_left(nemotron.prefill, nemotron.decode)


def test_vllm_requests_two_prompts_in_one_call_never_swap_states(brief):
    """vLLM answers a list with the first prompt's parameters and gives D's to every prompt."""
    first, second = two_prompts()
    params = brief.prefill_only([first, second])
    counted = refused(brief.decode, lambda: brief.decode_only([first, second], params, MAX_TOKENS))
    assert counted.failures == 1
    require_nothing_left(brief.prefill, brief.decode)


def test_vllm_requests_two_prompts_in_one_call_recomputed(brief_queue):
    """With policy ``recompute`` the same call is answered, both prompts right."""
    prompts = list(two_prompts())
    expected = [complete(brief_queue.prefill, prompt, MAX_TOKENS).tokens for prompt in prompts]
    answer, counted = measured(
        brief_queue.decode, lambda: brief_queue.complete(prompts, MAX_TOKENS)
    )
    assert [choice.tokens for choice in answer.choices] == expected
    assert (counted.loads, counted.failures, counted.recomputed) == (1, 1, 1)
    require_nothing_left(brief_queue.prefill, brief_queue.decode)


def test_vllm_requests_two_samples_of_one_prompt(brief):
    """n = 2: both children load the one prefill, and no block waits for a lease to expire."""
    prompt, _ = two_prompts()
    expected = complete(brief.prefill, prompt, MAX_TOKENS).tokens
    before = brief.prefill.metrics()
    answer, counted = measured(
        brief.decode,
        lambda: brief.complete(prompt, MAX_TOKENS, n=2, **GREEDY_SAMPLES),
    )
    assert [choice.tokens for choice in answer.choices] == [expected, expected]
    assert (counted.loads, counted.failures, counted.recomputed) == (2, 0, 0)
    assert counted.external_tokens == 2 * (len(prompt) - 1)
    require_nothing_left(brief.prefill, brief.decode)
    assert brief.prefill.metrics().since(before).total("hybridpd_leases_expired_total") == 0


def test_vllm_requests_are_measured_and_foreseen_in_the_same_form(pool):
    """Histograms per request and rank, of both ranks of D."""
    prefill, decode = pool.engines("nemotron-h", "p1", "e2")
    before = decode.metrics()
    for length in (40, 300):
        Pair(prefill, decode).complete(random_prompt(length, 970), 2)
    growth = decode.metrics().since(before)
    for what in ("bytes", "descriptors"):
        measured_name, foreseen_name = f"hybridpd_load_{what}", f"hybridpd_predicted_load_{what}"
        assert growth.total(f"{measured_name}_count") == 4
        for part in ("count", "sum", "bucket"):
            measured_part = growth.total(f"{measured_name}_{part}")
            assert measured_part == growth.total(f"{foreseen_name}_{part}") > 0
        assert growth.total(f"{measured_name}_sum") == growth.total(f"hybridpd_read_{what}_total")


def test_vllm_requests_state_is_gone_after_the_last_reader(nemotron):
    """A second use of the same parameters is refused: the blocks may hold another prompt now."""
    prompt, _ = two_prompts()
    params = nemotron.prefill_only(prompt)
    nemotron.decode_only(prompt, params, MAX_TOKENS)
    require_nothing_left(nemotron.prefill)
    counted = refused(nemotron.decode, lambda: nemotron.decode_only(prompt, params, MAX_TOKENS))
    assert (counted.loads, counted.failures) == (0, 1)
    require_nothing_left(nemotron.prefill, nemotron.decode)


def test_vllm_requests_abandoned_in_d_queue_frees_p(brief_queue):
    """A request that dies in D's queue, before any block, gives P's blocks back at once."""
    prompt, _ = two_prompts()
    prefill, decode = brief_queue.prefill, brief_queue.decode
    with OpenRequest(decode, [9, 8, 7], 1900):
        wait_for_gauge(decode, "vllm:num_requests_running")
        params = brief_queue.prefill_only(prompt)
        before = prefill.metrics()
        with OpenRequest(decode, prompt, MAX_TOKENS, kv_transfer_params=params):
            wait_for_gauge(decode, "vllm:num_requests_waiting")
        released = "hybridpd_leases_released_total"
        wait_until(
            lambda: prefill.metrics().since(before).total(released) == 1, "D has released it"
        )
    require_nothing_left(prefill, decode)
    assert prefill.metrics().since(before).total("hybridpd_leases_expired_total") == 0


@pytest.mark.parametrize(
    "fields", [{"temperature": -4}, {"logprobs": 5000}, {"model": "nope"}], ids=str
)
def test_vllm_requests_that_d_does_not_admit_free_p(nemotron, fields):
    """vLLM refuses it before its scheduler sees it: P has its blocks back before the lease ends."""
    prompt, _ = two_prompts()
    before = nemotron.prefill.metrics()
    params = nemotron.prefill_only(prompt)
    with pytest.raises(HttpError):
        nemotron.decode_only(prompt, params, MAX_TOKENS, **fields)
    released = "hybridpd_leases_released_total"
    wait_until(
        lambda: nemotron.prefill.metrics().since(before).total(released) == 1, "D has released it"
    )
    require_nothing_left(nemotron.prefill, nemotron.decode)
    assert nemotron.prefill.metrics().since(before).total("hybridpd_leases_expired_total") == 0


def test_vllm_requests_abandoned_while_decoding_frees_both(nemotron):
    prompt, _ = two_prompts()
    params = nemotron.prefill_only(prompt)
    before = nemotron.decode.metrics()
    with OpenRequest(nemotron.decode, prompt, 1500, kv_transfer_params=params):
        wait_until(
            lambda: nemotron.decode.metrics().since(before).total("hybridpd_loads_total") == 1,
            "D has loaded it",
        )
    require_nothing_left(nemotron.prefill, nemotron.decode)


def wait_for_gauge(engine, name):
    wait_until(lambda: engine.metrics().total(name) > 0, f"{engine.describe()}: {name} above 0")
