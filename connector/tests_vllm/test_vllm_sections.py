"""The tests' models depend on every byte range that a load brings.

Each section of each D rank is zeroed after the read and before the engine uses it; the tokens
must change. This is what makes equal tokens mean something, and so do reference outputs that are
no loops of one token.
"""

import pytest

from hybridpd_testkit import near_ties
from hybridpd_testkit.checkpoint_families import FAMILIES
from hybridpd_testkit.expectations import MAX_TOKENS, prompts, reference_tokens
from hybridpd_testkit.pd_client import Pair
from hybridpd_testkit.probe_orders import ATTENTION_SECTIONS, DELTA_SECTIONS, STATE_SECTIONS

# A few steps after a load the convolution has forgotten it, so one prompt may survive its loss.
TRIES = [prompts().index(prompt) for prompt in prompts() if len(prompt) in (5, 100, 129, 300)]


def check_section(pool, family, section, rank):
    prefill, decode = pool.engines(family, "p1", "e2")
    pair = Pair(prefill, decode)
    with pool.orders(decode).damage(section, rank):
        assert any(
            pair.complete(prompts()[index], MAX_TOKENS).tokens != reference_tokens(prefill)[index]
            for index in TRIES
        )


RANKS = pytest.mark.parametrize("rank", [0, 1])


@RANKS
@pytest.mark.parametrize("section", [*STATE_SECTIONS, *ATTENTION_SECTIONS])
def test_vllm_sections_nemotron_h_zeroed(pool, section, rank):
    check_section(pool, "nemotron-h", section, rank)


@RANKS
@pytest.mark.parametrize("section", [*STATE_SECTIONS, *ATTENTION_SECTIONS])
def test_vllm_sections_nemotron_h_mqa_zeroed(pool, section, rank):
    check_section(pool, "nemotron-h-mqa", section, rank)


@RANKS
@pytest.mark.parametrize("section", [*STATE_SECTIONS, *ATTENTION_SECTIONS])
def test_vllm_sections_falcon_h1_zeroed(pool, section, rank):
    check_section(pool, "falcon-h1", section, rank)


@RANKS
@pytest.mark.parametrize("section", [*STATE_SECTIONS, *ATTENTION_SECTIONS])
def test_vllm_sections_granite_4_h_zeroed(pool, section, rank):
    check_section(pool, "granite-4-h", section, rank)


@RANKS
@pytest.mark.parametrize("section", ["x", *ATTENTION_SECTIONS])
def test_vllm_sections_lfm2_zeroed(pool, section, rank):
    check_section(pool, "lfm2", section, rank)


@RANKS
@pytest.mark.parametrize("section", [*DELTA_SECTIONS, *ATTENTION_SECTIONS])
def test_vllm_sections_qwen3_next_zeroed(pool, section, rank):
    """In bfloat16 a changed token means something only where the single engine was decided, so
    more prompts are tried."""
    prefill, decode = pool.engines("qwen3-next", "p1", "e2")
    pair = Pair(prefill, decode)
    with pool.orders(decode).damage(section, rank):
        assert any(
            decidedly_other(
                near_ties.references(prefill)[index],
                pair.complete(prompts()[index], MAX_TOKENS).tokens,
            )
            for index in range(1, len(prompts()))
        )


def decidedly_other(reference, tokens):
    try:
        reference.agreement(tokens)
    except ValueError:
        return True
    return False


@RANKS
@pytest.mark.parametrize("section", ATTENTION_SECTIONS)
def test_vllm_sections_llama_zeroed(pool, section, rank):
    check_section(pool, "llama", section, rank)


@pytest.mark.parametrize("family", [name.replace("-", "_") for name in FAMILIES])
def test_vllm_sections_reference_varies(pool, family):
    name = next(name for name in FAMILIES if name.replace("-", "_") == family)
    (engine,) = pool.engines(name, "p1")
    for tokens in reference_tokens(engine):
        assert len(set(tokens)) > MAX_TOKENS / 2
