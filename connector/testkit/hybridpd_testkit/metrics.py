"""Read Prometheus text and compare two readings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Samples of one reading: (name, labels) → value."""

    samples: Mapping[tuple[str, Labels], float]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples called ``name`` that carry at least these labels; 0 when none do."""
        wanted = frozenset(labels.items())
        return sum(
            value
            for (sample, has), value in self.samples.items()
            if sample == name and wanted <= has
        )

    def has(self, name: str) -> bool:
        """Whether any sample is called so."""
        return any(sample == name for sample, _ in self.samples)

    def since(self, earlier: Metrics) -> Metrics:
        """The growth of every sample since an earlier reading."""
        return Metrics(
            {key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()}
        )


def parse_metrics(text: str) -> Metrics:
    """Parse the text of a /metrics page."""
    samples: dict[tuple[str, Labels], float] = {}
    for metric in text_string_to_metric_families(text):
        for sample in metric.samples:
            samples[sample.name, frozenset(sample.labels.items())] = sample.value
    return Metrics(samples)
