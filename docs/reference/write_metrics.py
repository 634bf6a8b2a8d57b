"""Writes docs/reference/metrics.md from the connector's own table of metrics.

`python docs/reference/write_metrics.py` replaces the file; a test fails while it is not current.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = Path(__file__).resolve().parent / "metrics.md"
sys.path.append(str(ROOT / "connector"))

from hybridpd_connector.stats import METRICS, MetricDefinition  # noqa: E402

HEADER = """# Metrics of the connector

Written from `hybridpd_connector.stats` by `docs/reference/write_metrics.py`. Every engine serves
them at `/metrics`, with vLLM's labels `model_name` and `engine`. The operator reads them for
`status.transfer` and the condition KVTransferVerified.

| metric | kind | labels | meaning |
|---|---|---|---|
"""

FOOTER = """
`hybridpd_read_bytes_total` and `hybridpd_predicted_bytes_total` grow together: the prediction is
made from the two engines' layouts and the number of prompt tokens, the other is what NIXL counted.
A difference is a fault worth reporting.
"""


def row(metric: MetricDefinition) -> str:
    """One line of the table; counters are exposed with a suffix."""
    name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
    label = ", ".join(f"`{name}`" for name in metric.labels)
    return f"| `{name}` | {metric.kind} | {label} | {metric.documentation} |\n"


def document() -> str:
    """The whole page."""
    return HEADER + "".join(row(metric) for metric in METRICS) + FOOTER


if __name__ == "__main__":
    OUTPUT.write_text(document())
