"""Speculative decoding by n-grams on a dense model: on both sides or on one, tokens are right.

A hybrid model that speculates is refused on a CPU at start, since vLLM's convolution there does not
look at how many drafted tokens were accepted: test_vllm_matrix_refusals.py. That other numbers of
drafted tokens do not pair on a hybrid model is shown in test_geometry_compatibility.py.
"""

import json

import pytest

from hybridpd_testkit.engines import EngineSpec
from hybridpd_testkit.expectations import random_prompt
from hybridpd_testkit.pd_client import Pair, complete, evidence, require_nothing_left

TOKENS = 40
IN_FLIGHT = 8
NGRAM = (
    "--speculative-config",
    json.dumps(
        {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
    ),
)
pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def engines(pool):
    """(P, D) that both draft, (P, D) that do not."""
    checkpoint = pool.checkpoint("llama")
    specs = [
        EngineSpec(f"{name}-{role[3]}", checkpoint, role=role, arguments=arguments)
        for name, arguments in (("drafting", NGRAM), ("plain", ()))
        for role in ("kv_producer", "kv_consumer")
    ]
    with pool.own(*specs) as started:
        yield started


def repetitive(length, seed):
    """A prompt in which n-grams come again, so that something is drafted."""
    piece = random_prompt(11, seed)
    return (piece * (length // len(piece) + 1))[:length]


@pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (0, 3), (2, 1)])
def test_vllm_matrix_speculation_on_a_dense_llama(engines, prefill, decode):
    pair = Pair(engines[prefill], engines[decode])
    prompts = [repetitive(20 + 31 * index, 40 + index) for index in range(IN_FLIGHT)]
    expected = [complete(engines[2], prompt, TOKENS).tokens for prompt in prompts]
    before = pair.decode.metrics()
    answers = pair.complete_all(prompts, TOKENS)
    growth = pair.decode.metrics().since(before)
    assert [answer.tokens for answer in answers] == expected
    counted = evidence(growth)
    assert counted.external_tokens == sum(len(prompt) - 1 for prompt in prompts)
    assert (counted.loads, counted.failures) == (IN_FLIGHT, 0)
    drafted = growth.total("vllm:spec_decode_num_draft_tokens_total")
    assert (drafted > 0) == (decode == 1)
    require_nothing_left(pair.prefill, pair.decode)
