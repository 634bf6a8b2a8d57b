"""The verdict on a service: one case per reason, both values in the message, all at once.

Left out: spellings of flags and pod templates (test_operator_reserved_args.py), and the arithmetic
itself (test_geometry_*).
"""

from __future__ import annotations

from typing import Any

import pytest

from hybridpd_operator import problems
from hybridpd_operator.assessment import Assessment
from hybridpd_operator.catalogue import config_of
from hybridpd_operator.manifests.merge import merge
from hybridpd_operator.validate import assess

NANO = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
FALCON = "tiiuae/Falcon-H1-34B-Instruct"


def judge(spec: dict[str, Any], name: str = "demo", **config: Any) -> Assessment:
    """The verdict on Nano at TP 2 and 2 with `spec` laid over."""
    base = {
        "model": {"id": NANO},
        "prefill": {"tensorParallelSize": 2},
        "decode": {"tensorParallelSize": 2},
    }
    resource = {
        "apiVersion": "hybridpd.dev/v1alpha1",
        "kind": "HybridPDService",
        "metadata": {"name": name},
        "spec": merge(base, spec),
    }
    return assess(resource, **config)


#: reason, spec, field of the problem, and parts of its message.
SPEC_CASES: tuple[tuple[str, dict[str, Any], str, tuple[str, ...]], ...] = (
    (
        problems.INVALID_FIELD,
        {"prefill": {"replicas": -1}},
        "spec.prefill.replicas",
        ("0 to 1000", "-1"),
    ),
    (
        problems.CONFLICTING_FIELDS,
        {"model": {"source": {"hostPath": {"path": "/m"}, "huggingFace": {}}}},
        "spec.model.source",
        ("huggingFace and hostPath",),
    ),
    (
        problems.CONFLICTING_FIELDS,
        {"engine": {"blockSize": 64}, "decode": {"extraArgs": ["--block-size", "32"]}},
        "spec.decode.extraArgs[0]",
        ("--block-size", "spec.engine.blockSize is 64"),
    ),
    (
        problems.DRAIN_TOO_SHORT,
        {"decode": {"drain": {"shutdownTimeoutSeconds": 600}}},
        "spec.decode.drain.terminationGracePeriodSeconds",
        ("15", "600", "630", "120"),
    ),
    (
        problems.DRAIN_TOO_SHORT,
        {"connector": {"leaseSeconds": 58}},
        "spec.prefill.drain.shutdownTimeoutSeconds",
        ("58", "63", "60"),
    ),
    (
        problems.UNSUPPORTED_VERSION,
        {"engine": {"image": "vllm/vllm-openai:v0.29.0"}},
        "spec.engine.image",
        ("0.30 to 0.33", "0.29.0"),
    ),
    (
        problems.UNSUPPORTED_VERSION,
        {"engine": {"image": "vllm/vllm-openai:v0.32.1", "vllmVersion": "0.32.10"}},
        "spec.engine.vllmVersion",
        ("0.32.10", "0.32.1"),
    ),
    (
        problems.MOVING_IMAGE,
        {"engine": {"image": "vllm/vllm-openai:latest"}},
        "spec.engine.image",
        (":latest", "digest"),
    ),
    (
        problems.ONE_SIDED_REPLICAS,
        {"decode": {"replicas": 0}},
        "spec.decode.replicas",
        ("prefill has 1", "decode 0"),
    ),
    (
        problems.NODE_TOO_SMALL,
        {"model": {"id": "Qwen/Qwen3-Next-80B-A3B-Instruct"}, "decode": {"tensorParallelSize": 16}},
        "spec.decode.tensorParallelSize",
        ("8 GPUs", "16"),
    ),
    (
        problems.RESERVED_FLAG,
        {"engine": {"extraArgs": ["--port", "9000"]}},
        "spec.engine.extraArgs[0]",
        ("--port",),
    ),
    (
        problems.RESERVED_FLAG,
        {"prefill": {"extraArgs": ["--block-size", "many"]}},
        "spec.prefill.extraArgs[0]",
        ("whole number", "many"),
    ),
    (
        problems.RESERVED_ENV,
        {"decode": {"env": [{"name": "UCX_TLS", "value": "tcp"}]}},
        "spec.decode.env[0].name",
        ("spec.network.ucx.transports",),
    ),
    (
        problems.RESERVED_POD_FIELD,
        {
            "network": {"rdma": {"resource": "rdma/a"}},
            "prefill": {"resources": {"limits": {"rdma/a": 1}}},
        },
        "spec.prefill.resources.limits.rdma/a",
        ("spec.network.rdma.count",),
    ),
    (
        problems.RESERVED_POD_FIELD,
        {
            "engine": {"gpuResource": "example.com/gpu"},
            "decode": {"resources": {"requests": {"example.com/gpu": 1}}},
        },
        "spec.decode.resources.requests.example.com/gpu",
        ("spec.decode.tensorParallelSize",),
    ),
    (
        problems.RESERVED_POD_FIELD,
        {"decode": {"podTemplate": {"spec": {"tolerations": []}}}},
        "spec.decode.podTemplate.spec.tolerations",
        ("spec.decode.tolerations",),
    ),
)

MODEL_CASES: tuple[tuple[str, dict[str, Any], str, tuple[str, ...]], ...] = (
    (
        problems.BAD_MODEL_CONFIG,
        {"model": {"config": {"inline": {"model_type": "falcon_h1"}}}},
        "spec.model.config",
        ("config.num_hidden_layers",),
    ),
    (
        problems.UNSUPPORTED_MODEL,
        {"model": {"config": {"inline": {"model_type": "minimax_m1"}}}},
        "spec.model.id",
        ("full or latent attention", "got minimax_m1", "linear-attention", "ordinary engines"),
    ),
    (
        problems.TENSOR_PARALLEL_SIZE,
        {"decode": {"tensorParallelSize": 3}},
        "spec.decode.tensorParallelSize",
        ("3 ranks", "2 KV heads", "64 state heads", "prefill has 2", "decode 3", "2 or 4"),
    ),
    (
        problems.MAX_MODEL_LEN,
        {"model": {"maxModelLen": 300000}},
        "spec.model.maxModelLen",
        ("262144", "300000"),
    ),
    (
        problems.CACHE_TOO_SMALL,
        {"model": {"maxModelLen": 131072}, "prefill": {"kvCacheMiB": 256}},
        "spec.prefill.kvCacheMiB",
        ("131072 tokens", "MiB"),
    ),
    (
        problems.CACHE_TOO_SMALL,
        {
            "model": {"maxModelLen": 131072},
            "decode": {"extraArgs": ["--num-gpu-blocks-override=9"]},
        },
        "spec.decode.extraArgs[0]",
        ("there are 9",),
    ),
    (
        problems.LAYOUT_MISMATCH,
        {"engine": {"device": "CPU"}, "decode": {"extraArgs": ["--kv-cache-dtype=fp8"]}},
        "spec.decode.extraArgs[0]",
        ("bfloat16 on prefill", "fp8_e4m3 on decode", "--kv-cache-dtype"),
    ),
    (
        problems.LAYOUT_MISMATCH,
        {"prefill": {"extraArgs": ["--mamba-ssm-cache-dtype", "bfloat16"]}},
        "spec.prefill.extraArgs[0]",
        ("bfloat16 on prefill", "float32 on decode"),
    ),
    (
        problems.LAYOUT_MISMATCH,
        {"decode": {"extraArgs": ["--hf-overrides.rope_theta=5"]}},
        "spec.decode.extraArgs[0]",
        ("{} on prefill", "{'rope_theta': 5} on decode"),
    ),
    (
        problems.IMPOSSIBLE_ENGINE,
        {"engine": {"extraArgs": ["--kv-cache-dtype", "nvfp4"]}},
        "spec.prefill",
        ("kv_dtype", "nvfp4"),
    ),
)


def ids(cases: tuple[tuple[str, dict[str, Any], str, tuple[str, ...]], ...]) -> list[str]:
    return [f"{reason}-{field}" for reason, _, field, _ in cases]


@pytest.mark.parametrize("case", SPEC_CASES, ids=ids(SPEC_CASES))
def test_a_problem_of_the_resource(
    case: tuple[str, dict[str, Any], str, tuple[str, ...]],
) -> None:
    reason, spec, field, parts = case
    verdict = judge(spec)
    assert not verdict.accepted
    assert not verdict.may_start
    (found,) = (one for one in verdict.spec_problems if one.field == field)
    assert found.reason == reason
    assert [part for part in parts if part not in found.message] == []


@pytest.mark.parametrize("case", MODEL_CASES, ids=ids(MODEL_CASES))
def test_a_problem_of_the_pair(case: tuple[str, dict[str, Any], str, tuple[str, ...]]) -> None:
    reason, spec, field, parts = case
    verdict = judge(spec)
    assert verdict.accepted, verdict.spec_problems
    assert verdict.compatible is False
    assert not verdict.may_start
    found = [one for one in verdict.model_problems if one.field == field]
    assert [one.reason for one in found] == [reason]
    assert [part for part in parts if part not in found[0].message] == []


def test_a_bad_name_is_a_problem() -> None:
    for name in ("a" * 36, "1st", "a.b"):
        (found,) = judge({}, name=name).spec_problems
        assert (found.reason, found.field) == (problems.INVALID_NAME, "metadata.name")
    assert judge({}, name="a" * 35).accepted


def test_every_reason_has_a_case() -> None:
    tested = {case[0] for case in (*SPEC_CASES, *MODEL_CASES)} | {problems.INVALID_NAME}
    assert tested == {*problems.SPEC_REASONS, *problems.MODEL_REASONS}


def test_all_problems_are_told_at_once() -> None:
    verdict = judge(
        {
            "prefill": {"tensorParallelSize": 3},
            "decode": {"tensorParallelSize": 5, "replicas": 0},
            "model": {"maxModelLen": 10**6},
        }
    )
    assert [one.reason for one in verdict.problems] == [
        problems.ONE_SIDED_REPLICAS,
        problems.TENSOR_PARALLEL_SIZE,
        problems.TENSOR_PARALLEL_SIZE,
        problems.MAX_MODEL_LEN,
    ]


@pytest.mark.parametrize(
    "spec",
    [
        {"prefill": {"tensorParallelSize": 1}, "decode": {"tensorParallelSize": 4}},
        {"prefill": {"tensorParallelSize": 8}, "decode": {"tensorParallelSize": 1}},
        {"model": {"id": FALCON}, "decode": {"tensorParallelSize": 1}},
        {
            "model": {"id": "tiiuae/Falcon-H1-7B-Base"},
            "prefill": {"tensorParallelSize": 4},
            "decode": {"tensorParallelSize": 6},
        },
        {"model": {"id": "Qwen/Qwen3-Next-80B-A3B-Instruct"}, "decode": {"tensorParallelSize": 4}},
        {"decode": {"extraArgs": ["--block-size=64"]}},
        {"engine": {"device": "CPU", "kvCacheDtype": "fp8", "ssmCacheDtype": "bfloat16"}},
        {"prefill": {"tensorParallelSize": 8, "gpuProducts": ["NVIDIA-H200"]}},
        {"engine": {"device": "CPU"}},
        {"prefill": {"replicas": 0}, "decode": {"replicas": 0}},
    ],
    ids=["1-4", "8-1", "falcon", "4-6", "qwen", "blocks", "dtypes", "8", "CPU", "paused"],
)
def test_pairs_that_fit(spec: dict[str, Any]) -> None:
    verdict = judge(spec)
    assert verdict.problems == ()
    assert verdict.compatible is True
    assert verdict.may_start


def test_larger_nodes_can_be_named() -> None:
    wide = {"tensorParallelSize": 16, "gpuProducts": ["Example-NVL16"]}
    inline = {**(config_of(NANO) or {}), "n_groups": 16}
    assert judge({"model": {"config": {"inline": inline}}, "prefill": wide}).problems == ()


def test_an_unknown_model_is_unknown_and_may_start() -> None:
    verdict = judge({"model": {"id": "org/unheard-of"}})
    assert verdict.compatible is None
    assert verdict.may_start
    assert not verdict.has_facts
    assert "org/unheard-of" in verdict.why_unknown
    assert verdict.geometry is None


def test_a_type_without_a_reader_is_unknown_too() -> None:
    verdict = judge({"model": {"config": {"inline": {"model_type": "rwkv"}}}})
    assert (verdict.compatible, verdict.may_start) == (None, True)
    assert "rwkv" in verdict.why_unknown


def test_facts_of_the_resource_win_over_the_catalogue() -> None:
    inline = {**(config_of(NANO) or {}), "num_key_value_heads": 4}
    verdict = judge({"model": {"config": {"inline": inline}}})
    assert verdict.geometry is not None
    assert verdict.geometry["factsSource"] == "Inline"
    assert verdict.geometry["requestTokenBytes"] == 2 * 6144


def test_a_config_map_is_read_where_it_can_be() -> None:
    spec = {"model": {"id": "org/unheard-of", "config": {"configMap": {"name": "facts"}}}}
    away = judge(spec)
    assert (away.compatible, away.may_start) == (None, True)
    assert "ConfigMap facts, key config.json" in away.why_unknown
    bad = judge(spec, config_problem="no such key")
    assert [one.reason for one in bad.model_problems] == [problems.BAD_MODEL_CONFIG]
    good = judge(spec, config=config_of(NANO))
    assert good.compatible is True
    assert (good.geometry or {})["factsSource"] == "ConfigMap"


def test_overrides_are_laid_over_the_config() -> None:
    overrides = '--hf-overrides={"num_key_value_heads": 4}'
    both = judge({"engine": {"extraArgs": [overrides]}})
    assert (both.geometry or {})["requestTokenBytes"] == 2 * 6144
    one = judge({"decode": {"extraArgs": [overrides]}})
    assert [found.reason for found in one.model_problems] == [problems.LAYOUT_MISMATCH]


def test_overrides_are_laid_over_as_vllm_does_it() -> None:
    """Of two whole objects the later one counts; a text model's fields are replaced one by one."""
    wide = '--hf-overrides={"num_key_value_heads": 4}'
    lost = judge({"engine": {"extraArgs": [wide, "--hf-overrides={}"]}})
    assert (lost.geometry or {})["requestTokenBytes"] == 6144
    inner = {"text_config": config_of(NANO), "model_type": "outer"}
    model = {"id": "org/unheard-of", "config": {"inline": inner}}
    nested = ["--hf-overrides.text_config.num_key_value_heads=4"]
    both = judge({"model": model, "engine": {"extraArgs": nested}})
    assert (both.geometry or {})["requestTokenBytes"] == 2 * 6144


def test_the_forecast_has_the_numbers_of_the_worked_example() -> None:
    """Nano at TP 2 and 4: block sizes 2096 and 1056, pages and states in bytes of one rank."""
    verdict = judge({"decode": {"tensorParallelSize": 4}, "prefill": {"kvCacheMiB": 64 * 1024}})
    geometry = verdict.geometry
    assert geometry is not None
    assert geometry["prefill"] == {
        "tensorParallelSize": 2,
        "blockTokens": 2096,
        "pageBytes": 1073152,
        "stateBytes": 18432 + 1048576,
        "paddingBytes": 1073152 - 18432 - 1048576,
        "kvBlocks": (64 * 1024 << 20) // (6 * 1073152),
    }
    assert geometry["decode"]["blockTokens"] == 1056
    assert "kvBlocks" not in geometry["decode"]
    # 23 states whole, over all ranks; 6 layers of 2 KV heads of 128, each on two ranks of four.
    assert geometry["requestStateBytes"] == 23 * (36864 + 2097152)
    assert geometry["requestTokenBytes"] == 6 * 2 * 2 * (2 * 128 * 2)


def test_a_role_that_cannot_be_planned_is_left_out_of_the_forecast() -> None:
    geometry = judge({"decode": {"tensorParallelSize": 3}}).geometry
    assert geometry is not None
    assert "prefill" in geometry
    assert not {"decode", "requestStateBytes"} & set(geometry)
