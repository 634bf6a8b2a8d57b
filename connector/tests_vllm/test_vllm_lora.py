"""A state belongs to its LoRA adapter: another adapter's is refused, its own gives its tokens."""

import dataclasses

import pytest

from hybridpd_testkit.expectations import MAX_TOKENS, random_prompt
from hybridpd_testkit.pd_client import (
    Pair,
    complete,
    measured,
    refused,
    require_nothing_left,
)

PROMPT = random_prompt(150, 77)


@pytest.fixture
def llama(pool):
    return Pair(*pool.engines("llama", "p1", "d1"))


def test_vllm_lora_llama_own_adapter(llama):
    expected = complete(llama.prefill, PROMPT, MAX_TOKENS, model="red").tokens
    assert expected != complete(llama.prefill, PROMPT, MAX_TOKENS).tokens
    answer, counted = measured(
        llama.decode, lambda: llama.complete(PROMPT, MAX_TOKENS, model="red")
    )
    assert answer.tokens == expected
    assert (counted.loads, counted.failures) == (1, 0)
    require_nothing_left(llama.prefill, llama.decode)


@pytest.mark.parametrize("model", ["blue", "tiny"])
def test_vllm_lora_llama_other_adapter_or_none_is_refused(llama, model):
    params = llama.prefill_only(PROMPT, model="red")
    counted = refused(
        llama.decode, lambda: llama.decode_only(PROMPT, params, MAX_TOKENS, model=model)
    )
    assert (counted.loads, counted.failures, counted.read_bytes) == (0, 1, 0)
    require_nothing_left(llama.prefill, llama.decode)


def test_vllm_lora_llama_of_other_layers_is_refused(pool):
    """An adapter that D uses in some of its layers only makes other states under one name."""
    prefill, decode = (pool.spec("llama", kind) for kind in ("p1", "d1"))
    # Who is refused releases nothing: P waits for the lease.
    prefill = dataclasses.replace(prefill, name="all", extra_config={"lease_seconds": 6})
    fewer = (*decode.arguments, "--lora-target-modules", "o_proj")
    with pool.own(prefill, dataclasses.replace(decode, name="some", arguments=fewer)) as engines:
        pair = Pair(*engines)
        params = pair.prefill_only(PROMPT, model="red")
        counted = refused(pair.decode, lambda: pair.decode_only(PROMPT, params, model="red"))
        assert (counted.loads, counted.failures, counted.read_bytes) == (0, 1, 0)
        assert 'target_modules ["o_proj"] here and' in pair.decode.log_path.read_text()
        require_nothing_left(*engines)
