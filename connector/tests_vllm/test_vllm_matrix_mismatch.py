"""Two engines that must not exchange states: refused at the handshake, each difference by name.

One D differs from P in everything that a flag can change on a CPU and that changes bytes or
meaning. The SSM dtype is not among them, since vLLM's CPU platform fixes it: see
test_geometry_compatibility.py. Another ``--max-model-len`` is harmless, see
test_vllm_matrix_caching.py.
"""

import pytest

from hybridpd_testkit.engines import EngineSpec
from hybridpd_testkit.expectations import MAX_TOKENS, random_prompt
from hybridpd_testkit.pd_client import Pair, complete, refused, require_nothing_left

PROMPT = random_prompt(150, 901)


@pytest.fixture(scope="module")
def strangers(pool):
    """(P with a revision, D of another one that stores everything differently)"""
    checkpoint = pool.checkpoint("nemotron-h")
    with pool.own(
        EngineSpec("rev-p", checkpoint, role="kv_producer", arguments=("--revision", "one")),
        EngineSpec(
            "rev-d",
            checkpoint,
            role="kv_consumer",
            arguments=(
                *("--revision", "two", "--dtype", "bfloat16"),
                *("--hf-overrides", '{"layer_norm_epsilon": 0.5}'),
            ),
            environment={"VLLM_SSM_CONV_STATE_LAYOUT": "SD"},
        ),
    ) as engines:
        yield engines


def refusal(pair):
    """What D logs when it is asked to load from this P; it must answer with an error."""
    params = pair.prefill_only(PROMPT)
    counted = refused(pair.decode, lambda: pair.decode_only(PROMPT, params, MAX_TOKENS))
    assert (counted.loads, counted.failures, counted.read_bytes) == (0, 1, 0)
    return pair.decode.log_path.read_text()


@pytest.mark.parametrize(
    ("difference", "way_out"),
    [
        ("revision is two here and one there", "Pin the same --revision on both sides."),
        (
            'bfloat16, hf_overrides {"layer_norm_epsilon":0.5} here and ',
            "the same values on both sides",
        ),
        ("kv_dtype is bfloat16 here and float32 there", "Set the same --kv-cache-dtype"),
        ("conv_dtype is bfloat16 here and float32 there", "Set the same --mamba-cache-dtype"),
        ("conv_layout is SD here and DS there", "Set VLLM_SSM_CONV_STATE_LAYOUT=DS on both sides."),
    ],
)
def test_vllm_matrix_mismatch_is_refused(strangers, difference, way_out):
    log = refusal(Pair(*strangers))
    assert difference in log
    assert way_out in log


def test_vllm_matrix_mismatch_leaves_nothing_behind(strangers):
    """The refused D serves its own requests, and P gives its blocks back."""
    refusal(Pair(*strangers))
    assert len(complete(strangers[1], PROMPT, MAX_TOKENS).tokens) == MAX_TOKENS
    require_nothing_left(strangers[1])
