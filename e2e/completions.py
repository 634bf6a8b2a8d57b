"""Completions over HTTP, and a port-forward that reaches a Service from wherever the tests run."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kubectl import Kubectl

REQUEST_SECONDS = 120  # the first request of a new prompt length may compile for 25 s

# Words of the tiny checkpoints' tokenizer; lengths from one token to several pages of 128 or more.
WORDS = "the river bed holds dim red light and a long road to the old mill by the pond"


@dataclasses.dataclass(frozen=True)
class Answer:
    """One completion: the tokens in order, and the prompt's length in tokens."""

    tokens: tuple[str, ...]
    prompt_tokens: int


class CompletionError(Exception):
    """No completion: `status` is the HTTP status, or 0 when nothing answered in time."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status = status


def prompts() -> dict[str, str]:
    """Name → prompt. The names appear in test output."""
    return {
        "one token": "b",
        "a sentence": WORDS,
        "one page": f"first {WORDS} " * 3,
        "several pages": " ".join(f"{number} {WORDS}" for number in range(12)),
    }


def complete(
    base_url: str, model: str, prompt: str, max_tokens: int = 24, seconds: float = REQUEST_SECONDS
) -> Answer:
    """A greedy completion of exactly `max_tokens` tokens; CompletionError otherwise."""
    body = request_body(model, prompt, max_tokens)
    request = urllib.request.Request(
        f"{base_url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return parse(response.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            raise CompletionError(error.code, error.read().decode(errors="replace")) from error
    except OSError as error:
        raise CompletionError(0, str(error)) from error


def request_body(model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """The request as it is sent, also by the demo's curl."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
    }


def parse(text: str) -> Answer:
    """An OpenAI completion as tokens; CompletionError when it holds none."""
    try:
        document = json.loads(text)
        choice = document["choices"][0]
        tokens = tuple(choice["logprobs"]["tokens"])
        return Answer(tokens, document["usage"]["prompt_tokens"])
    except (ValueError, LookupError, TypeError) as error:
        raise CompletionError(200, f"not a completion with tokens: {text}") from error


def fetch(url: str, seconds: float = 10) -> str:
    """The text behind a URL."""
    with urllib.request.urlopen(url, timeout=seconds) as response:
        return str(response.read().decode())


@contextmanager
def port_forward(kubectl: Kubectl, target: str, port: int) -> Iterator[str]:
    """Base URL of a Service or pod (`svc/x`, `pod/y`) for the time of the block.

    kubectl picks a free local port and prints it once it listens, so no port is guessed.
    """
    process = subprocess.Popen(
        kubectl.command("port-forward", target, f":{port}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        found = re.search(r"127\.0\.0\.1:(\d+)", line)
        if not found:
            process.terminate()
            said = process.communicate(timeout=10)[1]
            raise CompletionError(0, f"port-forward to {target}: {line}{said}")
        yield f"http://127.0.0.1:{found.group(1)}"
    finally:
        process.terminate()
        process.communicate(timeout=10)
