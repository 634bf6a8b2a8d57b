"""What tests expect of a pair, computed from vLLM's own numbers and without our geometry."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from hybridpd_testkit.checkpoint_families import VOCABULARY_SIZE
from hybridpd_testkit.engines import Engine
from hybridpd_testkit.pd_client import complete
from hybridpd_testkit.tokenizer import SPECIAL_TOKENS

MAX_TOKENS = 16
# One token; a few; around a 128-token page (129 leaves it exactly full on D); several pages.
PROMPT_LENGTHS = (1, 2, 5, 100, 127, 128, 129, 300, 600)
# The CPU kernels store K in runs of 16 tokens; with AMX, V in runs of two.
RUN_TOKENS = {"vec": (16, 1), "amx": (16, 2)}


def random_prompt(length: int, seed: int) -> list[int]:
    """Ordinary token ids, the same for the same arguments."""
    source = random.Random(seed)
    return [source.randrange(len(SPECIAL_TOKENS), VOCABULARY_SIZE) for _ in range(length)]


def prompts() -> list[list[int]]:
    """One prompt of each of ``PROMPT_LENGTHS``; the families' seeds were picked with these."""
    source = random.Random(3)
    return [
        [source.randrange(len(SPECIAL_TOKENS), VOCABULARY_SIZE) for _ in range(length)]
        for length in PROMPT_LENGTHS
    ]


@functools.cache
def reference_tokens(engine: Engine) -> list[tuple[int, ...]]:
    """What one engine answers to ``prompts()`` by itself, without any transfer."""
    return [complete(engine, prompt, MAX_TOKENS).tokens for prompt in prompts()]


def ideal_bytes(reports: Sequence[Mapping[str, Any]], tokens: int) -> int:
    """Bytes that all ranks of D together must receive for the state of ``tokens`` tokens.

    From ``WorkerReport.report_cache``: each real state layer whole, each attention layer the
    tokens that are there (rounded up to whole runs); no padding, no padding slots.
    """
    if tokens == 0:
        return 0
    groups = [group for report in reports for group in report["groups"]]
    return sum(_layer_bytes(group, tokens) * len(group["layers"]) for group in groups)


def _layer_bytes(group: Mapping[str, Any], tokens: int) -> int:
    if group["kind"] == "state":
        sizes = zip(group["shapes"], group["item_bytes"], strict=True)
        return sum(math.prod(shape) * int(item) for shape, item in sizes)
    k_and_v = sum(math.ceil(tokens / run) * run for run in RUN_TOKENS[group["isa"]])
    return k_and_v * int(group["kv_heads"] * group["head_dim"] * group["item_bytes"])
