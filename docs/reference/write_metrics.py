"""Writes docs/reference/metrics.md from the connector's own table of metrics.

`python docs/reference/write_metrics.py` replaces the file; a test fails while it is not current.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = Path(__file__).resolve().parent / "metrics.md"
sys.path.append(str(ROOT / "connector"))

from hybridpd_connector.link_path import LinkPath  # noqa: E402
from hybridpd_connector.peer_state import PeerState  # noqa: E402
from hybridpd_connector.side_channel_guard import REASONS as REFUSALS  # noqa: E402
from hybridpd_connector.stats import (  # noqa: E402
    CHECKSUM_RESULTS,
    METRICS,
    MetricDefinition,
)

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
A difference is a fault worth reporting, and `hybridpd_mispredicted_loads_total` counts the loads
that had one; decode's log has a line with both numbers for the first eight. Of single requests
`hybridpd_load_*` and `hybridpd_predicted_load_*` have the same buckets.
Names end in their unit: bytes, seconds; the others are numbers of things.

Bytes, descriptors and seconds are of each decode rank's own reads, added up over the ranks of an
engine; loads, failures, recomputed requests and leases are counted once each. A lease counts as
expired when it ran out on any rank.

| label | values |
|---|---|
| `reason` of load failures | the reasons in [connector](connector.md#metrics) |
| `reason` of refused connections | {refusals}: see [the key](../howto/secure-the-side-channel.md) |
| `result` | {results}: see [checksums](checksums.md) |
| `state` | {states}; `evicted` is the number of evictions so far, the others are engines now |
| `path` | {paths} |
| `peer` | host:port of a prefill engine's side channel, or `others`; a series ends with its link |
"""


def row(metric: MetricDefinition) -> str:
    """One line of the table; counters are exposed with a suffix."""
    name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
    label = ", ".join(f"`{name}`" for name in metric.labels)
    return f"| `{name}` | {metric.kind} | {label} | {metric.documentation} |\n"


def document() -> str:
    """The whole page."""
    values = {
        "refusals": ", ".join(f"`{reason}`" for reason in REFUSALS),
        "results": ", ".join(f"`{result}`" for result in CHECKSUM_RESULTS),
        "states": ", ".join(f"`{state.value}`" for state in PeerState),
        "paths": ", ".join(f"`{path.value}`" for path in LinkPath),
    }
    return HEADER + "".join(row(metric) for metric in METRICS) + FOOTER.format(**values)


if __name__ == "__main__":
    OUTPUT.write_text(document())
