"""Statistics on their way from the ranks to Prometheus, in the shapes that vLLM carries.

What is counted, and under which names, is in ``stats``; here is only the translation.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from hybridpd_connector import stats
from hybridpd_connector.metric_samples import Sample, samples


class HybridStats(KVConnectorStats):  # type: ignore[misc]
    """``stats`` data of one interval; vLLM sends it between processes and adds it up."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = stats.empty()

    def aggregate(self, other: KVConnectorStats) -> "HybridStats":
        stats.aggregate(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return stats.reduce(self.data)

    def is_empty(self) -> bool:
        return stats.is_empty(self.data)


def stats_from(data: Mapping[str, Any] | None) -> HybridStats:
    """From what ``to_dict`` gave in another process; nothing happened when there is none."""
    return HybridStats(data=stats.aggregate(stats.empty(), data or {}))


class HybridPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics of ``stats.METRICS``, registered for the latest engine of this process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _forget_earlier_engine()
        self._metrics: dict[str, Any] = {}
        self._paths: dict[tuple[int, str], str] = {}
        for definition in stats.METRICS:
            self._metrics[definition.name] = self._build(definition, metric_types, labelnames)
            if not definition.label:
                # A metric that is shown as 0 from the start can be told from one that is missing.
                for values in per_engine_labelvalues.values():
                    self._metrics[definition.name].labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values: Sequence[object] = self.per_engine_labelvalues[engine_idx]
        for sample in samples(transfer_stats_data):
            if sample.metric.key == stats.LINKS:
                self._show_link(engine_idx, sample)
                continue
            metric = self._metrics[sample.metric.name].labels(*values, *sample.labels)
            if sample.metric.kind == "counter":
                metric.inc(sample.value)
            elif sample.metric.kind == "gauge":
                metric.set(sample.value)
            else:
                metric.observe(sample.value)

    def _show_link(self, engine_idx: int, sample: Sample) -> None:
        """One series per peer: the one of its earlier path goes, and all of them with the link."""
        metric, (peer, path) = self._metrics[sample.metric.name], sample.labels
        values: Sequence[object] = self.per_engine_labelvalues[engine_idx]
        earlier = self._paths.pop((engine_idx, peer), path)
        if earlier != path:
            metric.labels(*values, peer, earlier).set(0)
            if hasattr(metric, "remove"):  # metrics that Ray keeps cannot be removed
                with warnings.catch_warnings():
                    # Files of several processes keep the series; it stays at 0 there.
                    warnings.simplefilter("ignore")
                    metric.remove(*values, peer, earlier)
        if path:
            self._paths[engine_idx, peer] = path
            metric.labels(*values, peer, path).set(sample.value)

    @staticmethod
    def _build(
        definition: stats.MetricDefinition, metric_types: dict[type, type], labelnames: list[str]
    ) -> Any:
        arguments: dict[str, Any] = {
            "name": definition.name,
            "documentation": definition.documentation,
            "labelnames": [*labelnames, *definition.labels],
        }
        if definition.kind == "counter":
            return metric_types[Counter](**arguments)
        if definition.kind == "gauge":
            return metric_types[Gauge](**arguments, multiprocess_mode="mostrecent")
        return metric_types[Histogram](**arguments, buckets=list(definition.buckets))


def _forget_earlier_engine() -> None:
    """An engine that this process had before has left its metrics: vLLM takes back its own only,
    and a name cannot be registered twice."""
    names = {definition.name for definition in stats.METRICS}
    for collector in [*REGISTRY._collector_to_names]:
        if getattr(collector, "_name", "") in names:
            REGISTRY.unregister(collector)
