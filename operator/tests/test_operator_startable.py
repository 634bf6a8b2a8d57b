"""What the connector refuses when an engine starts is refused before: no pair is started to crash.

The refusals themselves are tests of the connector (vllm_compat, vllm_cache); the values come from
one table in the geometry.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_operator_validation import judge

from hybridpd_connector.vllm_compat import EngineSettings
from hybridpd_operator import problems

DENSE = {
    "config": {
        "inline": {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "torch_dtype": "bfloat16",
            "vocab_size": 1024,
            "hidden_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "max_position_embeddings": 4096,
        }
    }
}
NGRAM = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}']
MODE_ALL = {"extraArgs": ["--mamba-cache-mode=all"]}


#: What the connector decides by -> a spec by which an engine would be refused at start.
REFUSED_AT_START: dict[str, dict[str, Any]] = {
    "version": {"vllmVersion": "0.29.0"},
    "role": {"extraArgs": ["--kv-transfer-config.kv_role=none"]},
    "engine_id": {"extraArgs": ["--kv_transfer_config.engine_id="]},
    "permutes_cache": {"extraArgs": ["--kv-transfer-config.enable_permute_local_kv=true"]},
    "unproven": {"extraArgs": ["--kv-transfer-config.kv_connector_extra_config.unproven+=mtp"]},
    "tp_size": {"extraArgs": ["-t", "2"]},
    "pp_size": {"extraArgs": ["-pp=2"]},
    "context_parallel_size": {"extraArgs": ["-pc", "2"]},
    "mamba_cache_mode": {"prefixCaching": True, **MODE_ALL},
    "replay_ssm": {"extraArgs": ["--use-replayssm"]},
    "hybrid_manager_disabled": {"extraArgs": ["--disable-hybrid-kv-cache-manager"]},
    "host_pools": {"extraArgs": ["--kv-offloading-size=8"]},
    "sleep_mode": {"extraArgs": ["--enable-sleep-mode"]},
    "features": {"extraArgs": ["--enable-fault-tolerance"]},
    "draft_method": {"extraArgs": ["-s", '{"model": "org/small", "num_speculative_tokens": 2}']},
    "on_cpu": {"device": "CPU", "extraArgs": NGRAM},
    "kv_dtype": {"extraArgs": ["--kv-cache-dtype", "int8_per_token_head"]},
}
#: No setting of an engine: told by the model (test_a_problem_of_the_pair), and a flag that no vLLM
#: from 0.30 on has (test_vllm_matrix_refusals_know_of_no_scales_by_a_flag).
BY_OTHER_MEANS = {"state_types", "scales_at_run_time"}


def test_all_that_the_connector_decides_by_has_a_row() -> None:
    fields = {field.name for field in dataclasses.fields(EngineSettings)}
    assert fields == {*REFUSED_AT_START, *BY_OTHER_MEANS}


@pytest.mark.parametrize("field", REFUSED_AT_START)
def test_what_the_connector_refuses_is_refused_before(field: str) -> None:
    assert not judge({"engine": REFUSED_AT_START[field]}).may_start


@pytest.mark.parametrize(
    "args",
    [
        ["--spec-tokens=2"],
        ["--spec-model=org/small", "--spec-tokens=2"],
        ['--speculative-config={"num_speculative_tokens": 2}'],
        [*NGRAM, "--speculative-config.num_speculative_tokens=2"],
        [*NGRAM, "--speculative-config", '{"num_speculative_tokens": 2}'],
    ],
)
def test_drafts_of_a_model_that_is_not_named_are_not_started(args: list[str]) -> None:
    """Without a method vLLM takes a drafting model; what an overridden flag said does not count."""
    verdict = judge({"model": DENSE, "engine": {"extraArgs": args}})
    assert verdict.accepted
    (found,) = verdict.model_problems
    assert "got no method" in found.message


@pytest.mark.parametrize("model", ["ngram", "[ngram]"])
def test_ngrams_may_be_named_as_a_model(model: str) -> None:
    args = [f"--spec-model={model}", "--spec-tokens=2"]
    assert judge({"model": DENSE, "engine": {"extraArgs": args}}).problems == ()


def test_a_mode_that_vllm_does_not_put_back_is_not_started() -> None:
    verdict = judge({"model": DENSE, "engine": MODE_ALL})
    assert [found.reason for found in verdict.model_problems] == [problems.IMPOSSIBLE_ENGINE]


def test_each_side_may_cache_and_draft_as_it_likes() -> None:
    suffix = ["--spec-method=suffix", "--spec-tokens=2"]
    sides = {"prefill": {"extraArgs": NGRAM}, "decode": {"extraArgs": suffix}}
    assert judge({"model": DENSE, **sides}).problems == ()
    assert judge({"decode": {"extraArgs": ["--mamba-cache-mode=align"]}}).problems == ()


@pytest.mark.parametrize(
    ("engine", "field", "parts"),
    [
        (
            {"prefixCaching": True, **MODE_ALL},
            "spec.engine.extraArgs[0]",
            ("none or align", "got all"),
        ),
        (
            {"device": "CPU", "extraArgs": ["--max-num-seqs=8", *NGRAM]},
            "spec.engine.extraArgs[1]",
            ("no speculation for a hybrid model on a CPU", "ngram", "remove --speculative-config"),
        ),
        (
            {"device": "CPU", "extraArgs": ["--spec-tokens=2"]},
            "spec.engine.extraArgs[0]",
            ("no speculation for a hybrid model on a CPU", "got 2"),
        ),
        (
            {"extraArgs": ["--spec-tokens=2"]},
            "spec.engine.extraArgs[0]",
            ("got no method", "name the method, or remove --speculative-config"),
        ),
        (
            {"prefixCaching": True, "extraArgs": NGRAM},
            "spec.engine.extraArgs[0]",
            ("mamba_cache_mode: expected none", "got align", "--no-enable-prefix-caching"),
        ),
        (
            {"vllmVersion": "0.33.0", "extraArgs": NGRAM},
            "spec.engine.extraArgs[0]",
            ("vllm.version: expected 0.32", "got 0.33", "remove --speculative-config"),
        ),
        (
            {"extraArgs": ["--spec-method=suffix", "--spec-tokens=2"]},
            "spec.engine.extraArgs[0]",
            ("expected ngram or ngram_gpu for a hybrid model", "got suffix", "use ngram"),
        ),
        (
            {"extraArgs": ["--speculative-config.method=mtp"]},
            "spec.engine.extraArgs[0]",
            ("ngram or ngram_gpu or suffix", "got mtp", "no --speculative-config"),
        ),
        (
            {"extraArgs": ["--kv-cache-dtype=fp8_per_token_head"]},
            "spec.prefill",
            ("kv_dtype", "fp8_per_token_head"),
        ),
    ],
    ids=["mode", "cpu", "cpu-drafts", "drafts", "caching", "version", "suffix", "mtp", "scales"],
)
def test_an_engine_that_would_refuse_is_not_started(
    engine: dict[str, Any], field: str, parts: tuple[str, ...]
) -> None:
    verdict = judge({"engine": engine})
    assert verdict.accepted
    assert not verdict.may_start
    found, *of_the_other_role = verdict.model_problems
    assert all(one.message == found.message for one in of_the_other_role)
    assert (found.reason, found.field) == (problems.IMPOSSIBLE_ENGINE, field)
    assert [part for part in parts if part not in found.message] == []


QUANTISED = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("engine", "element_bytes"),
    [({}, 1), ({"kvCacheDtype": "bfloat16"}, 2), ({"device": "CPU"}, 1)],
)
def test_a_dtype_that_the_weights_ask_for_is_one_that_was_set(
    engine: dict[str, Any], element_bytes: int
) -> None:
    config = {**DENSE["config"]["inline"], "quantization_config": QUANTISED}
    verdict = judge({"model": {"config": {"inline": config}}, "engine": engine})
    assert verdict.may_start
    assert verdict.geometry is not None
    # 4 layers of 4 heads, keys and values of 64
    assert verdict.geometry["requestTokenBytes"] == 4 * 4 * 2 * 64 * element_bytes


@pytest.mark.parametrize(
    "engine",
    [
        MODE_ALL,  # without prefix caching vLLM puts it back to none
        {"prefixCaching": True, "extraArgs": ["--mamba-cache-mode=align"]},
        {"device": "CPU", "kvCacheDtype": "fp8"},
        {"device": "CPU", "extraArgs": ["--kv-cache-dtype=fp8_e5m2"]},
        {"kvCacheDtype": "bfloat16"},
        {"kvCacheDtype": "fp8"},
        {"kvCacheDtype": "fp8_e5m2"},
        {"extraArgs": ["--kv-cache-dtype=fp8_e4m3"]},
        {"extraArgs": NGRAM},
        {"vllmVersion": "0.32.1", "extraArgs": ["--spec-method=ngram_gpu", "--spec-tokens=3"]},
    ],
)
def test_an_engine_that_starts_is_started(engine: dict[str, Any]) -> None:
    assert judge({"engine": engine}).problems == ()


@pytest.mark.parametrize("stated", [{"vllmVersion": "0.30.1"}, {"image": "e/vllm:v0.30.1"}])
@pytest.mark.parametrize(
    ("model", "sound"), [("Qwen/Qwen3-Next-80B-A3B-Instruct", False), (None, True)]
)
def test_a_state_that_begins_wrong_is_not_started(
    stated: dict[str, str], model: str | None, sound: bool
) -> None:
    verdict = judge({"engine": stated, **({"model": {"id": model}} if model else {})})
    if sound:
        assert verdict.problems == ()
        return
    (found,) = verdict.model_problems
    (name,) = stated
    assert (found.reason, found.field) == (problems.IMPOSSIBLE_ENGINE, f"spec.engine.{name}")
    assert "expected vLLM 0.31 or later for a model with gdn layers, got " in found.message
    assert "use an image with vLLM 0.31 or later" in found.message


@pytest.mark.parametrize("stated", ["0.31.0", "0.33.0", "unreadable"])
def test_a_state_that_begins_right_is_started(stated: str) -> None:
    qwen = {"model": {"id": "Qwen/Qwen3-Next-80B-A3B-Instruct"}}
    assert judge({"engine": {"vllmVersion": stated}, **qwen}).model_problems == ()


def spec_decode(tokens: int) -> dict[str, Any]:
    config = f'{{"method": "ngram", "num_speculative_tokens": {tokens}}}'
    return {"extraArgs": [f"--speculative-config={config}"]}


@pytest.mark.parametrize("sides", [("decode",), ("prefill", "decode")])
def test_drafts_of_a_dense_model_are_started(sides: tuple[str, ...]) -> None:
    assert judge({"model": DENSE, **{role: spec_decode(3) for role in sides}}).problems == ()


@pytest.mark.parametrize("on_prefill", [0, 3])
def test_both_sides_of_a_hybrid_model_draft_the_same_number(on_prefill: int) -> None:
    prefill = {"prefill": spec_decode(on_prefill)} if on_prefill else {}
    (found,) = judge({**prefill, "decode": spec_decode(2)}).model_problems
    assert (found.reason, found.field) == (problems.LAYOUT_MISMATCH, "spec.decode.extraArgs[0]")
    assert f"{on_prefill} on prefill" in found.message
    assert "2 on decode" in found.message
    assert "Give both sides the same number of speculative tokens." in found.message


@pytest.mark.parametrize("model", ["Qwen/Qwen3-Next-80B-A3B-Instruct"])
def test_drafts_with_states_that_were_not_seen_to_draft_are_not_started(model: str) -> None:
    verdict = judge({"model": {"id": model}, "engine": spec_decode(2)})
    (found,) = verdict.model_problems
    assert (found.reason, found.field) == (problems.IMPOSSIBLE_ENGINE, "spec.engine.extraArgs[0]")
    assert "other states than MAMBA2, got ngram with GDN_ATTN" in found.message
