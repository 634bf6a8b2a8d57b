"""The reference is right: a plain engine, without our connector, answers the same.

It is started the way a pod starts it, with ``python -m``, not forked like the others.
"""

from hybridpd_testkit.engines import EngineSpec, running
from hybridpd_testkit.expectations import reference_tokens


def test_vllm_plain_engine_answers_like_one_with_the_connector(pool, tmp_path):
    (prefill,) = pool.engines("nemotron-h", "p1")
    spec = EngineSpec("plain", pool.checkpoint("nemotron-h"))
    with running([spec], tmp_path) as (plain,):
        assert reference_tokens(plain) == reference_tokens(prefill)
        assert not plain.metrics().has("hybridpd_loads_total")
        assert prefill.metrics().has("hybridpd_loads_total")
