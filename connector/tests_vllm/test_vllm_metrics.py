"""Our metrics in a real registry, behind vLLM's own base class, without an engine."""

import types

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from hybridpd_connector import stats

TYPES = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
LABELS = ["model_name", "engine"]


def metrics_of_an_engine():
    from hybridpd_connector.vllm_metrics import HybridPromMetrics

    config = types.SimpleNamespace(kv_transfer_config=None)
    return HybridPromMetrics(config, TYPES, LABELS, {0: ["tiny", "0"]})


def loads():
    labels = {"model_name": "tiny", "engine": "0"}
    return REGISTRY.get_sample_value("hybridpd_loads_total", labels)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch, while it is imported
def test_vllm_metrics_of_an_engine_that_follows_another_in_one_process():
    """A process may make a second engine, which begins at 0: names are registered once only."""
    recorded = stats.Stats()
    recorded.count(stats.LOADS, 3)
    for _ in range(2):
        metrics = metrics_of_an_engine()
        assert loads() == 0
        metrics.observe(recorded.data)
        assert loads() == 3
