"""What the connector refuses when an engine starts is refused before: no pair is started to crash.

The refusals themselves are tests of the connector (vllm_compat, vllm_cache); the values come from
one table in the geometry.
"""

from __future__ import annotations

from typing import Any

import pytest
from test_operator_validation import judge

from hybridpd_operator import problems

MODE_ALL = {"extraArgs": ["--mamba-cache-mode=all"]}


@pytest.mark.parametrize(
    ("engine", "field", "parts"),
    [
        (
            {"prefixCaching": True, **MODE_ALL},
            "spec.engine.extraArgs[0]",
            ("none or align", "got all"),
        ),
        (
            {"device": "CPU", "kvCacheDtype": "fp8"},
            "spec.engine.kvCacheDtype",
            ("auto on a CPU", "fp8_e4m3"),
        ),
    ],
    ids=["mode", "fp8 on a CPU"],
)
def test_an_engine_that_would_refuse_is_not_started(
    engine: dict[str, Any], field: str, parts: tuple[str, ...]
) -> None:
    verdict = judge({"engine": engine})
    assert verdict.accepted
    assert not verdict.may_start
    (found,) = verdict.model_problems
    assert (found.reason, found.field) == (problems.IMPOSSIBLE_ENGINE, field)
    assert [part for part in parts if part not in found.message] == []


@pytest.mark.parametrize(
    "engine",
    [
        MODE_ALL,  # without prefix caching vLLM puts it back to none
        {"prefixCaching": True, "extraArgs": ["--mamba-cache-mode=align"]},
        {"device": "CPU", "kvCacheDtype": "auto"},
        {"kvCacheDtype": "fp8"},
    ],
)
def test_an_engine_that_starts_is_started(engine: dict[str, Any]) -> None:
    assert judge({"engine": engine}).problems == ()
