"""What the schedulers of our connector do with a prompt's ids, and those of vLLM's do not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from hybridpd_connector.digest import prompt_digest

CALLS = 64
ROUNDS = 15


def microseconds(prompt: list[int]) -> Iterator[tuple[str, float]]:
    """(what, CPU of it): D checks that a load belongs to its prompt by a digest, and P states it; P
    prefills without the last token, in a list of its own."""
    yield (
        "in P and D scheduler: digest of the prompt",
        _each(lambda: prompt_digest(prompt, len(prompt) - 1)),
    )
    yield "in P scheduler: copy of the prompt", _each(lambda: prompt[:-1])


def _each(action: Callable[[], Any]) -> float:
    rounds = []
    for _ in range(ROUNDS):
        begun = time.thread_time()
        for _ in range(CALLS):
            action()
        rounds.append(1e6 * (time.thread_time() - begun) / CALLS)
    return statistics.median(rounds)
