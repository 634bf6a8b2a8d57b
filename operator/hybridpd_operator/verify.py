"""Does KV really travel? Engines' own counters, read and judged. Pure: text in, verdict out.

A pair whose decode side quietly computes prompts again looks healthy and costs twice. Only its
counters tell, so the engines' ``/metrics`` are read and compared with what the status
recorded last time:

* no load and no recomputed request yet: Unknown, ``NoTraffic``;
* failures or recomputed requests grew: False, with the reasons the connector counted;
* loads grew and nothing else did: True;
* nothing moved: whatever the last verdict was.

Numbers are recorded again only when the verdict changes, a failure was added, or one grew by a
tenth: constant traffic costs a logarithmic number of status writes, an idle service none. Counters
that went down mean a restarted engine; the new ones are taken as they are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hybridpd_operator.observed import EngineSample

#: Prometheus counter -> field of EngineSample.
_COUNTERS: Final[Mapping[str, str]] = {
    "hybridpd_loads_total": "loads",
    "hybridpd_load_failures_total": "load_failures",
    "hybridpd_recomputed_requests_total": "recomputed_requests",
    "hybridpd_read_bytes_total": "read_bytes",
    "hybridpd_predicted_bytes_total": "predicted_bytes",
    "hybridpd_leases_expired_total": "leases_expired",
}
_FAILURES: Final = "hybridpd_load_failures_total"
#: A counter has to grow by this divisor's share before numbers are written again.
_GROWTH_DIVISOR: Final = 10

NO_TRAFFIC: Final = "NoTraffic"
TRANSFERRED: Final = "Transferred"
LOADS_FAILED: Final = "LoadsFailed"
RECOMPUTED: Final = "Recomputed"


@dataclass(frozen=True)
class Transfer:
    """Totals over the engines of one revision, as ``status.transfer`` records them."""

    loads: int = 0
    load_failures: int = 0
    recomputed_requests: int = 0
    read_bytes: int = 0
    predicted_bytes: int = 0
    leases_expired: int = 0

    def to_status(self) -> dict[str, int]:
        """As ``status.transfer``."""
        return {key: getattr(self, field) for field, key in _STATUS_KEYS.items()}

    @classmethod
    def from_status(cls, status: Mapping[str, Any]) -> "Transfer":
        """Read what an earlier pass wrote; missing numbers are 0."""
        return cls(**{field: int(status.get(key, 0)) for field, key in _STATUS_KEYS.items()})


_STATUS_KEYS: Final[Mapping[str, str]] = {
    "loads": "loads",
    "load_failures": "loadFailures",
    "recomputed_requests": "recomputedRequests",
    "read_bytes": "readBytes",
    "predicted_bytes": "predictedBytes",
    "leases_expired": "leasesExpired",
}


@dataclass(frozen=True)
class Verified:
    """Condition ``KVTransferVerified`` and the numbers to record with it."""

    status: str
    reason: str
    message: str
    transfer: Transfer


def parse_sample(pod: str, role: str, text: str) -> EngineSample:
    """Read one engine's ``/metrics``; series of one counter are summed, bad lines are skipped."""
    totals: dict[str, int] = {}
    reasons: dict[str, int] = {}
    for name, labels, value in _series(text):
        field = _COUNTERS.get(name)
        if field is None:
            continue
        totals[field] = totals.get(field, 0) + value
        if name == _FAILURES and value:
            reason = labels.get("reason", "unknown")
            reasons[reason] = reasons.get(reason, 0) + value
    return EngineSample(pod, role, **totals, failures_by_reason=tuple(sorted(reasons.items())))


def judge(
    samples: Sequence[EngineSample] | None,
    last: Transfer,
    condition: Mapping[str, Any] | None,
    seen: Mapping[str, EngineSample] | None = None,
) -> Verified:
    """Compare a pass's samples with the ``last`` recorded numbers and condition.

    ``last`` and ``condition`` are those of the same revision; a new one begins with
    ``Transfer()`` and None. ``seen`` has the latest sample of each engine by pod, where this
    process has any: an engine that was away for a while brings its old failures back, and a sum
    alone would take them for new ones.
    """
    if samples is None:
        return _as_before(last, condition)
    now = _sum(samples)
    known = _sum(_latest(one, seen) for one in samples) if seen else None
    if any(getattr(now, field) < getattr(last, field) for field in _STATUS_KEYS):
        last = known or Transfer()
    before = known or last
    if now.load_failures > before.load_failures:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in _reasons(samples))
        message = f"{now.load_failures} loads failed ({reasons})"
        return Verified("False", LOADS_FAILED, message, now)
    if now.recomputed_requests > before.recomputed_requests:
        message = (
            f"decode computed {now.recomputed_requests} prompts itself that prefill had computed"
        )
        return Verified("False", RECOMPUTED, message, now)
    if _grew("loads", last, now):
        return Verified("True", TRANSFERRED, "decode reads prefill's KV memory", now)
    # Loads and bytes are counted by different processes of an engine: one may be seen first.
    worth_writing = any(_grew(field, last, now) for field in _STATUS_KEYS)
    return _as_before(now if worth_writing else last, condition)


def _sum(samples: Iterable[EngineSample]) -> Transfer:
    every = list(samples)
    return Transfer(**{field: sum(getattr(one, field) for one in every) for field in _STATUS_KEYS})


def _latest(sample: EngineSample, seen: Mapping[str, EngineSample]) -> EngineSample:
    """What the engine counted when it was seen last; nothing when it began anew since."""
    before = seen.get(sample.pod)
    began_anew = before is None or any(
        getattr(sample, field) < getattr(before, field) for field in _STATUS_KEYS
    )
    return EngineSample(sample.pod, sample.role) if before is None or began_anew else before


def _grew(field: str, last: Transfer, now: Transfer) -> bool:
    """True when a counter grew by more than a tenth."""
    before: int = getattr(last, field)
    return bool(getattr(now, field) - before > before // _GROWTH_DIVISOR)


def _as_before(last: Transfer, condition: Mapping[str, Any] | None) -> Verified:
    if condition is None:
        message = "no request has gone through this pair yet"
        return Verified("Unknown", NO_TRAFFIC, message, last)
    return Verified(
        str(condition["status"]),
        str(condition["reason"]),
        str(condition.get("message", "")),
        last,
    )


def _reasons(samples: Iterable[EngineSample]) -> list[tuple[str, int]]:
    total: dict[str, int] = {}
    for sample in samples:
        for reason, count in sample.failures_by_reason:
            total[reason] = total.get(reason, 0) + count
    return sorted(total.items())


def _series(text: str) -> Iterator[tuple[str, dict[str, str], int]]:
    """Series of the text format that are ours: (name, labels, value rounded to an integer)."""
    for line in text.splitlines():
        if not line.startswith("hybridpd_") or ("{" in line and "}" not in line):
            continue
        head, _, tail = line.rpartition("}") if "}" in line else (line.split(" ")[0], "", "")
        name, _, labels = head.partition("{")
        numbers = (tail or line[len(head) :]).split()
        try:
            yield name.strip(), _labels(labels), int(float(numbers[0]))
        except (IndexError, ValueError, OverflowError):
            continue


def _labels(text: str) -> dict[str, str]:
    """``a="x",b="y"`` -> mapping; a quote inside a value is escaped by a backslash."""
    labels: dict[str, str] = {}
    rest = text
    while '="' in rest:
        key, _, rest = rest.partition('="')
        value = []
        index = 0
        while index < len(rest) and rest[index] != '"':
            if rest[index] == "\\" and index + 1 < len(rest):
                index += 1
            value.append(rest[index])
            index += 1
        labels[key.strip(", ")] = "".join(value)
        rest = rest[index + 1 :]
    return labels
