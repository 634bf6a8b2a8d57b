"""Progress of an agent: a thread that looks at it whatever the engine is doing.

The first read of a pair needs the producer's side to move, and its engine may be inside a step of
25 s. Where the agent has no thread of its own that sleeps until something arrives, this one looks
at regular intervals. ``benchmarks/agent_progress.py`` compares the two.
"""

import collections
import contextlib
import logging
import threading

from hybridpd_connector.agent_api import Agent, Notification
from hybridpd_connector.errors import ConnectorError

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.002
_PAUSE_AFTER_ERROR_SECONDS = 1.0
_MAX_WAITING = 1 << 20


class Pump:
    """Takes notifications from ``agent`` every ``interval_seconds`` and keeps them in order."""

    def __init__(self, agent: Agent, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._agent = agent
        self._interval_seconds = interval_seconds
        self._stop = threading.Event()
        self._arrived: collections.deque[Notification] = collections.deque(maxlen=_MAX_WAITING)
        self._looking = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="hybridpd-progress", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "running" if self._thread.is_alive() else "closed"
        return f"Pump({state}, waiting={len(self._arrived)})"

    def take(self) -> list[Notification]:
        """Everything that has arrived, also what arrived since the thread last looked.

        Never raises for the agent's sake: the engine's thread asks. The pump's own says it.
        """
        with contextlib.suppress(ConnectorError):
            self._look()
        # Only the left end is taken here, and only here; the thread adds at the right one.
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def close(self) -> None:
        """Stop the thread. Idempotent; what has arrived can still be taken."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        pause = self._interval_seconds
        while not self._stop.wait(pause):
            try:
                self._look()
                pause = self._interval_seconds
            except ConnectorError as error:
                logger.warning("progress of %s: %s", self._agent.name, error)
                pause = _PAUSE_AFTER_ERROR_SECONDS

    def _look(self) -> None:
        # One look at a time, or two threads could store their finds in the wrong order.
        with self._looking:
            self._arrived.extend(self._agent.take_notifications())
