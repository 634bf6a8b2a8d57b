"""The connector inside MultiConnector, beside one that has nothing to load, on real engines."""

import pytest

from hybridpd_testkit.engines import SHIPPED, ConnectorClass, EngineSpec
from hybridpd_testkit.expectations import MAX_TOKENS, random_prompt
from hybridpd_testkit.pd_client import Pair, complete, measured, refused, require_nothing_left

MULTI = ConnectorClass("MultiConnector", None)
QUIET = ConnectorClass("QuietConnector", "hybridpd_testkit.quiet_connector")


def multi_spec(name, checkpoint, role, order):
    children = [
        {"kv_connector": c.name, "kv_connector_module_path": c.module, "kv_role": role}
        for c in order
    ]
    return EngineSpec(
        name, checkpoint, role=role, connector=MULTI, extra_config={"connectors": children}
    )


@pytest.fixture(scope="module")
def multi(pool):
    """(P, D), ours first on P and second on D."""
    checkpoint = pool.checkpoint("nemotron-h")
    with pool.own(
        multi_spec("multi-p", checkpoint, "kv_producer", (SHIPPED, QUIET)),
        multi_spec("multi-d", checkpoint, "kv_consumer", (QUIET, SHIPPED)),
    ) as engines:
        yield Pair(*engines)


@pytest.mark.parametrize("length", [1, 60, 300])
def test_vllm_matrix_multi_connector_loads(pool, multi, length):
    (reference,) = pool.engines("nemotron-h", "p1")
    prompt = random_prompt(length, 940 + length)
    expected = complete(reference, prompt, MAX_TOKENS).tokens
    answer, counted = measured(multi.decode, lambda: multi.complete(prompt, MAX_TOKENS))
    assert answer.tokens == expected
    assert (counted.external_tokens, counted.computed_tokens) == (length - 1, 1)
    assert (counted.loads, counted.failures) == (min(length - 1, 1), 0)
    require_nothing_left(multi.prefill, multi.decode)


def test_vllm_matrix_multi_connector_refuses(multi):
    """A failed load is reported through MultiConnector as it is without it."""
    params = multi.prefill_only(random_prompt(140, 950))
    counted = refused(
        multi.decode, lambda: multi.decode_only(random_prompt(140, 951), params, MAX_TOKENS)
    )
    assert (counted.loads, counted.failures) == (0, 1)
    require_nothing_left(multi.prefill, multi.decode)
