"""Reads the engines' ``/metrics`` over HTTP: bounded in time, size and number of connections."""

import http.client
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from hybridpd_operator import names
from hybridpd_operator.observed import EngineSample, Pod
from hybridpd_operator.verify import parse_sample

_CONNECTIONS: Final = 8
#: For each step: to connect, and to wait for the next bytes.
_TIMEOUT_SECONDS: Final = 3.0
#: For all bytes of an answer: an engine that sends one now and then must not hold up a pass.
_ANSWER_SECONDS: Final = 10.0
_PIECE_BYTES: Final = 1 << 16
_LARGEST_ANSWER_BYTES: Final = 8 << 20


def _read(answer: http.client.HTTPResponse, deadline: float) -> bytes:
    """The answer, cut behind the largest size. OSError or HTTPException when it is not whole.

    A part would look like an engine that began to count anew.
    """
    whole = answer.length
    body = bytearray()
    while len(body) != whole and len(body) <= _LARGEST_ANSWER_BYTES:
        # One receive each: a read of many bytes would wait for all of them.
        piece = answer.read1(_PIECE_BYTES)
        if not piece:
            break
        body += piece
        if time.monotonic() > deadline:
            raise TimeoutError
    if whole is not None and len(body) < min(whole, _LARGEST_ANSWER_BYTES + 1):
        raise http.client.IncompleteRead(bytes(body), whole)
    return bytes(body)


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
            text = _read(answer, time.monotonic() + _ANSWER_SECONDS)
            if answer.status != http.client.OK or len(text) > _LARGEST_ANSWER_BYTES:
                self._on_failure()
                return None
        except (OSError, http.client.HTTPException):
            self._on_failure()
            return None
        finally:
            connection.close()
        return parse_sample(pod.name, pod.role, text.decode(errors="replace"))
