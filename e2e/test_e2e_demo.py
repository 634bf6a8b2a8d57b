"""The demo must fail when anything differs: its comparisons against made-up answers. No cluster."""

from __future__ import annotations

import json

import pytest

import completions
from completions import Answer, CompletionError
from hybridpd_demo.checks import MEASURED, DemoError, compare, counter

RIGHT = {"a sentence": Answer(("x", "y"), 5)}
METRICS = f"""# HELP {MEASURED} Bytes read, as NIXL counted them.
# TYPE {MEASURED} counter
{MEASURED}{{engine="0",model_name="tiny"}} 1.5e+06
{MEASURED}{{engine="1",model_name="tiny"}} 500000.0
{MEASURED.replace("_total", "_created")}{{engine="0"}} 1.7e+09
"""


def test_equal_answers_pass() -> None:
    compare(RIGHT, dict(RIGHT))


@pytest.mark.parametrize("wrong", [Answer(("x", "z"), 5), Answer(("x",), 5), Answer(("x", "y"), 6)])
def test_any_difference_fails_and_is_shown(wrong: Answer) -> None:
    with pytest.raises(DemoError, match="a sentence"):
        compare({"a sentence": wrong}, RIGHT)


def test_counters_are_summed_over_engines() -> None:
    assert counter(METRICS, MEASURED) == 2_000_000
    assert counter(METRICS, "hybridpd_nothing_total") == 0


@pytest.mark.parametrize(
    "text",
    [
        "not JSON",
        json.dumps({"choices": []}),
        json.dumps({"choices": [{"text": "ok", "logprobs": None}], "usage": {"prompt_tokens": 1}}),
        json.dumps({"error": {"message": "no workers"}}),
    ],
)
def test_a_body_without_tokens_is_no_answer(text: str) -> None:
    with pytest.raises(CompletionError):
        completions.parse(text)
