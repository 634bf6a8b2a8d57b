"""Comparing tokens of a model that computes in bfloat16, where near-ties may fall either way.

Two engines that add the same numbers in another order (another TP size, another batch) get logits
that differ in the last bits of bfloat16. A greedy token that leads the second by less than that may
then be another one, and everything behind it too, with no byte in the wrong place. So a difference
is accepted only where the single engine itself was undecided, the comparison goes on behind it with
the single engine's tokens as the prompt, and the accepted differences are counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridpd_testkit.engines import Engine
from hybridpd_testkit.expectations import MAX_TOKENS, prompts
from hybridpd_testkit.pd_client import completion_request

# Leads of one and the same token in single engines at TP 1 and TP 2 differ by up to 0.28, and those
# that fell by 0.06 (`benchmarks/near_tie_noise.py`).
TIE_NATS = 0.25
# Of the 144 tokens of ``prompts()`` so many may be near-ties that fell the other way.
MOST_TIES = 10


@dataclass(frozen=True, slots=True)
class Reference:
    """What one engine answers by itself: tokens, and by how many nats each led the second."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]

    def agreement(self, tokens: Sequence[int]) -> int:
        """How many tokens are equal from the start.

        ValueError when the first difference is not a near-tie of the reference.
        """
        for position, (ours, theirs) in enumerate(zip(self.tokens, tokens, strict=True)):
            if ours == theirs:
                continue
            if self.margins[position] > TIE_NATS:
                raise ValueError(
                    f"tokens[{position}]: expected {ours}, which leads by "
                    f"{self.margins[position]:.3f} nats, got {theirs}"
                )
            return position
        return len(self.tokens)


def fallen_ties(
    reference: Reference, prompt: list[int], complete: Callable[[list[int], int], Sequence[int]]
) -> int:
    """Compare all tokens of ``reference``; how many near-ties fell the other way.

    ``complete``: (prompt, number of tokens) -> the tokens of the engines under test.
    ValueError at the first difference that is no near-tie.
    """
    ties = position = 0
    while position < len(reference.tokens):
        rest = Reference(reference.tokens[position:], reference.margins[position:])
        tokens = complete([*prompt, *reference.tokens[:position]], len(rest.tokens))
        equal = rest.agreement(tokens)
        if equal == len(rest.tokens):
            break
        ties += 1
        position += equal + 1
    return ties


@functools.cache
def references(engine: Engine) -> list[Reference]:
    """What one engine answers to ``prompts()`` by itself, without any transfer."""
    return [reference_of(engine, prompt, MAX_TOKENS) for prompt in prompts()]


def reference_of(engine: Engine, prompt: list[int], max_tokens: int) -> Reference:
    """What one engine answers to a prompt by itself, and how sure it was of each token."""
    # Tokens as ids: two tokens may have one text, and would share a key.
    request = completion_request(prompt, max_tokens, logprobs=2, return_tokens_as_token_ids=True)
    (choice,) = engine.post("/v1/completions", request)["choices"]
    margins = []
    for top in choice["logprobs"]["top_logprobs"]:
        first, second = sorted(top.values(), reverse=True)[:2]
        margins.append(first - second)
    return Reference(tuple(choice["token_ids"]), tuple(margins))
