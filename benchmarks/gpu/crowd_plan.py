"""Which engines a crowd has, what each takes of the GPU, and who is asked when."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from crowd_report import NONE
from memory_split import Share, cache_bytes, weights_bytes
from pd_models import MODELS
from pd_report import BASE, OURS

from hybridpd_testkit.engines import EngineSpec

KINDS = (OURS, BASE, NONE)
PREFILL, DECODE = "p", "d"
LONGEST_PROMPT_SHARE = 1.5  # of the average one, see `pd_load`


def name_of(kind: str, part: str, number: int) -> str:
    """An engine's name."""
    return f"{kind}-{part}{number}"


def clients_of(spec: EngineSpec, options: argparse.Namespace) -> int:
    """The most requests that an engine runs at once; prefill ends them early."""
    most = max(int(part) for part in options.concurrency.split(","))
    return max(8, most // 2) if spec.role == "kv_producer" else most


def shares_of(specs: Sequence[EngineSpec], options: argparse.Namespace) -> list[Share]:
    """Memory of each engine."""
    config = MODELS[options.model]
    tokens = int(LONGEST_PROMPT_SHARE * options.input) + options.output
    return [
        Share(
            spec.name,
            weights_bytes(config),
            cache_bytes(config, clients_of(spec, options), tokens),
        )
        for spec in specs
    ]


def enough(up: Sequence[str]) -> bool:
    """At least two kinds with two processes; connectors with a prefill engine."""
    whole = [kind for kind in KINDS if len(processes_of(kind, up)) > 1]
    with_prefill = [kind for kind in whole if kind == NONE or prefills_of(kind, up)]
    return len(with_prefill) > 1


def processes_of(kind: str, up: Sequence[str]) -> list[int]:
    """Numbers of the decode engines of a kind that are up."""
    return _numbers(f"{kind}-{DECODE}", up)


def prefills_of(kind: str, up: Sequence[str]) -> list[int]:
    """Numbers of its prefill engines."""
    return _numbers(f"{kind}-{PREFILL}", up)


def _numbers(prefix: str, up: Sequence[str]) -> list[int]:
    found = (name.removeprefix(prefix) for name in up if name.startswith(prefix))
    return sorted(int(number) for number in found if number.isdigit())


def order_of(kinds: Sequence[str], numbers: Sequence[int], turn: int) -> list[tuple[str, int]]:
    """Who is asked when in one pass at one load: kinds alternate, who begins does too, and every
    second pass goes backwards."""
    order = []
    for number in numbers:
        shift = (number + turn // 2) % len(kinds)
        order += [(kind, number) for kind in (*kinds[shift:], *kinds[:shift])]
    return order[::-1] if turn % 2 else order
