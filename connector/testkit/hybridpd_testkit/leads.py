"""Answers with how sure an engine was of each token; is a difference noise, or a wrong token?

Greedy tokens of two computations differ without a wrong byte where the best two are closer than
rounding moves them. How far that is depends on device, dtype and kernels, so it is measured, on
engines alone, and a token that came instead of another one is accepted only where one engine alone
had put it within the measured bound of its own. Nothing is compared behind the first difference of
an answer; what is compared has to be most of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridpd_testkit.engines import Engine
from hybridpd_testkit.near_ties import TIE_NATS, Reference
from hybridpd_testkit.pd_client import Pair, completion_request

TOP = 20  # the most that an engine tells unless it is asked to allow more
# The largest move of several hundred is about three standard deviations of them: three times that
# is nine. Rounding to fp8 moves in steps, and has a longer tail: the cap is for that.
NOISE_TIMES = 3.0
# Logprobs of float32 are told to about a millionth.
LEAST_BOUND_NATS = 0.0001
# With a larger bound nearly every place has a second token that would pass.
MOST_BOUND_NATS = TIE_NATS
# Of all tokens of a comparison so many must be ones before an answer's first difference.
LEAST_COMPARED = 0.6


@dataclass(frozen=True, slots=True)
class Told:
    """An answer. ``tops``: at each place, logprobs in nats of the ``TOP`` best tokens."""

    tokens: tuple[int, ...]
    tops: tuple[Mapping[int, float], ...]

    def lead(self, at: int) -> float:
        """Nats by which the best token leads the second."""
        first, second = sorted(self.tops[at].values(), reverse=True)[:2]
        return first - second

    def lag(self, at: int, token: int) -> float | None:
        """Nats by which a token is behind the best; None when it is not among those told."""
        top = self.tops[at]
        return max(top.values()) - top[token] if token in top else None

    @property
    def reference(self) -> Reference:
        """The same as `near_ties` has it."""
        return Reference(self.tokens, tuple(self.lead(at) for at in range(len(self.tokens))))

    def decided(self, bound: float) -> int:
        """Tokens before the first that leads by no more than ``bound``."""
        places = range(len(self.tokens))
        return next((at for at in places if self.lead(at) <= bound), len(self.tokens))


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer first differs. ``lead``, ``lag``: what the engine alone said, in nats."""

    position: int
    expected: int
    lead: float
    got: int
    lag: float | None

    def __str__(self) -> str:
        behind = f"not among the best {TOP}" if self.lag is None else f"{self.lag:.5f} behind"
        return (
            f"token {self.position}: expected {self.expected}, which leads by {self.lead:.5f}, "
            f"got {self.got}, {behind}"
        )


def first_difference(expected: Told, tokens: Sequence[int]) -> Difference | None:
    """The first place where ``tokens`` are not the expected ones; ValueError for another length."""
    for at, (ours, theirs) in enumerate(zip(expected.tokens, tokens, strict=True)):
        if ours != theirs:
            return Difference(at, ours, expected.lead(at), theirs, expected.lag(at, theirs))
    return None


@dataclass(frozen=True)
class Comparison:
    """Answers beside expected ones. ``tokens``: asked for; ``equal``: before first differences.

    ``decided``: expected answers that lead by more than the bound everywhere. ``fallen`` and
    ``wrong``: differences by number of the answer, within the bound and beyond it.
    """

    bound: float
    answers: int
    decided: int
    tokens: int
    equal: int
    fallen: Mapping[int, Difference] = field(default_factory=dict)
    wrong: Mapping[int, Difference] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """Why this shows no right answers; "" when it does."""
        if self.wrong:
            listed = [f"request {number}: {one}" for number, one in self.wrong.items()]
            return f"{len(listed)} wrong, bound {self.bound:.5f}; " + "; ".join(listed)
        if self.equal < LEAST_COMPARED * self.tokens:
            return (
                f"only {self.equal} of {self.tokens} tokens could be compared: {len(self.fallen)} "
                f"of {self.answers} answers fell another way within {self.bound:.5f} nats"
            )
        return ""

    def __str__(self) -> str:
        text = (
            f"{self.answers} answers, {self.decided} decided by {self.bound:.5f}, {self.equal} of "
            f"{self.tokens} tokens compared"
        )
        fallen = [f"request {number}: {one}" for number, one in self.fallen.items()]
        return "; ".join([text, *fallen])


def compare(expected: Sequence[Told], answers: Sequence[Sequence[int]], bound: float) -> Comparison:
    """Judge answers by what one engine alone said, with a bound in nats for noise."""
    fallen: dict[int, Difference] = {}
    wrong: dict[int, Difference] = {}
    equal = 0
    for number, (told, tokens) in enumerate(zip(expected, answers, strict=True)):
        found = first_difference(told, tokens)
        equal += len(told.tokens) if found is None else found.position
        if found is not None:
            noise = found.lag is not None and found.lag <= bound
            (fallen if noise else wrong)[number] = found
    return Comparison(
        bound=bound,
        answers=len(expected),
        decided=sum(told.decided(bound) == len(told.tokens) for told in expected),
        tokens=sum(len(told.tokens) for told in expected),
        equal=equal,
        fallen=fallen,
        wrong=wrong,
    )


def noise_bound(largest_move: float) -> float:
    """Nats within which a difference is noise, from the largest move of a lead that was measured.

    Never more than ``MOST_BOUND_NATS``; `too_noisy` says when that is less than it should be.
    """
    return min(MOST_BOUND_NATS, max(LEAST_BOUND_NATS, NOISE_TIMES * largest_move))


def too_noisy(largest_move: float) -> bool:
    """Leads move so far that a bound for them would let wrong tokens pass."""
    return NOISE_TIMES * largest_move > MOST_BOUND_NATS


def same_to_the_bit(ours: Told, theirs: Told) -> str:
    """ "" for equal tokens and logprobs; else the first place that differs, and by how much."""
    for at, (our, their) in enumerate(zip(ours.tops, theirs.tops, strict=True)):
        if ours.tokens[at] != theirs.tokens[at]:
            return f"token {at}: {theirs.tokens[at]} for {ours.tokens[at]}"
        if our != their:
            moved = [abs(nats - their[token]) for token, nats in our.items() if token in their]
            return f"token {at}: logprobs differ by up to {max(moved, default=0.0):.2g}"
    return ""


def drafts_to_accept(
    prompt: Sequence[int], tokens: Sequence[int], longest: int, drafted: int
) -> int:
    """Tokens of an answer that n-grams foretell: what a drafting engine should accept, roughly.

    The longest n-gram (at most ``longest``) that ends before the next token and stood somewhere
    earlier drafts the ``drafted`` tokens that followed it there.
    """
    sequence, at, accepted = [*prompt, *tokens], len(prompt) + 1, 0
    while at < len(sequence):
        draft = _draft(sequence[:at], longest, drafted)
        right = 0
        while right < min(len(draft), len(sequence) - at) and draft[right] == sequence[at + right]:
            right += 1
        accepted += right
        at += right + 1
    return accepted


def _draft(sequence: Sequence[int], longest: int, drafted: int) -> Sequence[int]:
    for width in range(longest, 0, -1):
        pattern = sequence[-width:]
        for start in range(len(sequence) - width):
            if sequence[start : start + width] == pattern:
                return sequence[start + width : start + width + drafted]
    return ()


def told_by(
    engine: Engine, prompt: list[int], max_tokens: int, headers: Mapping[str, str] | None = None,
    **fields: object,
) -> Told:  # fmt: skip
    """What an engine answers to a prompt; ``fields`` of the request as they are."""
    # Tokens as ids: two tokens may have one text, and would share a key.
    asked = completion_request(
        prompt, max_tokens, logprobs=TOP, return_tokens_as_token_ids=True, **fields
    )
    (choice,) = engine.post("/v1/completions", asked, headers)["choices"]
    tops = choice["logprobs"]["top_logprobs"]
    return Told(
        tuple(choice["token_ids"]),
        tuple({int(key.partition(":")[2]): nats for key, nats in top.items()} for top in tops),
    )


def told_by_pair(pair: Pair, prompt: list[int], max_tokens: int) -> Told:
    """The same through prefill and decode."""
    request_id = uuid.uuid4().hex
    params = pair.prefill_only(prompt, request_id)
    headers = {"X-Request-Id": request_id}
    return told_by(pair.decode, prompt, max_tokens, headers, kv_transfer_params=params)
