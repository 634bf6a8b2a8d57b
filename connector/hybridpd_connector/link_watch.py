"""The links of one D rank: woken up at the handshake, measured then and rarely afterwards.

``meet`` runs on handshake threads; ``tick`` on the ticker's thread, where it only looks whether a
measurement is due and starts it on a thread of its own, one at a time. The engine's thread takes
what changed and nothing else: no probe is ever made or waited for in its steps.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from hybridpd_connector.errors import RefusedError
from hybridpd_connector.handshake import HostFacts
from hybridpd_connector.link_path import Diagnosis, bar_of, diagnose
from hybridpd_connector.link_probe import LinkProber, ProbeTarget
from hybridpd_connector.link_samples import Measurement

logger = logging.getLogger(__name__)

MAX_NAMED = 64
"""Peers with a metric of their own at a time; further ones are counted as one, the slowest."""

OTHERS = "others"
_MAX_WARNED = 1024

TOO_BUSY = "this engine was too busy to measure it, and soon measures it again"

LinkValue = tuple[str, float]
"""(path, bytes per second); ("", 0.0): the link is gone."""


@dataclasses.dataclass(frozen=True)
class LinkRules:
    """``timeout_seconds`` bounds a probe; ``require_fast`` refuses a peer behind a slow path.

    A link is measured again after ``refresh_seconds``; after ``unsure_seconds`` when this engine
    was too busy to tell.
    """

    timeout_seconds: float
    refresh_seconds: float = 600.0
    unsure_seconds: float = 30.0
    require_fast: bool = False

    def due_at(self, met: "Met") -> float:
        wait = self.unsure_seconds if met.diagnosis.unsure else self.refresh_seconds
        return met.measured_at + wait


@dataclasses.dataclass(frozen=True)
class LinkEnd:
    """One remote rank: what can be read of it, and where it runs."""

    target: ProbeTarget
    host: HostFacts


@dataclasses.dataclass(eq=False)
class Met:
    """A link that was met, until it is forgotten. The slowest of its ranks stands for it."""

    engine_id: str
    label: str
    ends: tuple[LinkEnd, ...]
    measured: Measurement
    diagnosis: Diagnosis
    measured_at: float


class LinkWatch:
    """See the module."""

    def __init__(
        self,
        prober: LinkProber,
        ours: HostFacts,
        rules: LinkRules,
        prepare_thread: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prober = prober
        self._ours = ours
        self._rules = rules
        self._prepare_thread = prepare_thread
        self._clock = clock
        self._lock = threading.Lock()
        self._met: dict[str, Met] = {}
        self._told: dict[str, LinkValue] = {}
        self._news = False
        self._warned: dict[tuple[str, str], None] = {}
        self._refresh: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"LinkWatch(links={len(self._met)}, {self._prober!r})"

    def meet(self, engine_id: str, label: str, ends: Sequence[LinkEnd]) -> Met:
        """Wake a link up and measure it. ``label`` names it in metrics: host:port.

        ``AgentError`` when nothing can be read in time; ``RefusedError`` when it is slow and must
        not be, a retryable one when it must not be and this engine was too busy to tell.
        """
        self._prober.collect()
        until = time.monotonic() + self._rules.timeout_seconds
        for end in ends:
            self._prober.warm_up(end.target, until)
        met = self._measured(engine_id, label, tuple(ends), until)
        self._tell(met)
        if self._rules.require_fast:
            _refuse_slow(met)
        with self._lock:
            self._met[label] = met
            self._news = True
        return met

    def forget(self, met: Met) -> None:
        """The link is dropped; its successor at the same address stays."""
        with self._lock:
            if self._met.get(met.label) is met:
                del self._met[met.label]
                self._news = True

    def tick(self) -> None:
        """Start a measurement that is due. Never waits."""
        self._prober.collect()
        if self._refresh is not None and self._refresh.is_alive():
            return
        now = self._clock()
        with self._lock:
            due = next((met for met in self._met.values() if self._rules.due_at(met) <= now), None)
        if due is not None:
            self._refresh = threading.Thread(
                target=self._measure_again, args=(due,), name="hybridpd-link-probe", daemon=True
            )
            self._refresh.start()

    def take_changes(self) -> Mapping[str, LinkValue]:
        """Links whose path or speed is new since the last call, and those that are gone. Costs
        nothing while there are none: it is called in every step."""
        if not self._news:
            return {}
        with self._lock:
            self._news = False
            now = _values(self._met)
        changed = {label: value for label, value in now.items() if self._told.get(label) != value}
        changed.update({label: ("", 0.0) for label in self._told if label not in now})
        self._told = now
        return changed

    def close(self) -> None:
        """Stop waiting for probes. Idempotent."""
        self._prober.close()
        if self._refresh is not None:
            self._refresh.join()

    def _measured(self, engine_id: str, label: str, ends: tuple[LinkEnd, ...], until: float) -> Met:
        results = [(end, *self._end_measured(end, until)) for end in ends]
        _, measured, diagnosis = min(results, key=lambda result: _quality(*result[1:]))
        return Met(engine_id, label, ends, measured, diagnosis, self._clock())

    def _end_measured(self, end: LinkEnd, until: float) -> tuple[Measurement, Diagnosis]:
        memory = self._prober.memory
        bar = bar_of(self._ours, end.host, memory)
        measured = self._prober.measure(end.target, until, bar)
        return measured, diagnose(self._ours, end.host, measured, memory)

    def _measure_again(self, met: Met) -> None:
        try:
            self._prepare_thread()
            until = time.monotonic() + self._rules.timeout_seconds
            again = self._measured(met.engine_id, met.label, met.ends, until)
        except Exception as error:
            # Whoever needs the link will find out, and say so; here it only waits for its turn,
            # whatever it was: else the next tick, a moment later, would try again, and the next.
            logger.info("link to %s was not measured again: %r", met.label, error)
            met.measured_at = self._clock()
            return
        with self._lock:
            met.measured, met.diagnosis = again.measured, again.diagnosis
            met.measured_at = again.measured_at
            self._news = True
        self._tell(met)

    def _tell(self, met: Met) -> None:
        """One line per link; a slow one is a warning, once per address and cause."""
        rate, diagnosis = met.measured.bytes_per_second / 1e9, met.diagnosis
        key = met.label, diagnosis.cause
        with self._lock:
            new = diagnosis.slow and key not in self._warned and len(self._warned) < _MAX_WARNED
            if new:
                self._warned[key] = None
        if new:
            logger.warning(
                "link to %s at %s is slow: %s, %.2f GB/s. %s",
                met.engine_id, met.label, diagnosis.path.value, rate, diagnosis.cause,
            )  # fmt: skip
        elif diagnosis.unsure:
            logger.info(
                "link to %s at %s: %s, at least %.2f GB/s: %s",
                met.engine_id, met.label, diagnosis.path.value, rate, TOO_BUSY,
            )  # fmt: skip
        else:
            logger.info(
                "link to %s at %s: %s, %.2f GB/s",
                met.engine_id, met.label, diagnosis.path.value, rate,
            )  # fmt: skip


def _refuse_slow(met: Met) -> None:
    """``require_fast_link``: only what is known to be fast is used."""
    if not met.diagnosis.slow and not met.diagnosis.unsure:
        return
    rate = met.measured.bytes_per_second / 1e9
    unsure = met.diagnosis.unsure
    raise RefusedError(
        f"link to {met.label}",
        "a fast path (require_fast_link)",
        f"{met.diagnosis.path.value}, {'at least ' if unsure else ''}{rate:.2f} GB/s",
        TOO_BUSY if unsure else met.diagnosis.cause,
        retryable=unsure,
    )


def _quality(measured: Measurement, diagnosis: Diagnosis) -> tuple[bool, bool, float]:
    """Of several ranks the worst one stands for the link."""
    return not diagnosis.slow, not diagnosis.unsure, measured.bytes_per_second


def _values(met: Mapping[str, Met]) -> dict[str, LinkValue]:
    """What metrics show: the first links by name, all others as one."""
    values = [
        (item.label, (item.diagnosis.path.value, item.measured.bytes_per_second))
        for item in met.values()
    ]
    named = dict(values[:MAX_NAMED])
    if len(values) > MAX_NAMED:
        named[OTHERS] = min((value for _, value in values[MAX_NAMED:]), key=lambda value: value[1])
    return named
