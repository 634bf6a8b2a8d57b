"""Whatever a resource holds, the verdict is an answer and never a crash.

A crash here would be a crash loop of the operator over one user's resource.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import SPEC
from operator_world import resource as patched

from hybridpd_operator import cli, problems
from hybridpd_operator.catalogue import config_of
from hybridpd_operator.report import text
from hybridpd_operator.validate import assess

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.sampled_from(
        ["auto", "fp8", "engine", "--block-size", "--tensor-p", "0.32.0", "{}", "[[["]
    )
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
FLAGS = st.sampled_from(
    [
        "--block-size",
        "--kv-cache-dtype",
        "--speculative-config",
        "--speculative-config.num_speculative_tokens",
        "--spec-tokens",
        "--num-gpu-blocks-override",
        "--hf-overrides",
        "--dtype",
        "-tp",
        "--",
        "-",
        "",
        "=",
        "--=1",
        "--.",
    ]
)
FULL: dict[str, Any] = {
    "model": {
        "id": "org/model",
        "revision": "main",
        "maxModelLen": 4096,
        "source": {"huggingFace": {"tokenSecret": {"name": "s"}}},
        "config": {
            "inline": {
                "model_type": "falcon_h1",
                "num_hidden_layers": 2,
                "hidden_size": 256,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "mamba_d_ssm": 256,
                "mamba_n_heads": 4,
                "mamba_n_groups": 2,
                "mamba_d_head": 64,
                "max_position_embeddings": 4096,
            }
        },
    },
    "engine": {
        "image": "vllm/vllm-openai:v0.32.0",
        "env": [{"name": "A", "value": "b"}],
        "extraArgs": ["--max-num-seqs", "8"],
    },
    "connector": {"backends": ["UCX"]},
    "prefill": {
        "tensorParallelSize": 2,
        "kvCacheMiB": 4096,
        "resources": {"limits": {"cpu": 1}},
        "podTemplate": {
            "metadata": {"labels": {"a": "b"}},
            "spec": {
                "containers": [{"name": "engine", "env": [{"name": "A", "value": "b"}]}],
                "volumes": [{"name": "v"}],
            },
        },
    },
    "decode": {"extraArgs": [], "drain": {"preStopSeconds": 1}},
    "router": {"podTemplate": {"spec": {"containers": [{"name": "router", "ports": []}]}}},
    "network": {"rdma": {"resource": "rdma/a"}, "ucx": {"transports": ["rc"]}},
}


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in inner:
        found.append((*path, key))
        if isinstance(item, dict | list):
            found += paths(item, (*path, key))
    return found


def resource(spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "hybridpd.dev/v1alpha1",
        "kind": "HybridPDService",
        "metadata": {"name": "demo"},
        "spec": spec,
    }


def answered(value: dict[str, Any]) -> None:
    """There is a verdict, children where it may start, and both forms of the report print it."""
    (report,) = cli.plan([value], cli.DEFAULT_IMAGES)
    json.dumps(report.to_dict())
    assert text(report)
    verdict = report.assessment
    assert verdict.may_start == (not verdict.problems) == bool(report.children)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(paths(FULL)), VALUES)
def test_any_value_in_any_field(path: tuple[Any, ...], value: Any) -> None:
    spec = copy.deepcopy(FULL)
    node = spec
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    answered(resource(spec))


@settings(max_examples=60, deadline=None)
@given(st.lists(FLAGS | st.text(max_size=30) | SCALARS.map(json.dumps), max_size=5))
def test_any_arguments(args: list[str]) -> None:
    spec = copy.deepcopy(FULL)
    spec["decode"]["extraArgs"] = args
    answered(resource(spec))


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_any_spec(spec: Any) -> None:
    answered(resource(spec))


@pytest.mark.parametrize(
    "text",
    [
        "{model: {id: a/b, 1: 2}}",
        "{model: {id: a/b}, prefill: {podTemplate: {metadata: {labels: {1: a}}, 2: b}}}",
        "{model: {id: a/b}, prefill: {podTemplate: {spec: {1: a, containers: [{2: b}]}}}}",
        "{model: {id: a/b, config: {inline: {1: a, model_type: falcon_h1}}}}",
        "{model: {id: a/b}, decode: {nodeSelector: {true: x}}}",
        "{1: 2}",
    ],
)
def test_keys_that_only_yaml_can_hold(text: str) -> None:
    answered(resource(yaml.safe_load(text)))


@pytest.mark.parametrize("name", [[], {}, [[]], None, 1, True, ["hybridpd-side-channel-key"]])
@pytest.mark.parametrize("key", ["volumes", "containers", "initContainers"])
def test_a_name_that_is_no_text(key: str, name: object) -> None:
    spec = copy.deepcopy(FULL)
    spec["prefill"]["podTemplate"] = {"spec": {key: [{"name": name}]}}
    answered(resource(spec))


def test_deeply_nested_json_in_a_flag() -> None:
    spec = copy.deepcopy(FULL)
    spec["decode"]["extraArgs"] = ["--hf-overrides", "[" * 1000]
    answered(resource(spec))


@pytest.mark.parametrize(
    ("engine", "reasons"),
    [({}, {problems.IMPOSSIBLE_ENGINE}), ({"ssmCacheDtype": "float32"}, set())],
    ids=["used", "overridden"],
)
def test_a_config_with_a_dtype_that_is_none_is_told(
    engine: dict[str, Any], reasons: set[str]
) -> None:
    known = config_of(SPEC["model"]["id"]) or {}
    model = {"config": {"inline": {**known, "mamba_ssm_cache_dtype": "float33"}}}
    verdict = assess(patched({"model": model, "engine": engine}))
    assert {problem.reason for problem in verdict.problems} == reasons
