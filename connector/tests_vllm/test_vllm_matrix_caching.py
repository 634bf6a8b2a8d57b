"""Prefix caching on P, on D and on both: right tokens, and a load of what is not cached.

On a hybrid model vLLM caches in Mamba mode ``align``: a state is kept where a step ends on a block
border. On the CPU a step must not be longer than a block then, see docs/reference/combinations.md.
D is also the engine with another ``--max-model-len`` than P.
"""

import pytest

from hybridpd_testkit.engines import EngineSpec
from hybridpd_testkit.expectations import MAX_TOKENS, random_prompt
from hybridpd_testkit.pd_client import Pair, complete, evidence, require_nothing_left

BLOCK_TOKENS = 128
CACHING = ("--enable-prefix-caching", "--max-num-batched-tokens", str(BLOCK_TOKENS))
PAIRS = ("p", "d", "pd")
# Half a block; a block that N-1 fills; the same and one token more; two blocks and a rest.
LENGTHS = (
    pytest.param(60, marks=pytest.mark.matrix),
    129,
    pytest.param(130, marks=pytest.mark.matrix),
    300,
)


@pytest.fixture(scope="module")
def cached(pool):
    """(P, D) that cache prefixes; the others' engines do not."""
    checkpoint = pool.checkpoint("nemotron-h")
    with pool.own(
        EngineSpec("cached-p", checkpoint, role="kv_producer", arguments=CACHING),
        EngineSpec(
            "cached-d", checkpoint, role="kv_consumer", arguments=CACHING, max_model_len=1024
        ),
    ) as engines:
        yield engines


def pair_of(pool, cached, where):
    plain = pool.engines("nemotron-h", "p1", "d1")
    return Pair(cached[0] if "p" in where else plain[0], cached[1] if "d" in where else plain[1])


def local_tokens(growth):
    return int(growth.total("vllm:prompt_tokens_by_source_total", source="local_cache_hit"))


def check(pool, pair, prompt):
    """One request: right tokens, no failure, and every token of the prompt accounted for."""
    (reference,) = pool.engines("nemotron-h", "p1")
    expected = complete(reference, prompt, MAX_TOKENS).tokens
    before = pair.decode.metrics()
    answer = pair.complete(prompt, MAX_TOKENS)
    growth = pair.decode.metrics().since(before)
    counted = evidence(growth)
    assert answer.tokens == expected
    assert counted.external_tokens + counted.computed_tokens + local_tokens(growth) == len(prompt)
    assert counted.failures == 0
    assert counted.read_bytes == counted.predicted_bytes
    return counted, local_tokens(growth)


def prefill_hit(pair, prompt):
    """Tokens that P's own cache gives a prefill of ``prompt``, whose load D then never asks for."""
    before = pair.prefill.metrics()
    pair.complete(prompt, 1)
    return local_tokens(pair.prefill.metrics().since(before))


@pytest.mark.parametrize("where", PAIRS)
@pytest.mark.parametrize("length", LENGTHS)
def test_vllm_matrix_caching(pool, cached, where, length):
    """First, repeated and extended: D loads what its attention layers lack, and a whole state."""
    pair = pair_of(pool, cached, where)
    prompt = random_prompt(length, 9000 + length + 1000 * PAIRS.index(where))
    first, local = check(pool, pair, prompt)
    assert (first.external_tokens, first.computed_tokens, first.loads, local) == (
        length - 1,
        1,
        1,
        0,
    )
    own = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS if "d" in where else 0
    again, local = check(pool, pair, prompt)
    assert (again.external_tokens, again.computed_tokens, local) == (length - 1 - own, 1, own)
    assert again.loads == (own < length - 1)
    longer = [*prompt, *random_prompt(90, length)]
    extended, local = check(pool, pair, longer)
    assert (extended.external_tokens, extended.computed_tokens, local) == (
        length + 89 - own,
        1,
        own,
    )
    assert (again.recomputed, extended.recomputed) == (0, 0)
    require_nothing_left(pair.prefill, pair.decode)


def test_vllm_matrix_caching_p_hits_its_own_prefix(pool, cached):
    pair = pair_of(pool, cached, "p")
    prompt = random_prompt(300, 9901)
    assert prefill_hit(pair, prompt) == 0
    assert prefill_hit(pair, prompt) == 2 * BLOCK_TOKENS
    check(pool, pair, prompt)
    require_nothing_left(pair.prefill, pair.decode)


@pytest.mark.parametrize("blocks", [1, 2])
def test_vllm_matrix_caching_all_attention_but_not_the_state(pool, cached, blocks):
    """D has every attention block of N-1 tokens and no state for them: there is nothing that a
    load could claim, vLLM computes the prompt, and that is counted."""
    pair = pair_of(pool, cached, "d")
    prompt = random_prompt(BLOCK_TOKENS * blocks + 40, 9950 + blocks)
    check(pool, pair, prompt)
    shorter = prompt[: BLOCK_TOKENS * blocks + 1]
    counted, local = check(pool, pair, shorter)
    assert (counted.loads, counted.external_tokens, local) == (0, 0, 0)
    assert counted.computed_tokens == len(shorter)
    assert counted.recomputed == 1
    require_nothing_left(pair.prefill, pair.decode)
