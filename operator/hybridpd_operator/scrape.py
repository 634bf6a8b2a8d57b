"""Reads the engines' ``/metrics`` over HTTP: bounded in time, size and number of connections."""

import http.client
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from hybridpd_operator import names
from hybridpd_operator.observed import EngineSample, Pod
from hybridpd_operator.verify import parse_sample

_CONNECTIONS: Final = 8
_TIMEOUT_SECONDS: Final = 3.0
_LARGEST_ANSWER_BYTES: Final = 8 << 20


class Scraper(Protocol):
    """Something that knows the engines' counters."""

    def samples(self, pods: Sequence[Pod]) -> tuple[EngineSample, ...] | None:
        """One sample per pod, or None when any of them did not answer."""


class HttpScraper:
    """Asks the pods themselves; used from several worker threads."""

    def __init__(self, on_failure: Callable[[], None], port: int = names.HTTP_PORT) -> None:
        self._on_failure = on_failure
        self._port = port
        self._pool = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="scrape")

    def samples(self, pods: Sequence[Pod]) -> tuple[EngineSample, ...] | None:
        """One sample per pod, or None when any of them did not answer.

        A sum over some of the pods would look like a restart of the others.
        """
        found = list(self._pool.map(self._sample, pods))
        whole = tuple(sample for sample in found if sample is not None)
        return whole if len(whole) == len(found) else None

    def close(self) -> None:
        """Stop the threads; requests in flight end by their timeout."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _sample(self, pod: Pod) -> EngineSample | None:
        connection = http.client.HTTPConnection(pod.ip, self._port, timeout=_TIMEOUT_SECONDS)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            text = answer.read(_LARGEST_ANSWER_BYTES + 1)
            if answer.status != http.client.OK or len(text) > _LARGEST_ANSWER_BYTES:
                self._on_failure()
                return None
        except (OSError, http.client.HTTPException):
            self._on_failure()
            return None
        finally:
            connection.close()
        return parse_sample(pod.name, pod.role, text.decode(errors="replace"))
