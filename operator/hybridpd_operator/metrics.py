"""Counters of the operator itself, in Prometheus text form. Standard library only."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

_HELP: Final[Mapping[str, tuple[str, str]]] = {
    "hybridpd_operator_passes_total": ("counter", "Passes over one service, by result."),
    "hybridpd_operator_pass_seconds_total": ("counter", "Seconds spent in passes."),
    "hybridpd_operator_writes_total": ("counter", "Writes to the API server, by verb and kind."),
    "hybridpd_operator_reverts_total": ("counter", "Applies that undid a foreign change."),
    "hybridpd_operator_scrape_failures_total": ("counter", "Engines whose metrics gave no answer."),
    "hybridpd_operator_queue_length": ("gauge", "Services that wait for a pass."),
    "hybridpd_operator_services": ("gauge", "Services seen at the last resync."),
    "hybridpd_operator_watch_lag_seconds": ("gauge", "Age of the oldest change no watch reported."),
}


@dataclass
class Metrics:
    """A thread-safe table of series."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _series: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            self._series[key] = self._series.get(key, 0.0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._series[(name, tuple(sorted(labels.items())))] = value

    def value(self, name: str, **labels: str) -> float:
        """Read one series; 0 when it was never touched."""
        with self._lock:
            return self._series.get((name, tuple(sorted(labels.items()))), 0.0)

    def render(self) -> str:
        """The text a scrape gets."""
        with self._lock:
            series = sorted(self._series.items())
        lines: list[str] = []
        last = ""
        for (name, labels), value in series:
            if name != last:
                kind, text = _HELP[name]
                lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
                last = name
            inner = ",".join(f'{key}="{_escaped(item)}"' for key, item in labels)
            lines.append(f"{name}{{{inner}}} {value:.15g}" if inner else f"{name} {value:.15g}")
        return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
