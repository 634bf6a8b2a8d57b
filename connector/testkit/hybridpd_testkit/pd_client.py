"""Play the router between a prefill and a decode engine, and read what the engines counted.

The prefill request is what routers send: one token to generate, ``do_remote_decode`` true, the
other keys present with null. The answer's ``kv_transfer_params`` go to D as they came, untouched.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hybridpd_testkit.engines import Engine
from hybridpd_testkit.metrics import Metrics
from hybridpd_testkit.processes import HttpError

Prompt = str | list[int] | list[str] | list[list[int]]
Params = Mapping[str, Any]

PREFILL_PARAMS: Params = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One generated sequence: token ids, text and why it ended."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of /v1/completions."""

    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int
    transfer_params: Params | None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the only choice."""
        (choice,) = self.choices
        return choice.tokens


def completion_request(prompt: Prompt, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """The body of a greedy completion. ``fields`` are added, or replace, as they are."""
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def complete(
    engine: Engine,
    prompt: Prompt,
    max_tokens: int = 16,
    request_id: str | None = None,
    **fields: Any,
) -> Answer:
    """One greedy completion; ``HttpError`` when the engine refuses or fails it."""
    document = completion_request(prompt, max_tokens, **fields)
    headers = {"X-Request-Id": request_id or uuid.uuid4().hex}
    return _answer(engine.post("/v1/completions", document, headers))


def _answer(document: Mapping[str, Any]) -> Answer:
    usage = document["usage"]
    details = usage.get("prompt_tokens_details") or {}
    choices = sorted(document["choices"], key=lambda choice: int(choice["index"]))
    return Answer(
        choices=tuple(
            Choice(tuple(c["token_ids"]), c["text"], c["finish_reason"]) for c in choices
        ),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens") or 0,
        transfer_params=document.get("kv_transfer_params"),
    )


class OpenRequest:
    """A completion that its client may abandon, as a user does who closes the browser.

    As a context manager it is abandoned at the end of the block.
    """

    def __init__(self, engine: Engine, prompt: Prompt, max_tokens: int, **fields: Any) -> None:
        self._connection = http.client.HTTPConnection(
            engine.spec.place.http_host, engine.port, timeout=300
        )
        document = completion_request(prompt, max_tokens, stream=True, **fields)
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(document), headers)

    def __enter__(self) -> OpenRequest:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Close the connection; the engine aborts the request. Again does nothing."""
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode engine, with requests going through both."""

    prefill: Engine
    decode: Engine

    def prefill_only(
        self, prompt: Prompt, request_id: str | None = None, **fields: Any
    ) -> Params | None:
        """Send the prefill; the params that its answer carries for D, None when it has none."""
        fields.setdefault("kv_transfer_params", dict(PREFILL_PARAMS))
        return complete(self.prefill, prompt, 1, request_id, **fields).transfer_params

    def decode_only(
        self,
        prompt: Prompt,
        params: Params | None,
        max_tokens: int = 16,
        request_id: str | None = None,
        **fields: Any,
    ) -> Answer:
        """Send D a request that loads what ``params`` name."""
        fields = {"kv_transfer_params": params, **fields}
        return complete(self.decode, prompt, max_tokens, request_id, **fields)

    def complete(self, prompt: Prompt, max_tokens: int = 16, **fields: Any) -> Answer:
        """Prefill on P, then decode on D, under one request id."""
        request_id = uuid.uuid4().hex
        params = self.prefill_only(prompt, request_id, **fields)
        return self.decode_only(prompt, params, max_tokens, request_id, **fields)

    def complete_all(
        self, prompts: Sequence[list[int]], max_tokens: int = 16, **fields: Any
    ) -> list[Answer]:
        """All prompts at once, each its own request; answers in the order of ``prompts``."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            futures = [pool.submit(self.complete, p, max_tokens, **fields) for p in prompts]
            return [future.result() for future in futures]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What D counted for one or more requests: where the prompt's tokens came from, bytes moved."""

    external_tokens: int
    computed_tokens: int
    read_bytes: int
    predicted_bytes: int
    read_descriptors: int
    loads: int
    failures: int
    recomputed: int


def evidence(growth: Metrics) -> Evidence:
    """Evidence from the growth of D's metrics (``Metrics.since``)."""
    tokens = "vllm:prompt_tokens_by_source_total"
    return Evidence(
        external_tokens=int(growth.total(tokens, source="external_kv_transfer")),
        computed_tokens=int(growth.total(tokens, source="local_compute")),
        read_bytes=int(growth.total("hybridpd_read_bytes_total")),
        predicted_bytes=int(growth.total("hybridpd_predicted_bytes_total")),
        read_descriptors=int(growth.total("hybridpd_read_descriptors_total")),
        loads=int(growth.total("hybridpd_loads_total")),
        failures=int(growth.total("hybridpd_load_failures_total")),
        recomputed=int(growth.total("hybridpd_recomputed_requests_total")),
    )


def measured(decode: Engine, action: Callable[[], Answer]) -> tuple[Answer, Evidence]:
    """Run an action and return its answer with what D counted meanwhile."""
    before = decode.metrics()
    answer = action()
    return answer, evidence(decode.metrics().since(before))


def refused(decode: Engine, action: Callable[[], Answer]) -> Evidence:
    """Run an action that D must answer with an error; what D counted by the time it shows."""
    before = decode.metrics()
    try:
        answer = action()
    except HttpError:
        wait_until(
            lambda: evidence(decode.metrics().since(before)).failures > 0, "D counts the failure"
        )
        return evidence(decode.metrics().since(before))
    raise AssertionError(f"expected an error, got {answer}")


def wait_until(condition: Callable[[], bool], what: str, timeout_seconds: float = 20.0) -> None:
    """Poll five times a second; ``TimeoutError`` says what did not happen."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout_seconds:.0f} s still not true: {what}")
        time.sleep(0.2)


def leases_held(engine: Engine) -> int:
    """Prefills whose blocks the engine still pins."""
    return int(engine.metrics().total("hybridpd_leases_held"))


def what_is_left(engine: Engine) -> dict[str, float]:
    """What still runs, waits, is pinned or holds cache. Sends a request, for fresh gauges."""
    complete(engine, [5, 6, 7], 2)
    now = engine.metrics()
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    left = {name: now.total(f"vllm:{name}") for name in gauges}
    left["leases_held"] = leases_held(engine)
    return {name: value for name, value in left.items() if value != 0}


def require_nothing_left(*engines: Engine, timeout_seconds: float = 20.0) -> None:
    """Wait until engines are empty; ``TimeoutError`` says which is not, and what it holds."""
    deadline = time.monotonic() + timeout_seconds
    for engine in engines:
        while left := what_is_left(engine):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{engine.describe()} still holds {left}")
            time.sleep(0.2)
