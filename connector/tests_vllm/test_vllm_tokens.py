"""Greedy tokens through P and D equal one engine's, and D really loaded what it claims.

Every family runs with D's failure policy ``fail``; equal tokens alone would not show a D that
quietly recomputes, so each request also asserts what D counted.
"""

import functools

import pytest
from vllm import __version__

from hybridpd_connector.vllm_compat import check_version
from hybridpd_geometry import SOUND_SINCE
from hybridpd_testkit import near_ties
from hybridpd_testkit.checkpoint_families import FAMILIES
from hybridpd_testkit.engines import EngineFailedError, EngineSpec
from hybridpd_testkit.expectations import (
    MAX_TOKENS,
    ideal_bytes,
    prompts,
    random_prompt,
    reference_tokens,
)
from hybridpd_testkit.pd_client import Pair, complete, leases_held, measured, wait_until

KINDS = {(1, 1): ("p1", "d1"), (1, 2): ("p1", "e2"), (2, 1): ("e2", "d1")}


def pair_of(pool, family, prefill_tp, decode_tp):
    """(pair, single engine at TP 1). All engines of a family start together."""
    by_kind = dict(zip(("p1", "d1", "e2"), pool.engines(family, "p1", "d1", "e2"), strict=True))
    pair = Pair(*(by_kind[kind] for kind in KINDS[prefill_tp, decode_tp]))
    assert (pair.prefill.spec.tp_size, pair.decode.spec.tp_size) == (prefill_tp, decode_tp)
    assert pair.decode.spec.failure_policy == "fail"
    return pair, by_kind["p1"]


def load_tokens(pair, reports, prompt, max_tokens=MAX_TOKENS):
    """The pair's tokens, after checking that D loaded all but one token of the prompt."""
    answer, counted = measured(pair.decode, lambda: pair.complete(prompt, max_tokens))
    loaded = len(prompt) - 1
    assert counted.external_tokens == loaded
    assert counted.computed_tokens == 1
    assert counted.read_bytes == ideal_bytes(reports, loaded)
    assert counted.predicted_bytes == counted.read_bytes
    assert (counted.loads, counted.failures, counted.recomputed) == (min(loaded, 1), 0, 0)
    return answer.tokens


def check_tokens(pool, family, prefill_tp, decode_tp):
    pair, single = pair_of(pool, family, prefill_tp, decode_tp)
    reports = pair.decode.worker_reports()
    for prompt, tokens in zip(prompts(), reference_tokens(single), strict=True):
        assert load_tokens(pair, reports, prompt) == tokens, f"{len(prompt)} tokens"
    wait_until(lambda: leases_held(pair.prefill) == 0, "P has freed every prompt")


def check_tokens_but_for_ties(pool, family, prefill_tp, decode_tp):
    """For engines that compute in bfloat16, see ``near_ties``."""
    pair, single = pair_of(pool, family, prefill_tp, decode_tp)
    load = functools.partial(load_tokens, pair, pair.decode.worker_reports())
    ties = [
        near_ties.fallen_ties(reference, prompt, load)
        for prompt, reference in zip(prompts(), near_ties.references(single), strict=True)
    ]
    assert sum(ties) <= near_ties.MOST_TIES, ties
    wait_until(lambda: leases_held(pair.prefill) == 0, "P has freed every prompt")


def test_vllm_tokens_nemotron_h_tp1_to_tp1(pool):
    check_tokens(pool, "nemotron-h", 1, 1)


def test_vllm_tokens_nemotron_h_tp1_to_tp2(pool):
    check_tokens(pool, "nemotron-h", 1, 2)


def test_vllm_tokens_nemotron_h_tp2_to_tp1(pool):
    check_tokens(pool, "nemotron-h", 2, 1)


# One KV head, which both ranks of TP 2 hold, and blocks of 256 tokens on TP 1 but 128 on TP 2.


def test_vllm_tokens_nemotron_h_mqa_tp1_to_tp1(pool):
    check_tokens(pool, "nemotron-h-mqa", 1, 1)


def test_vllm_tokens_nemotron_h_mqa_tp1_to_tp2(pool):
    check_tokens(pool, "nemotron-h-mqa", 1, 2)


def test_vllm_tokens_nemotron_h_mqa_tp2_to_tp1(pool):
    check_tokens(pool, "nemotron-h-mqa", 2, 1)


# One group of B and C, which every rank holds whole.


def test_vllm_tokens_falcon_h1_tp1_to_tp1(pool):
    check_tokens(pool, "falcon-h1", 1, 1)


def test_vllm_tokens_falcon_h1_tp1_to_tp2(pool):
    check_tokens(pool, "falcon-h1", 1, 2)


def test_vllm_tokens_falcon_h1_tp2_to_tp1(pool):
    check_tokens(pool, "falcon-h1", 2, 1)


def test_vllm_tokens_granite_4_h_tp1_to_tp1(pool):
    check_tokens(pool, "granite-4-h", 1, 1)


def test_vllm_tokens_granite_4_h_tp1_to_tp2(pool):
    check_tokens(pool, "granite-4-h", 1, 2)


def test_vllm_tokens_granite_4_h_tp2_to_tp1(pool):
    check_tokens(pool, "granite-4-h", 2, 1)


# Gated DeltaNet in bfloat16; blocks of 640 tokens on TP 1 and 384 on TP 2.

DELTA_IS_SOUND = check_version(__version__) >= SOUND_SINCE["gdn"]
# Not a gap: such an engine is refused on 0.30, and the test that the reason names shows why on 0.30
# itself. On 0.31 and 0.32 all of them run (`make test-matrix`, `make test`).
needs_sound_delta = pytest.mark.skipif(
    not DELTA_IS_SOUND,
    reason="this vLLM is refused for Gated DeltaNet: "
    "test_vllm_tokens_qwen3_next_where_one_engine_is_wrong",
)


@pytest.mark.matrix
def test_vllm_tokens_qwen3_next_where_one_engine_is_wrong(pool):
    """A plain engine of vLLM 0.30 answers a prompt of one token by what used its block before. It
    is refused; since 0.31 such prompts have one answer."""
    checkpoint, dtype = pool.checkpoint("qwen3-next"), FAMILIES["qwen3-next"].dtype
    with pool.own(EngineSpec("alone", checkpoint, dtype=dtype, num_blocks=40)) as (alone,):
        answers = set()
        for seed in range(6):
            answers.add(complete(alone, [130], 4).tokens)
            complete(alone, random_prompt(300, seed), 4)
    assert (len(answers) == 1) == DELTA_IS_SOUND, answers
    if not DELTA_IS_SOUND:
        spec = EngineSpec("old", checkpoint, dtype=dtype, role="kv_producer")
        with pytest.raises(EngineFailedError, match="ended with exit code"), pool.own(spec):
            pytest.fail("the engine has started")
        assert "expected 0.31 or later for a model with Gated DeltaNet" in pool.log_of("old")


@needs_sound_delta
def test_vllm_tokens_qwen3_next_tp1_to_tp1(pool):
    check_tokens_but_for_ties(pool, "qwen3-next", 1, 1)


@needs_sound_delta
def test_vllm_tokens_qwen3_next_tp1_to_tp2(pool):
    check_tokens_but_for_ties(pool, "qwen3-next", 1, 2)


@needs_sound_delta
def test_vllm_tokens_qwen3_next_tp2_to_tp1(pool):
    check_tokens_but_for_ties(pool, "qwen3-next", 2, 1)


# Short convolutions: a conv state and no temporal one.


def test_vllm_tokens_lfm2_tp1_to_tp1(pool):
    check_tokens(pool, "lfm2", 1, 1)


def test_vllm_tokens_lfm2_tp1_to_tp2(pool):
    check_tokens(pool, "lfm2", 1, 2)


def test_vllm_tokens_lfm2_tp2_to_tp1(pool):
    check_tokens(pool, "lfm2", 2, 1)


# Attention only.


def test_vllm_tokens_llama_tp1_to_tp1(pool):
    check_tokens(pool, "llama", 1, 1)


def test_vllm_tokens_llama_tp1_to_tp2(pool):
    check_tokens(pool, "llama", 1, 2)


def test_vllm_tokens_llama_tp2_to_tp1(pool):
    check_tokens(pool, "llama", 2, 1)
