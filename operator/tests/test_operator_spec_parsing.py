"""Reading a custom resource: defaults, field paths in errors, every problem at once.

Left out: rules across fields (test_operator_validation_spec.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from hybridpd_operator.errors import FieldError, InvalidSpecError
from hybridpd_operator.spec import DEFAULT_GPU_RESOURCE, Engine, Spec, parse_service
from hybridpd_operator.spec_fields import read_object
from hybridpd_operator.spec_roles import H200_PRODUCTS, EnvVar


def resource(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "hybridpd.dev/v1alpha1",
        "kind": "HybridPDService",
        "metadata": {"name": "demo", "namespace": "team", "uid": "u", "generation": 3},
        "spec": {"model": {"id": "org/model"}, **spec},
    }


def problems(value: dict[str, Any]) -> tuple[FieldError, ...]:
    with pytest.raises(InvalidSpecError) as caught:
        parse_service(value)
    return caught.value.problems


def test_the_smallest_resource_gets_every_default() -> None:
    service = parse_service(resource())
    assert (service.name, service.namespace, service.uid) == ("demo", "team", "u")
    assert (service.generation, service.deleting) == (3, False)
    spec = service.spec
    assert spec.prefill == spec.decode
    assert spec.prefill.gpu_products == H200_PRODUCTS
    assert spec.prefill.drain.least_grace_seconds == 90
    assert spec.connector.backends == ("UCX",)
    assert spec.router.policy_flag == "round_robin"
    assert spec.router.is_rendered
    assert spec.model.name == "org/model"


def test_values_are_read_where_they_are_given() -> None:
    value = resource(
        engine={"env": [{"name": "A", "value": "b"}], "extraArgs": ["--max-num-seqs", "8"]},
        prefill={"kvCacheMiB": 512, "resources": {"limits": {"cpu": 4, "memory": "8Gi"}}},
        router={"kind": "None"},
    )
    value["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    service = parse_service(value)
    assert service.deleting
    assert service.spec.engine.env == (EnvVar("A", "b"),)
    assert service.spec.engine.extra_args == ("--max-num-seqs", "8")
    assert service.spec.prefill.kv_cache_mib == 512
    assert service.spec.role("prefill").resources.limits == {"cpu": "4", "memory": "8Gi"}
    assert not service.spec.router.is_rendered


def test_null_means_left_out() -> None:
    assert parse_service(resource(engine=None)).spec.engine == Engine()


def test_a_file_without_namespace_means_default() -> None:
    value = resource()
    value["metadata"] = {"name": "demo"}
    service = parse_service(value)
    assert (service.namespace, service.uid, service.generation) == ("default", "", 1)


def test_every_problem_is_told_with_its_path() -> None:
    found = problems(
        resource(
            model={"id": "/a/path", "maxModelLen": 1},
            prefill={"replicas": "2", "drain": {"preStopSeconds": -1}, "tp": 2},
            engine={"device": "TPU", "prefixCaching": "yes", "blockSize": 24},
            decode={"env": [{"name": "A"}, {"name": "A"}, {"value": "b"}]},
        )
    )
    assert {one.path for one in found} == {
        "spec.model.id",
        "spec.model.maxModelLen",
        "spec.prefill.replicas",
        "spec.prefill.drain.preStopSeconds",
        "spec.prefill.tp",
        "spec.engine.device",
        "spec.engine.prefixCaching",
        "spec.engine.blockSize",
        "spec.decode.env[1].name",
        "spec.decode.env[2].name",
    }


@pytest.mark.parametrize(
    ("spec", "path", "expected"),
    [
        ({"prefill": []}, "spec.prefill", "an object"),
        ({"engine": {"extraArgs": "--a"}}, "spec.engine.extraArgs", "a list"),
        ({"engine": {"extraArgs": ["a"] * 65}}, "spec.engine.extraArgs", "0 to 64 items"),
        ({"connector": {"backends": []}}, "spec.connector.backends", "1 to 8 items"),
        ({"prefill": {"replicas": True}}, "spec.prefill.replicas", "an integer"),
        ({"prefill": {"nodeSelector": []}}, "spec.prefill.nodeSelector", "a map"),
        ({"prefill": {"nodeSelector": {1: "a"}}}, "spec.prefill.nodeSelector", "text keys"),
        ({"prefill": {"affinity": 1}}, "spec.prefill.affinity", "an object"),
        (
            {"prefill": {"resources": {"limits": {"cpu": "lots"}}}},
            "spec.prefill.resources.limits.cpu",
            "a quantity such as 4, 500m or 64Gi",
        ),
        ({"engine": {"image": "vllm/vllm-openai"}}, "spec.engine.image", "text matching"),
        ({"rollout": {"strategy": "BlueGreen"}}, "spec.rollout.strategy", "one of Recreate"),
        ({"autoscaling": {}}, "spec.autoscaling", "one of connector, decode"),
    ],
)
def test_a_wrong_value_names_what_was_expected(
    spec: dict[str, Any], path: str, expected: str
) -> None:
    (found,) = problems(resource(**spec))
    assert found.path == path
    assert found.expected.startswith(expected)
    assert str(found).startswith(f"{path}: expected {expected}")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("connector", {"sideChannelKeySecret": {"name": "pair\n"}}),
        ("connector", {"sideChannelKeySecret": {"name": "pair", "key": "key\n"}}),
        ("connector", {"backends": ["UCX\n"]}),
        ("model", {"id": "org/model\n"}),
        ("prefill", {"resources": {"limits": {"memory": "8Gi\n"}}}),
    ],
    ids=str,
)
def test_a_line_break_at_the_end_is_refused_as_the_api_server_does(path: str, value: Any) -> None:
    (problem,) = problems(resource(**{path: value}))
    assert problem.path.startswith(f"spec.{path}")


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("a", True),
        ("pair-key.2", True),
        ("9.9", True),
        ("a..b", False),
        ("a.-b", False),
        ("a-.b", False),
        (".a", False),
        ("a.", False),
        ("-a", False),
        ("A", False),
        ("a_b", False),
    ],
)
def test_names_of_other_objects_are_those_that_the_api_server_takes(
    name: str, accepted: bool
) -> None:
    source = {"huggingFace": {"tokenSecret": {"name": name}}}
    claim = {"persistentVolumeClaim": {"claimName": name}}
    for spec in (
        {"connector": {"sideChannelKeySecret": {"name": name}}},
        {"imagePullSecrets": [{"name": name}]},
        {"model": {"id": "org/model", "source": source}},
        {"model": {"id": "org/model", "source": claim}},
        {"model": {"id": "org/model", "config": {"configMap": {"name": name}}}},
    ):
        _, found = read_object(Spec, resource(**spec)["spec"], "spec")
        assert (not found) is accepted, spec


def test_a_word_that_yaml_takes_for_a_boolean_is_asked_for_in_quotes() -> None:
    (problem,) = problems(resource(connector={"checksum": False}))
    assert problem.expected == "one of Off, Sample, All, in quotes"
    (problem,) = problems(resource(connector={"checksum": "off"}))
    assert problem.expected == "one of Off, Sample, All"


def test_a_long_value_is_cut_in_the_message() -> None:
    (found,) = problems(resource(engine={"loadFormat": "X" * 1000}))
    assert len(found.got) == 120


@pytest.mark.parametrize("key", ["apiVersion", "kind", "metadata", "spec"])
def test_what_makes_it_a_resource_is_required(key: str) -> None:
    value = resource()
    del value[key]
    assert problems(value)


@pytest.mark.parametrize(
    ("engine", "resource_name"),
    [
        (Engine(), DEFAULT_GPU_RESOURCE),
        (Engine(device="CPU"), None),
        (Engine(device="CPU", gpu_resource="nvidia.com/gpu"), "nvidia.com/gpu"),
        (Engine(gpu_resource=""), None),
        (Engine(gpu_resource="example.com/gpu"), "example.com/gpu"),
    ],
)
def test_the_accelerator_follows_the_device_unless_it_is_named(
    engine: Engine, resource_name: str | None
) -> None:
    assert engine.gpu_resource_name == resource_name


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.32.0", "0.32.0"),
        ("example.com:5000/vllm-openai:0.33.1-cu13", "0.33.1"),
        ("example/engine:1.4.2", None),
        ("vllm/vllm-openai@sha256:" + "a" * 64, None),
    ],
)
def test_the_version_is_taken_from_a_vllm_tag(image: str, version: str | None) -> None:
    assert Engine(image=image).stated_version == version
    assert Engine(image=image, vllm_version="0.31.0").stated_version == "0.31.0"
