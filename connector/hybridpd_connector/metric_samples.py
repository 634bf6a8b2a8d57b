"""Recorded stats as values for the metrics of ``stats.METRICS``."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from hybridpd_connector.stats import LINKS, METRICS, MetricDefinition


@dataclasses.dataclass(frozen=True)
class Sample:
    """One value for one metric: add it (counter), set it (gauge) or observe it (histogram).
    ``labels``: values of the metric's own labels."""

    metric: MetricDefinition
    labels: tuple[str, ...]
    value: float


def samples(data: Mapping[str, Any]) -> Iterator[Sample]:
    """Everything in ``data`` that a metric shows."""
    for metric in METRICS:
        if metric.key == LINKS:
            for label, (path, rate) in data.get(LINKS, {}).items():
                yield Sample(metric, (label, path), rate)
        elif metric.label:
            for label, value in data.get(metric.key, {}).items():
                yield Sample(metric, (label,), value)
        elif metric.kind == "histogram":
            for seconds in data.get("seconds", {}).get(metric.key, ()):
                yield Sample(metric, (), seconds)
        else:
            part = "counts" if metric.kind == "counter" else "gauges"
            value = data.get(part, {}).get(metric.key)
            if value is not None:
                yield Sample(metric, (), value)
