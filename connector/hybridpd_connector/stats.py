"""What the connector counts, as plain data that vLLM can carry between processes.

``Stats.data`` is JSON-able and holds what happened since the last ``take``:

    {"counts": {name: n}, "failures": {reason: n}, "refused": {reason: n},
     "checksums": {result: n}, "seconds": {name: [s or n, ...]}, "gauges": {name: value},
     "peers": {state: n}, "links": {address: [path, bytes per second]}}

Joining the stats of several ranks (``aggregate``): counts, failures, checksums and observations are
added; gauges and peers describe the same requests seen by each rank, so the largest value is kept.
Of a link the slowest rank's value is kept; ``["", 0.0]`` says that it is gone.
Who records what, so that the sums are right: bytes, descriptors, seconds and checksums by every D
rank for its own reads; loads, failures, recomputed requests and leases once each, by the scheduler
side, as are refused connections. A lease counts as expired when it did on any rank.

``METRICS`` is the contract with dashboards and with the operator: names, units, labels. No vLLM
and no Prometheus here: the vLLM class makes the metric objects from this table.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

READ_BYTES = "read_bytes"
PREDICTED_BYTES = "predicted_bytes"
READ_DESCRIPTORS = "read_descriptors"
PREDICTED_DESCRIPTORS = "predicted_descriptors"
LOADS = "loads"
RECOMPUTED_REQUESTS = "recomputed_requests"
LEASES_EXPIRED = "leases_expired"
LEASES_RELEASED = "leases_released"
LEASES_HELD = "leases_held"
BLOCKS_HELD = "blocks_held"
POST_SECONDS = "post_seconds"
NOTICED_SECONDS = "until_noticed_seconds"
QUEUE_SECONDS = "queue_seconds"
LOAD_BYTES = "load_bytes"
LOAD_DESCRIPTORS = "load_descriptors"
PREDICTED_LOAD_BYTES = "predicted_load_bytes"
PREDICTED_LOAD_DESCRIPTORS = "predicted_load_descriptors"
MISPREDICTED_LOADS = "mispredicted_loads"
LINKS = "links"

OK = "ok"
DIFFERENT = "different"
UNCHECKED = "unchecked"
CHECKSUM_RESULTS = (OK, DIFFERENT, UNCHECKED)

COUNTS = (
    READ_BYTES,
    PREDICTED_BYTES,
    READ_DESCRIPTORS,
    PREDICTED_DESCRIPTORS,
    MISPREDICTED_LOADS,
    LOADS,
    RECOMPUTED_REQUESTS,
    LEASES_EXPIRED,
    LEASES_RELEASED,
)
_COUNTS = frozenset(COUNTS)
SECONDS = (POST_SECONDS, NOTICED_SECONDS, QUEUE_SECONDS)
_LOAD_COUNTED = (READ_BYTES, READ_DESCRIPTORS, PREDICTED_BYTES, PREDICTED_DESCRIPTORS)
_LOAD_OBSERVED = (
    LOAD_BYTES,
    LOAD_DESCRIPTORS,
    PREDICTED_LOAD_BYTES,
    PREDICTED_LOAD_DESCRIPTORS,
    POST_SECONDS,
    NOTICED_SECONDS,
)
OBSERVED = (QUEUE_SECONDS, *_LOAD_OBSERVED)
GAUGES = (LEASES_HELD, BLOCKS_HELD)

MAX_OBSERVATIONS = 10_000
"""Observations kept per name between two takes; a logger that never takes must not cost memory."""

_SHORT_BUCKETS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 5.0,
)  # fmt: skip
_BYTE_BUCKETS = tuple(float(1 << power) for power in range(14, 36, 2))
_DESCRIPTOR_BUCKETS = tuple(float(1 << power) for power in range(0, 17, 2))
_LONG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0)

Kind = Literal["counter", "gauge", "histogram"]
Moved = tuple[int, int, int, int, float, float]
"""One load on one rank: bytes, descriptors, bytes and descriptors that were foreseen, seconds
inside its posts, seconds until its end was noticed."""


@dataclasses.dataclass(frozen=True)
class MetricDefinition:
    """One Prometheus metric. ``key``: where its value is in ``Stats.data``.

    ``label``: the labels this table adds to vLLM's own (model_name, engine), separated by commas.
    Counters are exposed with the suffix ``_total``, which Prometheus clients add themselves.
    """

    name: str
    kind: Kind
    documentation: str
    key: str
    label: str = ""
    buckets: tuple[float, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.label.split(",")) if self.label else ()


METRICS: tuple[MetricDefinition, ...] = (
    MetricDefinition(
        "hybridpd_read_bytes", "counter", "Bytes read, as NIXL counted them.", READ_BYTES
    ),
    MetricDefinition(
        "hybridpd_predicted_bytes", "counter", "Bytes that the read plans foresaw.", PREDICTED_BYTES
    ),
    MetricDefinition(
        "hybridpd_read_descriptors",
        "counter",
        "Descriptors read, as NIXL counted them after merging.",
        READ_DESCRIPTORS,
    ),
    MetricDefinition(
        "hybridpd_predicted_descriptors",
        "counter",
        "Descriptors that the read plans foresaw.",
        PREDICTED_DESCRIPTORS,
    ),
    MetricDefinition(
        "hybridpd_load_bytes",
        "histogram",
        "Bytes that one rank read for one request, as NIXL counted them.",
        LOAD_BYTES,
        buckets=_BYTE_BUCKETS,
    ),
    MetricDefinition(
        "hybridpd_load_descriptors",
        "histogram",
        "Descriptors that one rank read for one request, as NIXL counted them after merging.",
        LOAD_DESCRIPTORS,
        buckets=_DESCRIPTOR_BUCKETS,
    ),
    MetricDefinition(
        "hybridpd_predicted_load_bytes",
        "histogram",
        "Bytes that the read plan foresaw for one rank and one request.",
        PREDICTED_LOAD_BYTES,
        buckets=_BYTE_BUCKETS,
    ),
    MetricDefinition(
        "hybridpd_predicted_load_descriptors",
        "histogram",
        "Descriptors that the read plan foresaw for one rank and one request.",
        PREDICTED_LOAD_DESCRIPTORS,
        buckets=_DESCRIPTOR_BUCKETS,
    ),
    MetricDefinition(
        "hybridpd_mispredicted_loads",
        "counter",
        "Loads for which a rank read other bytes than its read plan foresaw; a fault if above 0.",
        MISPREDICTED_LOADS,
    ),
    MetricDefinition("hybridpd_loads", "counter", "Requests whose state was loaded.", LOADS),
    MetricDefinition(
        "hybridpd_load_failures",
        "counter",
        "Requests whose load failed, by reason.",
        "failures",
        label="reason",
    ),
    MetricDefinition(
        "hybridpd_recomputed_requests",
        "counter",
        "Requests sent here to load, whose prompt was computed here instead.",
        RECOMPUTED_REQUESTS,
    ),
    MetricDefinition(
        "hybridpd_leases_expired",
        "counter",
        "Prefills whose blocks were freed because no reader renewed or released them.",
        LEASES_EXPIRED,
    ),
    MetricDefinition(
        "hybridpd_leases_released",
        "counter",
        "Prefills whose blocks were freed by their reader.",
        LEASES_RELEASED,
    ),
    MetricDefinition(
        "hybridpd_leases_held", "gauge", "Prefills whose blocks wait for a reader.", LEASES_HELD
    ),
    MetricDefinition(
        "hybridpd_blocks_held",
        "gauge",
        "Blocks that no request of decode has, and that a late read may still write into.",
        BLOCKS_HELD,
    ),
    MetricDefinition(
        "hybridpd_peers", "gauge", "Remote engines by handshake state.", "peers", label="state"
    ),
    MetricDefinition(
        "hybridpd_link_bytes_per_second",
        "gauge",
        "Speed of timed reads from each prefill engine, measured at the handshake and every 10 "
        "minutes; of the slowest rank. Where `path` is `unknown` because this engine was too busy "
        "to tell, the link is at least that fast. Beyond 64 engines, `peer` is `others`.",
        LINKS,
        label="peer,path",
    ),
    MetricDefinition(
        "hybridpd_side_channel_refused",
        "counter",
        "Connections to the side channel that were refused, by reason.",
        "refused",
        label="reason",
    ),
    MetricDefinition(
        "hybridpd_checksums",
        "counter",
        "Loads that a decode rank compared with the prefill engine's checksums, by result.",
        "checksums",
        label="result",
    ),
    MetricDefinition(
        "hybridpd_post_seconds",
        "histogram",
        "Time inside the posts of one load, on the engine thread.",
        POST_SECONDS,
        buckets=_SHORT_BUCKETS,
    ),
    MetricDefinition(
        "hybridpd_until_noticed_seconds",
        "histogram",
        "Time from the post of a load until its end was noticed, at most once per engine step: "
        "bytes over this time are not the speed of the link.",
        NOTICED_SECONDS,
        buckets=_SHORT_BUCKETS,
    ),
    MetricDefinition(
        "hybridpd_queue_seconds",
        "histogram",
        "Time from the arrival of a request until its load was posted.",
        QUEUE_SECONDS,
        buckets=_LONG_BUCKETS,
    ),
)


_PARTS = ("counts", "failures", "refused", "seconds", "gauges", "peers", "checksums", LINKS)


def empty() -> dict[str, Any]:
    """Data in which nothing has happened."""
    return {part: {} for part in _PARTS}


class Stats:
    """Recorder of one process. ``data`` may also come from another process (``Stats(data)``)."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self._data = data if data else empty()
        self._moved: list[Moved] = []

    @property
    def data(self) -> dict[str, Any]:
        """See the module."""
        if self._moved:
            self._add_up()
        return self._data

    def __repr__(self) -> str:
        return f"Stats({reduce(self.data)})"

    def count(self, name: str, amount: int = 1) -> None:
        """Add to one of ``COUNTS``."""
        if name not in _COUNTS:
            raise _unknown(name, COUNTS)
        counts = self._data["counts"]
        counts[name] = counts.get(name, 0) + amount

    def loads(self, moved: Sequence[Moved]) -> None:
        """One rank has read its parts of these requests. NIXL that could not say counts 0."""
        # Only kept here, on the engine's thread; `data` adds up what a whole step has brought.
        self._moved += moved
        if len(self._moved) >= MAX_OBSERVATIONS:
            self._add_up()

    def _add_up(self) -> None:
        moved, self._moved = self._moved, []
        counts, kept = self._data["counts"], self._data["seconds"]
        columns = [*zip(*moved, strict=True)]
        for name, amounts in zip(_LOAD_COUNTED, columns, strict=False):
            _add(counts, name, sum(amounts))
        room = max(0, MAX_OBSERVATIONS - len(kept.get(LOAD_BYTES, ())))
        for name, values in zip(_LOAD_OBSERVED, columns, strict=True):
            kept.setdefault(name, []).extend(values[:room])

    def fail(self, reason: str, amount: int = 1) -> None:
        """One load failed for this reason (a short constant, never peer text)."""
        _add(self._data["failures"], reason, amount)

    def refuse(self, reason: str, amount: int = 1) -> None:
        """The side channel refused connections for this reason (a short constant)."""
        _add(self._data["refused"], reason, amount)

    def checksum(self, result: str) -> None:
        """One load was compared, or could not be: one of ``CHECKSUM_RESULTS``."""
        _add(self._data["checksums"], _known(result, CHECKSUM_RESULTS), 1)

    def observe(self, name: str, value: float) -> None:
        """Note one value of ``OBSERVED``."""
        observations = self._data["seconds"].setdefault(_known(name, OBSERVED), [])
        if len(observations) < MAX_OBSERVATIONS:
            observations.append(value)

    def set_gauge(self, name: str, value: int) -> None:
        """Set one of ``GAUGES``."""
        self._data["gauges"][_known(name, GAUGES)] = value

    def set_peers(self, counts: Mapping[str, int]) -> None:
        """Set the peers by state."""
        self._data["peers"] = dict(counts)

    def set_links(self, links: Mapping[str, tuple[str, float]]) -> None:
        """Note links whose path or speed (bytes per second) has changed."""
        for label, (path, rate) in links.items():
            self._data[LINKS][label] = [path, rate]

    def take(self) -> dict[str, Any]:
        """What happened since the last take."""
        taken, self._data = self.data, empty()
        return taken

    def is_empty(self) -> bool:
        return not self._moved and is_empty(self._data)


def is_empty(data: Mapping[str, Any]) -> bool:
    """Has nothing happened? Gauges alone do count: a gauge that fell to 0 must be seen."""
    return not any(map(data.get, _PARTS))


def aggregate(data: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Add ``other`` into ``data`` (returned)."""
    for part in ("counts", "failures", "refused", "checksums"):
        for name, amount in other.get(part, {}).items():
            _add(data[part], name, amount)
    for name, observations in other.get("seconds", {}).items():
        kept = data["seconds"].setdefault(name, [])
        kept.extend(observations[: max(0, MAX_OBSERVATIONS - len(kept))])
    for part in ("gauges", "peers"):
        for name, value in other.get(part, {}).items():
            data[part][name] = max(value, data[part].get(name, value))
    for label, value in other.get(LINKS, {}).items():
        data[LINKS][label] = min(value, data[LINKS].get(label, value), key=lambda link: link[1])
    return data


def reduce(data: Mapping[str, Any]) -> dict[str, int | float]:
    """A few numbers for one log line."""
    counts = data.get("counts", {})
    numbers: dict[str, int | float] = {
        "loads": counts.get(LOADS, 0),
        "load failures": sum(data.get("failures", {}).values()),
        "recomputed": counts.get(RECOMPUTED_REQUESTS, 0),
        "read MB": round(counts.get(READ_BYTES, 0) / 1e6, 3),
        "descriptors": counts.get(READ_DESCRIPTORS, 0),
        "leases expired": counts.get(LEASES_EXPIRED, 0),
    }
    for name in SECONDS:
        observations = data.get("seconds", {}).get(name)
        if observations:
            label = name.removesuffix("_seconds").replace("_", " ")
            numbers[f"{label} p50 ms"] = round(_quantile(observations, 0.5) * 1e3, 3)
            numbers[f"{label} p90 ms"] = round(_quantile(observations, 0.9) * 1e3, 3)
    return numbers


def _add(amounts: dict[str, int], name: str, amount: int) -> None:
    amounts[name] = amounts.get(name, 0) + amount


def _known(name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise _unknown(name, names)
    return name


def _unknown(name: str, names: Sequence[str]) -> KeyError:
    return KeyError(f"{name} is not one of {', '.join(names)}")


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
