"""Requests that keep coming while something is done to the pair."""

from __future__ import annotations

import itertools
import threading

import completions

PAUSE_SECONDS = 0.5
REQUEST_SECONDS = 45
SENDERS = 2


class Traffic:
    """Sends every prompt in turn, over and over, for the time of a `with` block.

    Each request ends as right, refused or wrong; `wrong` holds what should never be.
    """

    def __init__(self, url: str, model: str, expected: dict[str, completions.Answer]) -> None:
        self.right = 0
        self.refused: list[str] = []
        self.wrong: list[str] = []
        self._url, self._model, self._expected = url, model, expected
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._send, args=(number,)) for number in range(SENDERS)
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(REQUEST_SECONDS + 10)

    def answered(self) -> int:
        """Right answers so far."""
        with self._lock:
            return self.right

    def _send(self, first: int) -> None:
        prompts = list(completions.prompts().items())
        for name, prompt in itertools.cycle(prompts[first:] + prompts[:first]):
            if self._stop.is_set():
                return
            try:
                answer = completions.complete(
                    self._url, self._model, prompt, seconds=REQUEST_SECONDS
                )
            except completions.CompletionError as error:
                with self._lock:
                    self.refused.append(f"{name}: {error}")
            else:
                with self._lock:
                    if answer == self._expected[name]:
                        self.right += 1
                    else:
                        self.wrong.append(f"{name}: {answer}")
            self._stop.wait(PAUSE_SECONDS)
