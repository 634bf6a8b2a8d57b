"""The services the end-to-end tests apply: the documented example, and one that no node takes."""

from __future__ import annotations

import base64
import copy
import dataclasses
import secrets
from pathlib import Path
from typing import Any

import yaml

import completions
from kubectl import Kubectl, Object

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
KEY_SECRET = "side-channel"
NOWHERE = {"hybridpd.dev/e2e": "no-such-node"}


def example() -> Object:
    """docs/examples/tiny-nemotron.yaml."""
    document: Object = yaml.safe_load((EXAMPLES / "tiny-nemotron.yaml").read_text())
    return copy.deepcopy(document)


def guarded() -> Object:
    """The example with a key for the side channel; ``key_secret`` is the Secret that it names."""
    service = example()
    service["spec"].setdefault("connector", {})["sideChannelKeySecret"] = {"name": KEY_SECRET}
    return service


def key_secret() -> Object:
    """A Secret with a fresh random key."""
    text = base64.b64encode(secrets.token_bytes(32)).decode()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": KEY_SECRET},
        "stringData": {"key": text},
    }


def nowhere(name: str, **changes: Any) -> Object:
    """The example under another name with pods that no node takes.

    `changes` maps a role or section of the spec to fields that replace the example's.
    """
    service = example()
    service["metadata"]["name"] = name
    for role in ("prefill", "decode", "router"):
        service["spec"][role]["nodeSelector"] = NOWHERE
    for section, fields in changes.items():
        service["spec"].setdefault(section, {}).update(fields)
    return service


@dataclasses.dataclass(frozen=True)
class Pair:
    """The real pair behind its router, and what a single engine answers to the same prompts."""

    kubectl: Kubectl
    name: str
    model: str
    expected: dict[str, completions.Answer]

    def forward(self) -> Any:
        """Base URL of the router's Service for the time of a `with` block."""
        return completions.port_forward(self.kubectl, f"svc/{self.name}", 8000)

    def check_tokens(self) -> None:
        """Every prompt through the router gives the single engine's tokens."""
        with self.forward() as url:
            for name, prompt in completions.prompts().items():
                answer = completions.complete(url, self.model, prompt)
                assert answer == self.expected[name], f"prompt {name!r}"
