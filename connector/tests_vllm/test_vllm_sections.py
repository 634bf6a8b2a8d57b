"""The tests' models depend on every byte range that a load brings.

Each section of each D rank is zeroed after the read and before the engine uses it; the tokens
must change. This is what makes equal tokens mean something, and so do reference outputs that are
no loops of one token.
"""

import pytest

from hybridpd_testkit.expectations import MAX_TOKENS, prompts, reference_tokens
from hybridpd_testkit.pd_client import Pair
from hybridpd_testkit.probe_orders import ATTENTION_SECTIONS, STATE_SECTIONS

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
@pytest.mark.parametrize("section", ATTENTION_SECTIONS)
def test_vllm_sections_llama_zeroed(pool, section, rank):
    check_section(pool, "llama", section, rank)


@pytest.mark.parametrize("family", ["nemotron_h", "nemotron_h_mqa", "falcon_h1", "llama"])
def test_vllm_sections_reference_varies(pool, family):
    (engine,) = pool.engines(family.replace("_", "-"), "p1")
    for tokens in reference_tokens(engine):
        assert len(set(tokens)) > MAX_TOKENS / 2
