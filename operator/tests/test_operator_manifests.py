"""Rendered children: golden files a reviewer reads, and the properties nobody may lose.

Left out: whether an API server accepts them (end-to-end tests do that).
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from operator_golden import Golden
from operator_world import context, resource

from hybridpd_operator import manifests, names
from hybridpd_operator.kinds import Manifest
from hybridpd_operator.manifests import engine_command, engine_env, engine_pod, router, services
from hybridpd_operator.plan import render
from hybridpd_operator.reserved_args import (
    GEOMETRY_FLAGS,
    OWNED_ENV,
    OWNED_FLAGS,
    OWNED_ROUTER_FLAGS,
)

#: A service that uses every field which reaches a pod.
FULL: dict[str, Any] = {
    "model": {
        "id": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "servedName": "nano",
        "maxModelLen": 8192,
        "trustRemoteCode": True,
        "source": {"persistentVolumeClaim": {"claimName": "weights", "path": "nano"}},
    },
    "engine": {
        "image": "registry.example.com/vllm@sha256:" + "0" * 64,
        "imagePullPolicy": "Always",
        "vllmVersion": "0.32.0",
        "kvCacheDtype": "fp8",
        "ssmCacheDtype": "float32",
        "extraArgs": ["--max-num-seqs", "64"],
        "env": [{"name": "PYTHONPATH", "value": "/opt/plugins"}],
    },
    "connector": {
        "leaseSeconds": 45,
        "loadFailurePolicy": "Recompute",
        "checksum": "All",
        "requireFastLink": True,
        "sideChannelKeySecret": {"name": "side-channel"},
    },
    "prefill": {
        "replicas": 2,
        "tensorParallelSize": 2,
        "kvCacheMiB": 65536,
        "resources": {"requests": {"cpu": "8"}, "limits": {"cpu": "8", "memory": "64Gi"}},
        "nodeSelector": {"pool": "prefill"},
        "podTemplate": {
            "metadata": {"annotations": {"example.com/team": "search"}},
            "spec": {
                "priorityClassName": "serving",
                "containers": [
                    {
                        "name": "engine",
                        "volumeMounts": [{"name": "plugins", "mountPath": "/opt/plugins"}],
                    },
                    {"name": "sidecar", "image": "example.com/sidecar:1"},
                ],
                "volumes": [{"name": "plugins", "configMap": {"name": "plugins"}}],
            },
        },
    },
    "decode": {"replicas": 4, "tensorParallelSize": 4, "extraArgs": ["--max-num-seqs", "256"]},
    "router": {"replicas": 2, "policy": "CacheAware"},
    "network": {"rdma": {"resource": "rdma/hca"}, "ucx": {"netDevices": ["mlx5_0:1"]}},
    "imagePullSecrets": [{"name": "registry"}],
}
#: The kind of service the end-to-end tests run: no GPU device, weights from a host folder.
CPU: dict[str, Any] = {
    "engine": {"device": "CPU", "gpuResource": "nvidia.com/gpu", "dtype": "float32"},
    "model": {"source": {"hostPath": {"path": "/models/tiny"}}},
}
CASES = {"smallest": {}, "full": FULL, "cpu": CPU}


def engine_of(template: Manifest) -> Manifest:
    (engine,) = (one for one in template["spec"]["containers"] if one["name"] == "engine")
    return dict(engine)


def env_of(container: Manifest) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def pod_specs(patch: dict[str, Any]) -> Iterator[Manifest]:
    for one in render(context(patch)):
        if "template" in one.get("spec", {}):
            yield one["spec"]["template"]["spec"]


@pytest.mark.parametrize("case", CASES)
def test_every_child_is_as_reviewed(golden: Golden, case: str) -> None:
    objects = render(context(CASES[case]))
    golden.check(f"{case}.yaml", yaml.safe_dump_all(objects, sort_keys=False, width=100))


@pytest.mark.parametrize("case", CASES)
def test_pods_fit_the_restricted_standard(case: str) -> None:
    for spec in pod_specs(CASES[case]):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False
        assert "hostNetwork" not in spec
        ours = [*spec.get("initContainers", ()), *spec["containers"]]
        for container in (one for one in ours if one["name"] != "sidecar"):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]


def test_only_the_router_gets_a_token() -> None:
    tokens = {
        spec["serviceAccountName"]: spec["automountServiceAccountToken"] for spec in pod_specs({})
    }
    assert tokens == {"demo-engine": False, "demo-router": True}
    for account in (one for one in render(context()) if one["kind"] == "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_the_capability_for_rdma_is_added_only_with_rdma() -> None:
    without = engine_of(engine_pod.template(context(), "prefill"))
    with_rdma = engine_of(engine_pod.template(context(FULL), "prefill"))
    assert "add" not in without["securityContext"]["capabilities"]
    assert with_rdma["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert with_rdma["resources"]["limits"]["rdma/hca"] == "2"


@pytest.mark.parametrize(
    ("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")]
)
def test_the_transfer_config_names_our_connector(role: str, kv_role: str) -> None:
    args = engine_of(engine_pod.template(context(FULL), role))["args"]
    config = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "HybridNixlConnector"
    assert config["kv_connector_module_path"] == "hybridpd_connector.connector"
    assert config["kv_role"] == kv_role
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"]["lease_seconds"] == 45
    assert config["kv_connector_extra_config"]["checksum"] == "all"
    assert config["kv_connector_extra_config"]["require_fast_link"] is True
    assert "engine_id" not in config, "a fixed id would make a restarted engine look like the old"


def test_decode_engines_are_told_the_prefill_engines_of_their_own_revision() -> None:
    extra = {
        role: engine_command.transfer_config(context(FULL), role)["kv_connector_extra_config"]
        for role in names.ENGINE_ROLES
    }
    headless = services.headless(context(FULL), names.PREFILL)
    (port,) = [one["port"] for one in headless["spec"]["ports"] if one["name"] == "nixl"]
    assert extra[names.DECODE]["prefill_peers"] == [f"{headless['metadata']['name']}:{port}"]
    assert "prefill_peers" not in extra[names.PREFILL]
    revision = context(FULL).revision
    assert headless["spec"]["selector"][names.LABEL_REVISION] == revision
    assert headless["metadata"]["name"].endswith(revision)
    assert headless["spec"]["publishNotReadyAddresses"] is True


def test_both_roles_get_the_same_model_string_and_image() -> None:
    for patch in CASES.values():
        prefill, decode = (
            engine_of(engine_pod.template(context(patch), role)) for role in names.ENGINE_ROLES
        )
        assert prefill["image"] == decode["image"]
        models = {args[args.index("--model") + 1] for args in (prefill["args"], decode["args"])}
        assert len(models) == 1


@pytest.mark.parametrize("role", names.ENGINE_ROLES)
def test_the_side_channel_is_the_pods_own_address(role: str) -> None:
    env = env_of(engine_of(engine_pod.template(context(), role)))
    assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert env["VLLM_SSM_CONV_STATE_LAYOUT"] == "DS"


def test_gpus_follow_the_tensor_parallel_size() -> None:
    for role, gpus in (("prefill", "2"), ("decode", "4")):
        limits = engine_of(engine_pod.template(context(FULL), role))["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == gpus


def test_a_cpu_engine_asks_for_no_gpu_and_any_node() -> None:
    template = engine_pod.template(context({"engine": {"device": "CPU"}}), "prefill")
    assert engine_of(template)["resources"] == {}
    assert "affinity" not in template["spec"]
    # UCX warns of variables that nothing reads, and without a GPU nothing reads CUDA's.
    assert not [entry for entry in engine_of(template)["env"] if "CUDA" in entry["name"]]


def test_the_default_node_is_an_h200_and_the_user_may_say_otherwise() -> None:
    text = json.dumps(engine_pod.template(context(), "prefill")["spec"]["affinity"])
    assert "NVIDIA-H200" in text
    other = context({"prefill": {"gpuProducts": []}})
    assert "affinity" not in engine_pod.template(other, "prefill")["spec"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_affinity_of_the_user_replaces_the_default_one(role: str) -> None:
    """As the definition says, and as it lets larger nodes be named; an empty one says nothing."""
    spread: dict[str, Any] = {"podAntiAffinity": {"preferredDuringScheduling": []}}
    named = engine_pod.template(context({role: {"affinity": spread}}), role)
    assert named["spec"]["affinity"] == spread
    empty = engine_pod.template(context({role: {"affinity": {}}}), role)
    assert empty == engine_pod.template(context(), role)


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ([], "/hybridpd/python"),
        ([{"name": "PYTHONPATH", "value": "/mine"}], "/mine:/hybridpd/python"),
        ([{"name": "PYTHONPATH", "value": ""}], "/hybridpd/python"),
    ],
)
def test_the_users_python_path_comes_first(user: list[Manifest], expected: str) -> None:
    env = engine_env.with_python_path([{"name": "A", "value": "1"}, *user])
    assert env[-1] == {"name": "PYTHONPATH", "value": expected}


def test_a_python_path_from_a_reference_is_kept_as_one() -> None:
    reference = {"configMapKeyRef": {"name": "paths", "key": "python"}}
    env = engine_env.with_python_path([{"name": "PYTHONPATH", "valueFrom": reference}])
    assert env[0] == {"name": "HYBRIDPD_USER_PYTHONPATH", "valueFrom": reference}
    assert env[1]["value"] == "$(HYBRIDPD_USER_PYTHONPATH):/hybridpd/python"


def test_a_python_path_in_the_pod_template_is_kept() -> None:
    patch = {"containers": [{"name": "engine", "env": [{"name": "PYTHONPATH", "value": "/mine"}]}]}
    template = engine_pod.template(context({"decode": {"podTemplate": {"spec": patch}}}), "decode")
    assert env_of(engine_of(template))["PYTHONPATH"] == "/mine:/hybridpd/python"


def test_a_pod_template_cannot_take_away_what_we_own() -> None:
    hostile = {
        "metadata": {"labels": {names.LABEL_REVISION: "other"}},
        "spec": {
            "serviceAccountName": "admin",
            "automountServiceAccountToken": True,
            "initContainers": [{"name": "connector", "$patch": "delete"}],
            "volumes": [{"name": "hybridpd-connector", "$patch": "delete"}],
            "containers": [
                {
                    "name": "engine",
                    "args": ["--help"],
                    "command": ["sleep"],
                    "env": [{"name": "VLLM_SSM_CONV_STATE_LAYOUT", "value": "SD"}],
                    "volumeMounts": [{"mountPath": "/hybridpd/python", "$patch": "delete"}],
                }
            ],
        },
    }
    plain = engine_pod.template(context(), "prefill")
    patched = engine_pod.template(context({"prefill": {"podTemplate": hostile}}), "prefill")
    engine, before = engine_of(patched), engine_of(plain)
    assert engine["command"] == before["command"]
    assert engine["args"] == before["args"]
    assert env_of(engine)["VLLM_SSM_CONV_STATE_LAYOUT"] == "DS"
    assert {mount["mountPath"] for mount in engine["volumeMounts"]} == {
        mount["mountPath"] for mount in before["volumeMounts"]
    }
    assert patched["spec"]["serviceAccountName"] == "demo-engine"
    assert patched["spec"]["automountServiceAccountToken"] is False
    assert [one["name"] for one in patched["spec"]["initContainers"]] == ["connector"]
    assert "hybridpd-connector" in [one["name"] for one in patched["spec"]["volumes"]]


@pytest.mark.parametrize("role", names.ENGINE_ROLES)
def test_the_side_channels_key_is_a_mounted_file_and_nothing_else(role: str) -> None:
    secret = {"name": "pair-key", "key": "secret.txt"}
    keyed = engine_pod.template(context({"connector": {"sideChannelKeySecret": secret}}), role)
    plain = engine_pod.template(context(), role)
    volumes = {one["name"]: one for one in keyed["spec"]["volumes"]}
    assert volumes.pop("hybridpd-side-channel-key")["secret"] == {
        "secretName": "pair-key",
        "items": [{"key": "secret.txt", "path": "key"}],
        "defaultMode": 0o440,
    }
    assert list(volumes) == [one["name"] for one in plain["spec"]["volumes"]]
    # Readable for the engine's group, which fsGroup makes the group of the mounted files.
    assert keyed["spec"]["securityContext"]["fsGroup"] == 1000
    mounts = {one["name"]: one for one in engine_of(keyed)["volumeMounts"]}
    mount = mounts["hybridpd-side-channel-key"]
    assert mount == {
        "name": "hybridpd-side-channel-key",
        "mountPath": "/hybridpd/side-channel",
        "readOnly": True,
    }
    args = engine_of(keyed)["args"]
    extra = json.loads(args[args.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert extra["side_channel_key_file"] == "/hybridpd/side-channel/key"
    assert engine_of(keyed)["env"] == engine_of(plain)["env"]
    (connector,) = keyed["spec"]["initContainers"]
    assert "hybridpd-side-channel-key" not in json.dumps(connector)


def test_without_a_key_nothing_of_it_is_rendered() -> None:
    for role in names.ENGINE_ROLES:
        assert "side-channel" not in json.dumps(engine_pod.template(context(), role))
        assert "side_channel_key" not in json.dumps(engine_pod.template(context(), role))


def test_every_flag_and_variable_we_render_is_refused_to_users() -> None:
    known = {one.name for one in (*OWNED_FLAGS, *GEOMETRY_FLAGS)}
    patch = {**FULL, "engine": {**FULL["engine"], "extraArgs": [], "blockSize": 64}}
    patch["decode"] = {"tensorParallelSize": 2}
    patch["model"] = {"id": "a/b", "revision": "main", "maxModelLen": 8, "trustRemoteCode": True}
    for role in names.ENGINE_ROLES:
        args = engine_of(engine_pod.template(context(patch), role))["args"]
        flags = {arg.removeprefix("--").removeprefix("no-") for arg in args if arg[:2] == "--"}
        assert flags <= known, flags - known
    router_known = {one.name for one in OWNED_ROUTER_FLAGS}
    router_flags = {arg[2:] for arg in router.arguments(context()) if arg[:2] == "--"}
    assert router_flags <= router_known, router_flags - router_known
    owned = {entry["name"] for entry in engine_env.owned(context(FULL))}
    assert owned <= {one.name for one in OWNED_ENV}


def test_drain_fits_the_grace_period() -> None:
    for role in names.ENGINE_ROLES:
        template = engine_pod.template(context(), role)
        engine = engine_of(template)
        args = engine["args"]
        timeout = int(args[args.index("--shutdown-timeout") + 1])
        sleep = engine["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert template["spec"]["terminationGracePeriodSeconds"] >= sleep + timeout + 15


def test_probes_allow_the_load_time_and_a_busy_machine() -> None:
    engine = engine_of(
        engine_pod.template(context({"prefill": {"loadBudgetSeconds": 3601}}), "prefill")
    )
    startup = engine["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 3601
    for probe in (engine["readinessProbe"], engine["livenessProbe"]):
        assert probe["timeoutSeconds"] >= 5
        assert probe["failureThreshold"] >= 3


def test_the_routers_selectors_name_one_revision() -> None:
    args = router.arguments(context())
    for flag in ("--prefill-selector", "--decode-selector"):
        start = args.index(flag) + 1
        selector = dict(pair.split("=") for pair in args[start : start + 3])
        assert selector[names.LABEL_REVISION] == context().revision
        assert selector[names.LABEL_SERVICE] == "demo"


def test_statefulsets_are_parallel_and_never_restart_pods_by_themselves() -> None:
    for one in render(context()):
        if one["kind"] == "StatefulSet":
            assert one["spec"]["podManagementPolicy"] == "Parallel"
            assert one["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_labels_and_annotations_of_the_parent_are_not_copied() -> None:
    tracked = resource(labels={"argocd.argoproj.io/instance": "x"})
    assert tracked["metadata"]["labels"]
    text = json.dumps([*render(context())])
    assert not re.search(r"argocd|toolkit\.fluxcd", text)


def test_shared_objects_carry_no_revision() -> None:
    for one in manifests.shared(context()):
        assert names.LABEL_REVISION not in one["metadata"]["labels"]
    for one in manifests.of_revision(context()):
        assert one["metadata"]["labels"][names.LABEL_REVISION] == context().revision


@pytest.mark.parametrize("case", CASES)
def test_nothing_empty_is_rendered(case: str) -> None:
    """The server drops empty values, which would look like drift for ever."""
    for one in render(context(CASES[case])):
        empty = [path for path, value in _leaves(one) if value in ("", None, [])]
        assert [path for path in empty if "apiGroups" not in path] == []


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value
