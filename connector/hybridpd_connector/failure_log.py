"""One log line per failed request: who, from where, why, and what to do. Bounded when all fail.

A prefill engine that dies takes many requests with it. The first ``BURST`` of one kind (engine and
reason) within ``WINDOW_SECONDS`` are told one by one, further ones are counted and told together.
"""

import dataclasses
import logging
import time
from collections.abc import Callable

from hybridpd_connector.errors import shorten
from hybridpd_connector.failure_reasons import REASONS, known

logger = logging.getLogger(__name__)

BURST = 8
WINDOW_SECONDS = 10.0
MAX_KINDS = 256

Kind = tuple[str, str]
"""(engine id, reason)."""

OTHERS: Kind = "", "of other engines or for other reasons"
"""What is beyond ``MAX_KINDS``: names of engines can be made up."""


@dataclasses.dataclass
class _Window:
    since: float
    told: int = 0
    left_out: int = 0


class LogBudget:
    """Which lines are written. Pure: ``now`` is an argument."""

    def __init__(self) -> None:
        self._windows: dict[Kind, _Window] = {}
        self._others = _Window(0.0)

    def admit(self, kind: Kind, now: float) -> bool:
        """May this line be written? One that may not is counted."""
        window = self._windows.get(kind)
        if window is None:
            if len(self._windows) >= MAX_KINDS:
                if not self._others.left_out:
                    self._others.since = now
                self._others.left_out += 1
                return False
            window = self._windows[kind] = _Window(now)
        if window.told >= BURST:
            window.left_out += 1
            return False
        window.told += 1
        return True

    def take_over(self, now: float) -> list[tuple[Kind, int]]:
        """(kind, lines left out) of windows that are over; they are forgotten."""
        over = [
            kind for kind, window in self._windows.items() if now - window.since >= WINDOW_SECONDS
        ]
        told = [(kind, self._windows.pop(kind).left_out) for kind in over]
        if self._others.left_out and now - self._others.since >= WINDOW_SECONDS:
            told.append((OTHERS, self._others.left_out))
            self._others.left_out = 0
        return told

    @property
    def idle(self) -> bool:
        return not self._windows and not self._others.left_out


class FailureLog:
    """See the module. ``flush`` is cheap and meant for every step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._budget = LogBudget()

    def load_failed(
        self, request_id: str, engine_id: str, address: str, reason: str, detail: str
    ) -> None:
        """``engine_id`` and ``address`` ("host:port"): the prefill engine's, "" when not known."""
        source = f"engine {shorten(engine_id)} at {shorten(address)}" if engine_id else "anywhere"
        self._write(
            engine_id, f"request {shorten(request_id)} was not loaded from {source}", reason, detail
        )

    def lease_expired(self, request_id: str, reason: str, detail: str) -> None:
        self._write("", f"prefill {shorten(request_id)} was not read", reason, detail)

    def flush(self) -> None:
        """Tell how many lines were left out, once their window is over."""
        if self._budget.idle:
            return
        for (engine_id, reason), left_out in self._budget.take_over(self._clock()):
            if left_out:
                whose = f" from engine {shorten(engine_id)}" if engine_id else ""
                logger.warning(
                    "%d more like it within %g s: %s%s", left_out, WINDOW_SECONDS, reason, whose
                )

    def _write(self, engine_id: str, what: str, reason: str, detail: str) -> None:
        self.flush()
        if self._budget.admit((engine_id, reason), self._clock()):
            row = REASONS[known(reason)]
            found = f" ({detail})" if detail else ""
            logger.warning(
                "%s: %s%s. %s. To do: %s.", what, reason, found, _sentence(row.meaning), row.action
            )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
