"""Statistics of the connector inside vLLM's MultiConnector, which finds classes by name alone.

No engine is started; that results of another connector change nothing is a test of the scheduler
half. vLLM is imported late, where the warnings of its own imports can be told apart.
"""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hybridpd_connector import stats

NAME = "HybridNixlConnector"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, while imported


@pytest.fixture
def connector():
    from hybridpd_connector import connector

    return connector


def measured(connector, loads, seconds):
    recorder = stats.Stats()
    recorder.count(stats.LOADS, loads)
    recorder.observe(stats.POST_SECONDS, seconds)
    return connector.HybridNixlConnector.build_kv_connector_stats(recorder.take())


def test_vllm_multi_connector_importing_registers_the_class_once(connector):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    assert KVConnectorFactory.get_connector_class_by_name(NAME) is connector.HybridNixlConnector
    connector.register()
    assert KVConnectorFactory.get_connector_class_by_name(NAME) is connector.HybridNixlConnector


def test_vllm_multi_connector_stats_survive_the_way_between_processes(connector):
    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as multi

    ours = multi.MultiKVConnectorStats()
    ours[NAME] = measured(connector, 2, 0.25)
    arrived = multi.MultiConnector.build_kv_connector_stats(ours.to_dict())
    another = multi.MultiKVConnectorStats()
    another[NAME] = measured(connector, 3, 0.5)
    both = arrived.aggregate(another)[NAME]
    assert not both.is_empty()
    assert both.data["counts"] == {stats.LOADS: 5}
    assert both.data["seconds"] == {stats.POST_SECONDS: [0.25, 0.5]}


class _Config:
    """What vLLM's base class of metrics reads of a VllmConfig."""

    kv_transfer_config = object()


@pytest.fixture
def shown(connector):
    """(metrics of one engine, the registry they are in)."""
    registry = CollectorRegistry()
    types = {kind: _bound(kind, registry) for kind in (Counter, Gauge, Histogram)}
    metrics = connector.HybridNixlConnector.build_prom_metrics(
        _Config(), types, ["model_name", "engine"], {0: ["tiny", "0"]}
    )
    return metrics, registry


def test_vllm_multi_connector_link_has_one_series_that_ends_with_it(shown):
    metrics, registry = shown

    def links(**said):
        recorder = stats.Stats()
        recorder.set_links(said)
        metrics.observe(recorder.take())
        return {
            (sample.labels["peer"], sample.labels["path"]): sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == "hybridpd_link_bytes_per_second"
        }

    assert links(a=("tcp", 5e8), b=("rdma", 2e10)) == {("a", "tcp"): 5e8, ("b", "rdma"): 2e10}
    assert links(a=("cuda_ipc", 9e10)) == {("a", "cuda_ipc"): 9e10, ("b", "rdma"): 2e10}
    assert links(b=("rdma", 1e10)) == {("a", "cuda_ipc"): 9e10, ("b", "rdma"): 1e10}
    assert links(a=("", 0.0), c=("", 0.0)) == {("b", "rdma"): 1e10}


def test_vllm_multi_connector_stats_reach_prometheus(connector, shown):
    metrics, registry = shown
    metrics.observe(measured(connector, 2, 0.25).data)
    labels = {"model_name": "tiny", "engine": "0"}
    assert registry.get_sample_value("hybridpd_loads_total", labels) == 2
    assert registry.get_sample_value("hybridpd_post_seconds_sum", labels) == pytest.approx(0.25)
    assert registry.get_sample_value("hybridpd_leases_expired_total", labels) == 0


def _bound(kind, registry):
    def make(**arguments):
        return kind(**arguments, registry=registry)

    return make
