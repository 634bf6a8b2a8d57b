"""Speculative decoding by n-grams on a dense model: on both sides or on one, tokens are right.

A hybrid model that speculates is refused at start on a CPU: test_vllm_matrix_refusals.py. Why it
cannot be shown there: vLLM's convolutions do not look at how many drafted tokens were accepted. On
GPUs benchmarks/gpu/matrix_on_gpu.py has shown it. That other numbers of drafted tokens do not pair
is shown in test_geometry_compatibility.py.
"""

import json

import pytest
from vllm import __version__

from hybridpd_connector.vllm_compat import check_version
from hybridpd_testkit.checkpoint_families import FAMILIES
from hybridpd_testkit.engines import EngineFailedError, EngineSpec
from hybridpd_testkit.expectations import random_prompt
from hybridpd_testkit.near_ties import reference_of
from hybridpd_testkit.pd_client import Pair, complete, evidence, require_nothing_left
from hybridpd_testkit.processes import HttpError

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
SPECULATES = check_version(__version__) >= (0, 31)
# Not a gap: 0.30 cannot be asked, and the test that the reason names shows why on 0.30 itself. On
# 0.31 and 0.32 all of them run (`make test-matrix`).
needs_speculation = pytest.mark.skipif(
    not SPECULATES,
    reason="this vLLM cannot speculate on a CPU: test_vllm_matrix_speculation_on_one_dense_engine",
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


@needs_speculation
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


def test_vllm_matrix_speculation_on_one_dense_engine(pool):
    """A plain engine drafts and goes on. One of vLLM 0.30 ends at its first draft: its sampler has
    no kernel for a CPU."""
    spec = EngineSpec("one-drafting", pool.checkpoint("llama"), arguments=NGRAM)
    prompt = repetitive(113, 43)
    if SPECULATES:
        with pool.own(spec) as (drafting,):
            assert len(complete(drafting, prompt, TOKENS).tokens) == TOKENS
            drafted = drafting.metrics().total("vllm:spec_decode_num_draft_tokens_total")
        assert drafted > 0
        return
    with pool.own(spec) as (drafting,), pytest.raises((HttpError, EngineFailedError, OSError)):
        complete(drafting, prompt, TOKENS)
    log = pool.log_of("one-drafting")
    assert "_rejection_greedy_sample" in log
    assert "TypeError" in log


@needs_speculation
@pytest.mark.parametrize("family", ["nemotron-h", "lfm2"])
def test_vllm_matrix_speculation_on_one_hybrid_engine(pool, family):
    """One plain engine: its drafts change tokens of which it was sure. When this fails, vLLM has
    learnt it, and the refusal of hybrid models on CPUs has to be looked at."""
    checkpoint, dtype = pool.checkpoint(family), FAMILIES[family].dtype
    with pool.own(
        EngineSpec("one-plain", checkpoint, dtype=dtype),
        EngineSpec("one-drafting", checkpoint, dtype=dtype, arguments=NGRAM),
    ) as (plain, drafting):
        prompts = [repetitive(20 + 31 * index, 40 + index) for index in range(IN_FLIGHT)]
        references = [reference_of(plain, prompt, TOKENS) for prompt in prompts]
        answers = [complete(drafting, prompt, TOKENS).tokens for prompt in prompts]
    wrong = 0
    for reference, tokens in zip(references, answers, strict=True):
        try:
            reference.agreement(tokens)
        except ValueError:
            wrong += 1
    assert wrong > 0
