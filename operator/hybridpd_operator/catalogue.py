"""Models whose geometry ships with the package, so that admission needs no network.

`catalogue.json` holds, per model, its hub ids, where the numbers come from (`source`), the fields
that equal the defaults of its transformers config class (`defaults`, checked in the connector's
test environment), and the fields of its `config.json` that decide the cache (`config`).
Checkpoints quantised with their own KV cache dtype are left out: their caches differ.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One model of the catalogue."""

    name: str
    ids: tuple[str, ...]
    source: str
    defaults: tuple[str, ...]
    config: Mapping[str, Any]


@cache
def entries() -> tuple[Entry, ...]:
    """Every model of the catalogue, in the file's order."""
    text = resources.files("hybridpd_operator").joinpath("catalogue.json").read_text("utf-8")
    return tuple(
        Entry(
            name=row["name"],
            ids=tuple(row["ids"]),
            source=row["source"],
            defaults=tuple(row["defaults"]),
            config=row["config"],
        )
        for row in json.loads(text)["models"]
    )


def config_of(model_id: str) -> Mapping[str, Any] | None:
    """The config of a hub id, as written or in other letter case; None when it is not known."""
    return _by_id().get(model_id.lower())


@cache
def _by_id() -> Mapping[str, Mapping[str, Any]]:
    return {model_id.lower(): entry.config for entry in entries() for model_id in entry.ids}
