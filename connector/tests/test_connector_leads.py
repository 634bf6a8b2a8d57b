"""Telling noise from a wrong token, and n-grams foretold: the pure parts of `leads`."""

from __future__ import annotations

import random

import pytest

from hybridpd_testkit.leads import (
    LEAST_BOUND_NATS,
    LEAST_COMPARED,
    MOST_BOUND_NATS,
    NOISE_TIMES,
    TOP,
    Told,
    compare,
    drafts_to_accept,
    first_difference,
    noise_bound,
    same_to_the_bit,
    too_noisy,
)


def told(*leads, second=100):
    """Tokens 1, 2, 3, …, each with a second token (100, 101, …) behind it by so many nats."""
    tops = tuple({at + 1: -0.5, second + at: -0.5 - lead} for at, lead in enumerate(leads))
    return Told(tuple(range(1, len(leads) + 1)), tops)


def test_what_an_answer_says_of_its_tokens():
    answer = told(2.0, 0.25, 1.0)
    assert answer.lead(1) == answer.lag(1, 101) == 0.25
    assert answer.lag(0, 1) == 0
    assert answer.lag(0, 7) is None
    assert answer.reference.margins == (2.0, 0.25, 1.0)
    assert answer.reference.tokens == (1, 2, 3)
    assert [answer.decided(bound) for bound in (0.2, 0.25, 1.5, 3.0)] == [3, 1, 1, 0]


def test_a_difference_is_told_in_one_line():
    assert first_difference(told(1.0, 0.5), (1, 2)) is None
    second, unknown = (first_difference(told(1.0, 0.5), (1, token)) for token in (101, 7))
    assert str(second) == "token 1: expected 2, which leads by 0.50000, got 101, 0.50000 behind"
    assert str(unknown).endswith(f"got 7, not among the best {TOP}")
    with pytest.raises(ValueError, match="shorter"):
        first_difference(told(1.0, 0.5), (1,))


def test_only_a_token_that_was_as_good_is_noise():
    expected = [told(1.0, 0.01, 1.0), told(1.0, 0.01, 1.0), told(1.0, 1.0, 1.0)]
    found = compare(expected, [(1, 2, 3), (1, 101, 9), (1, 2, 3)], bound=0.02)
    assert found.problem == ""
    assert (found.answers, found.decided, found.tokens, found.equal) == (3, 1, 9, 7)
    assert list(found.fallen) == [1]
    assert "request 1: token 1: expected 2, which leads by 0.01000, got 101" in str(found)

    # At the same place another token is no noise, and neither is a second one far behind.
    for tokens, words in (((1, 7, 3), "not among"), ((1, 2, 102), "1.00000 behind")):
        wrong = compare(expected, [(1, 2, 3), tokens, (1, 2, 3)], bound=0.02)
        assert wrong.problem.startswith("1 wrong, bound 0.02000; request 1: token ")
        assert words in wrong.problem


def test_too_little_compared_is_a_problem():
    """Noise at the first tokens hides all that follows."""
    early = [told(0.01, *(1.0,) * 9) for _ in range(4)]
    answers = [(100, *range(2, 11))] * 3 + [tuple(range(1, 11))]
    found = compare(early, answers, bound=0.02)
    assert found.equal < LEAST_COMPARED * found.tokens
    assert found.problem.startswith("only 10 of 40 tokens could be compared: 3 of 4 answers fell")
    assert compare(early, answers[::-1][:1] * 4, bound=0.02).problem == ""


def test_the_bound_follows_the_noise_up_to_a_cap():
    assert noise_bound(0.0) == LEAST_BOUND_NATS
    assert noise_bound(0.01) == pytest.approx(0.01 * NOISE_TIMES)
    assert noise_bound(5.0) == MOST_BOUND_NATS
    assert not too_noisy(MOST_BOUND_NATS / NOISE_TIMES / 1.01)
    assert too_noisy(MOST_BOUND_NATS / NOISE_TIMES * 1.01)


def test_equal_to_the_bit_is_logprobs_too():
    ours = told(1.0, 0.5)
    assert same_to_the_bit(ours, told(1.0, 0.5)) == ""
    assert same_to_the_bit(ours, told(1.0, 0.5 + 1e-7)).startswith("token 1: logprobs differ by up")
    other = Told((1, 101), ours.tops)
    assert same_to_the_bit(ours, other) == "token 1: 101 for 2"
    assert same_to_the_bit(ours, told(1.0, 0.5, second=200)).startswith("token 0: logprobs differ")


def drafted_one_by_one(prompt, tokens, longest, drafted):
    """The same as `drafts_to_accept`, as an engine lives it: no step sees what comes."""
    known, rest, accepted = [*prompt, tokens[0]], list(tokens[1:]), 0
    while rest:
        draft = []
        for width in range(longest, 0, -1):
            starts = [
                start
                for start in range(len(known) - width)
                if known[start : start + width] == known[-width:]
            ]
            if starts:
                draft = known[starts[0] + width : starts[0] + width + drafted]
                break
        for token in draft:
            if not rest or rest[0] != token:
                break
            known.append(rest.pop(0))
            accepted += 1
        if rest:
            known.append(rest.pop(0))
    return accepted


def test_drafts_are_foretold():
    loop = [5, 6, 7] * 20
    assert drafts_to_accept([1, 2, 3], list(range(10, 40)), 3, 2) == 0
    assert drafts_to_accept([1], loop, 3, 2) >= 36
    source = random.Random(1)
    for _ in range(200):
        prompt = [source.randrange(4) for _ in range(source.randrange(1, 9))]
        tokens = [source.randrange(4) for _ in range(source.randrange(1, 30))]
        assert drafts_to_accept(prompt, tokens, 3, 2) == drafted_one_by_one(prompt, tokens, 3, 2)
