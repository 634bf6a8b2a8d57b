"""How far vLLM's own leads move in one setting: what `matrix_on_gpu.py` calls noise.

On a GPU the float32 kernels of Triton multiply in TF32, which keeps 10 bits: the scan of Mamba2
and the attention. Which tiles they use is chosen by timing, by each engine for itself, and for
attention by how many requests are in a step. So one and the same tokens, computed as a prompt, in a
batch, by another engine or again after a preemption, have other logprobs. Nothing here is handed
over: engines with a connector are asked like plain ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hybridpd_testkit.engines import Engine
from hybridpd_testkit.expectations import MAX_TOKENS, prompts
from hybridpd_testkit.leads import NOISE_TIMES, Told, noise_bound, told_by, too_noisy
from near_tie_noise import Leads, chosen_again, lead_of

PARALLEL = 8


@dataclass(frozen=True)
class Noise:
    """One way to compute the same tokens again: by how many nats each lead moved."""

    name: str
    moves: tuple[float, ...]

    @property
    def largest(self) -> float:
        return max(self.moves, default=0.0)

    def __str__(self) -> str:
        ordered = sorted(self.moves)
        tail = ordered[int(0.99 * len(ordered))]
        return (
            f"{self.name}: {len(ordered)} places, p50 {statistics.median(ordered):.6f} nats, "
            f"99 % {tail:.6f}, largest {self.largest:.6f}"
        )


def noise(name: str, leads: Leads) -> Noise:
    """From pairs of (lead in one computation, lead of the same token in the other)."""
    return Noise(name, tuple(abs(lead - other) for lead, other in leads))


def one_by_one(engine: Engine, many: Sequence[list[int]], tokens: int) -> list[Told]:
    """Answers of one engine alone, each prompt with the engine to itself."""
    return [told_by(engine, prompt, tokens) for prompt in many]


def all_at_once(engine: Engine, many: Sequence[list[int]], tokens: int) -> list[Told]:
    """The same in one batch."""
    with ThreadPoolExecutor(len(many)) as pool:
        return list(pool.map(lambda prompt: told_by(engine, prompt, tokens), many))


def again(name: str, expected: Sequence[Told], others: Sequence[Told]) -> Noise:
    """Two engines' answers, each up to the first token that differs."""
    pairs = chosen_again([one.reference for one in expected], [one.reference for one in others])
    return noise(name, pairs)


def plain_noise(single: Engine, expected: Sequence[Told]) -> list[Noise]:
    """The plain engine beside itself. ``expected``: what it answers to ``prompts()``."""
    asked = [
        ([*prompt, *told.tokens[:at]], told.tokens[at], told.lead(at))
        for prompt, told in zip(prompts(), expected, strict=True)
        for at in range(MAX_TOKENS)
    ]
    with ThreadPoolExecutor(PARALLEL) as pool:
        leads = list(pool.map(lambda one: (one[2], lead_of(single, one[0], one[1])), asked))
    return [
        again("plain, the same again", expected, one_by_one(single, prompts(), MAX_TOKENS)),
        again("plain, all at once", expected, all_at_once(single, prompts(), MAX_TOKENS)),
        noise("plain, as tokens of a prompt", leads),
    ]


def setting_noise(prefill: Engine, decode: Engine, expected: Sequence[Told]) -> list[Noise]:
    """P and D, asked without a hand-over, beside the plain engine."""
    return [
        again("P alone", expected, one_by_one(prefill, prompts(), MAX_TOKENS)),
        again("D alone", expected, one_by_one(decode, prompts(), MAX_TOKENS)),
        again("D alone, all at once", expected, all_at_once(decode, prompts(), MAX_TOKENS)),
    ]


def largest_of(found: Sequence[Noise]) -> float:
    return max(one.largest for one in found)


def told_bound(found: Sequence[Noise]) -> tuple[bool, str]:
    """Whether the bound can be what it should be; the bound in words."""
    largest = largest_of(found)
    words = f"bound {noise_bound(largest):.5f} nats, {NOISE_TIMES:.0f} times the largest"
    return not too_noisy(largest), words
