"""One HTTP port for probes and metrics. Standard library, its own thread.

``/healthz`` is about being of use, not about being alive: it fails when the resync stopped, or
when the resync saw a change that no watch reported for too long. A restarted pod lists and watches
anew, which cures both.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from hybridpd_operator.metrics import Metrics
from hybridpd_operator.work_queue import Key

#: Monotonic seconds.
Clock = Callable[[], float]

#: A watch may be this late before the process is taken for deaf. Longer than kopf's own
#: inactivity timeout, after which it reconnects by itself.
LONGEST_WATCH_LAG_SECONDS: Final = 180.0
#: Resyncs that may be missed in a row.
_MISSED_RESYNCS: Final = 3


@dataclass
class Freshness:
    """Does the process still hear what happens? Times are monotonic seconds.

    The resync lists services by itself. A generation that it saw and the watch did not report is
    lag; the watch may be faster, never much slower.
    """

    resync_seconds: float
    started: float
    _resynced: float | None = None
    _heard: dict[Key, int] = field(default_factory=dict)
    _missing_since: dict[Key, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def heard(self, key: Key, generation: int) -> None:
        """The watch reported a service at ``generation``."""
        with self._lock:
            self._heard[key] = max(generation, self._heard.get(key, 0))
            self._missing_since.pop(key, None)

    def gone(self, key: Key) -> None:
        """The watch reported that a service was deleted."""
        with self._lock:
            self._heard.pop(key, None)
            self._missing_since.pop(key, None)

    def listed(self, generations: dict[Key, int], now: float) -> None:
        """The resync listed these services."""
        with self._lock:
            self._resynced = now
            late = {k for k, seen in generations.items() if self._heard.get(k, -1) < seen}
            self._missing_since = {key: self._missing_since.get(key, now) for key in late}

    def lag_seconds(self, now: float) -> float:
        """Age of the oldest change that no watch reported."""
        with self._lock:
            return now - min(self._missing_since.values(), default=now)

    def problem(self, now: float) -> str | None:
        """Say why the process should be restarted, or None."""
        since = now - (self.started if self._resynced is None else self._resynced)
        allowed = _MISSED_RESYNCS * self.resync_seconds
        if since > allowed:
            return f"no resync for {since:.0f} s, expected one every {self.resync_seconds:.0f} s"
        lag = self.lag_seconds(now)
        if lag > LONGEST_WATCH_LAG_SECONDS:
            return f"a change was listed {lag:.0f} s ago and no watch has reported it"
        return None

    @property
    def is_ready(self) -> bool:
        """True after the first resync."""
        return self._resynced is not None


class Endpoint:
    """Serves ``/healthz``, ``/readyz`` and ``/metrics`` until closed."""

    def __init__(self, port: int, freshness: Freshness, metrics: Metrics, clock: Clock) -> None:
        self._server = ThreadingHTTPServer(("", port), _handler(freshness, metrics, clock))
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(freshness: Freshness, metrics: Metrics, clock: Clock) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if self.path == "/healthz":
                problem = freshness.problem(clock())
                self._answer(503 if problem else 200, problem or "ok")
            elif self.path == "/readyz":
                self._answer(200 if freshness.is_ready else 503, "")
            elif self.path == "/metrics":
                metrics.set("hybridpd_operator_watch_lag_seconds", freshness.lag_seconds(clock()))
                self._answer(200, metrics.render())
            else:
                self._answer(404, "")

        def _answer(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Probes are no news."""

    return Handler
