"""Greedy tokens through P and D equal one engine's, and D really loaded what it claims.

Every family runs with D's failure policy ``fail``; equal tokens alone would not show a D that
quietly recomputes, so each request also asserts what D counted.
"""

import functools
import math
import random

from hybridpd_testkit.checkpoint_families import VOCABULARY_SIZE
from hybridpd_testkit.pd_client import Pair, complete, leases_held, measured, wait_until
from hybridpd_testkit.tokenizer import SPECIAL_TOKENS

MAX_TOKENS = 16
# One token; a few; around a 128-token page (129 leaves it exactly full); several pages.
LENGTHS = (1, 2, 5, 100, 127, 128, 129, 300, 600)
# The CPU backend stores K with the tokens innermost; it is read in runs of so many tokens.
K_RUN_TOKENS = 16
KINDS = {(1, 1): ("p1", "d1"), (1, 2): ("p1", "e2"), (2, 1): ("e2", "d1")}


def prompts():
    source = random.Random(3)
    return [
        [source.randrange(len(SPECIAL_TOKENS), VOCABULARY_SIZE) for _ in range(n)] for n in LENGTHS
    ]


@functools.cache
def reference(engine):
    """What one engine answers by itself: no transfer parameters, no other engine involved."""
    return [complete(engine, prompt, MAX_TOKENS).tokens for prompt in prompts()]


def ideal_bytes(reports, tokens):
    """Bytes that all D ranks together must receive for ``tokens`` tokens, from vLLM's own sizes."""
    if tokens == 0:
        return 0
    total = 0
    for group in (group for report in reports for group in report["groups"]):
        if group["kind"] == "state":
            sizes = zip(group["shapes"], group["item_bytes"], strict=True)
            layer_bytes = sum(math.prod(shape) * item for shape, item in sizes)
        else:
            k_tokens = math.ceil(tokens / K_RUN_TOKENS) * K_RUN_TOKENS
            token_bytes = group["kv_heads"] * group["head_dim"] * group["item_bytes"]
            layer_bytes = (k_tokens + tokens) * token_bytes
        total += layer_bytes * len(group["layers"])
    return total


def check_tokens(pool, family, prefill_tp, decode_tp):
    engines = pool.engines(family, "p1", "d1", "e2")
    by_kind = dict(zip(("p1", "d1", "e2"), engines, strict=True))
    pair = Pair(*(by_kind[kind] for kind in KINDS[prefill_tp, decode_tp]))
    assert (pair.prefill.spec.tp_size, pair.decode.spec.tp_size) == (prefill_tp, decode_tp)
    assert pair.decode.spec.failure_policy == "fail"
    reports = pair.decode.worker_reports()
    single = reference(by_kind["p1"])
    for prompt, expected in zip(prompts(), single, strict=True):
        answer, counted = measured(pair.decode, lambda p=prompt: pair.complete(p, MAX_TOKENS))
        loaded = len(prompt) - 1
        assert answer.tokens == expected, f"{len(prompt)} tokens"
        assert counted.external_tokens == loaded
        assert counted.computed_tokens == 1
        assert counted.read_bytes == ideal_bytes(reports, loaded)
        assert counted.predicted_bytes == counted.read_bytes
        assert (counted.loads, counted.failures, counted.recomputed) == (min(loaded, 1), 0, 0)
    wait_until(lambda: leases_held(pair.prefill) == 0, "P has freed every prompt")


def test_vllm_tokens_nemotron_h_tp1_to_tp1(pool):
    check_tokens(pool, "nemotron-h", 1, 1)


def test_vllm_tokens_nemotron_h_tp1_to_tp2(pool):
    check_tokens(pool, "nemotron-h", 1, 2)


def test_vllm_tokens_nemotron_h_tp2_to_tp1(pool):
    check_tokens(pool, "nemotron-h", 2, 1)
