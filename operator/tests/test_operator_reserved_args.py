"""What `extraArgs`, `env` and `podTemplate` may not touch, in every spelling vLLM understands."""

from __future__ import annotations

from typing import Any

import pytest

from hybridpd_operator.errors import FlagError
from hybridpd_operator.reserved_args import (
    OWNED_FLAGS,
    OWNED_ROUTER_FLAGS,
    Flag,
    env_problems,
    flag_problems,
    parse_flags,
)
from hybridpd_operator.reserved_pod import pod_template_problems
from hybridpd_operator.spec_roles import EnvVar


def flag(name: str, *values: str, keys: tuple[str, ...] = (), at: int = 0) -> Flag:
    return Flag(name, keys, values, f"args[{at}]", is_short=False)


@pytest.mark.parametrize(
    ("args", "flags"),
    [
        (["--a-b", "1"], [flag("a-b", "1")]),
        (["--a_b=1"], [flag("a-b", "1")]),
        (["--a", "-1", "--b"], [flag("a", "-1"), flag("b", at=2)]),
        (["--a", "x", "y"], [flag("a", "x", "y")]),
        (["--a.b.c_d", "1"], [flag("a", "1", keys=("b", "c_d"))]),
        (['--a={"k": "v=w"}'], [flag("a", '{"k": "v=w"}')]),
        (["-tp", "2"], [Flag("tp", (), ("2",), "args[0]", is_short=True)]),
        ([], []),
    ],
)
def test_flags_are_read_as_vllm_reads_them(args: list[str], flags: list[Flag]) -> None:
    assert list(parse_flags(args, "args")) == flags


def test_something_before_the_first_flag_is_an_error() -> None:
    with pytest.raises(FlagError, match=r"args\[0\]: expected a flag"):
        parse_flags(["org/model", "--a"], "args")


@pytest.mark.parametrize(
    "args",
    [
        ["--tensor-parallel-size", "4"],
        ["--tensor_parallel_size=4"],
        ["-tp", "4"],
        ["-tp=4"],
        ["--tensor-parallel", "4"],
        ["--tensor-p=4"],
        ["-t", "4"],
    ],
)
def test_an_owned_flag_is_refused_in_every_spelling(args: list[str]) -> None:
    (problem,) = flag_problems(["--max-num-seqs", "8", *args], "spec.prefill.extraArgs", "prefill")
    assert problem.field == "spec.prefill.extraArgs[2]"
    assert "--tensor-parallel-size" in problem.message


def test_the_typed_field_is_named_with_its_role() -> None:
    (problem,) = flag_problems(["-tp", "4"], "spec.decode.extraArgs", "decode")
    assert "use spec.decode.tensorParallelSize" in problem.message


@pytest.mark.parametrize("args", [["--no-enable-prefix-caching"], ["--no-enable-pref"]])
def test_a_negated_flag_is_the_flag(args: list[str]) -> None:
    (problem,) = flag_problems(args, "args", "prefill")
    assert "enable-prefix-caching" in problem.message


@pytest.mark.parametrize("text", ["-n2", "-n=2", "-nn", "-r1", "-pc", "-p", "-s"])
def test_a_short_flag_is_refused_cut_and_with_its_value_glued_on(text: str) -> None:
    assert len(flag_problems([text], "args", "prefill")) == 1


@pytest.mark.parametrize("text", ["-dc", "-ep", "-cc.mode=3", "-O3", "-q"])
def test_the_users_short_flags_are_no_abbreviations(text: str) -> None:
    assert flag_problems([text], "args", "prefill") == ()


@pytest.mark.parametrize(
    ("args", "at"),
    [
        (["--max-num-seqs=8", "$(MORE)"], 1),
        (["--api-key", "$(KEY)"], 1),
        (["--$(FLAG)", "1"], 0),
        (["--max-num-seqs", "8", "-$(X)=1"], 2),
        (["--seed=1", "$$$(X)"], None),
        (["--api-key=$(KEY)"], None),
        (["--seed=1", "a$(X)"], None),
        (["--seed=1", "$$(X)"], None),
    ],
)
def test_a_variable_may_be_a_value_and_never_a_flag(args: list[str], at: int | None) -> None:
    """The kubelet puts variables into arguments: what was checked is not what vLLM gets."""
    found = flag_problems(args, "args", "prefill")
    assert [one.field for one in found] == ([] if at is None else [f"args[{at}]"])
    assert all("--flag=$(NAME)" in one.message for one in found)


def test_an_abbreviated_geometry_flag_is_refused_and_a_whole_one_is_not() -> None:
    (problem,) = flag_problems(["--block-s", "32"], "args", "prefill")
    assert "write every flag in full" in problem.message
    assert flag_problems(["--block-size", "32", "--kv-cache-dtype=fp8"], "args", "decode") == ()


@pytest.mark.parametrize(
    "args",
    [
        ["--max-num-seqs=64"],
        ["--enable-lora"],
        ["--tool-call-parser", "qwen3"],
        ["--config-format", "hf"],
        ["--kv-cache-metrics"],
        ["--compilation-config.mode", "3"],
    ],
)
def test_other_flags_are_the_users(args: list[str]) -> None:
    assert flag_problems(args, "args", "prefill") == ()


@pytest.mark.parametrize("owned", [OWNED_FLAGS, OWNED_ROUTER_FLAGS], ids=["engine", "router"])
def test_every_owned_flag_is_refused_and_says_what_to_use(owned: tuple[Any, ...]) -> None:
    assert len({one.name for one in owned}) == len(owned)
    for one in owned:
        (problem,) = flag_problems([f"--{one.name}"], "args", "prefill", owned)
        assert one.instead.format(role="prefill").removeprefix("nothing: ") in problem.message


def test_an_owned_variable_is_refused_and_pythonpath_is_not() -> None:
    env = (
        EnvVar("PYTHONPATH", "/mine"),
        EnvVar("VLLM_SSM_CONV_STATE_LAYOUT", "SD"),
        EnvVar("HF_TOKEN", None, {"secretKeyRef": {}}),
    )
    found = env_problems(env, "spec.engine.env")
    assert [one.field for one in found] == ["spec.engine.env[1].name", "spec.engine.env[2].name"]
    assert "tokenSecret" in found[1].message


@pytest.mark.parametrize(
    ("value", "refused"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:64, expandable_segments: true", True),
        ("expandable_segments:\tTrue", True),
        ("$(ALLOCATOR)", True),
        ("expandable_segments:$(EXPAND)", True),
        ("$$(ALLOCATOR)", False),
        ("expandable_segments:False", False),
        ("max_split_size_mb:64", False),
    ],
)
def test_only_expandable_segments_are_refused(value: str, refused: bool) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        assert bool(env_problems((EnvVar(name, value),), "env")) is refused


def test_an_allocator_setting_from_elsewhere_cannot_be_checked() -> None:
    elsewhere = EnvVar("PYTORCH_ALLOC_CONF", None, {"configMapKeyRef": {"name": "a", "key": "b"}})
    (found,) = env_problems((elsewhere,), "env")
    assert "write its value here" in found.message


def engine(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


@pytest.mark.parametrize(
    ("template", "field", "instead"),
    [
        (engine(image="a:1"), "spec.containers[0].image", "spec.engine.image"),
        (engine(args=[]), "spec.containers[0].args", "spec.prefill.extraArgs"),
        (engine(command=[]), "spec.containers[0].command", "spec.prefill.extraArgs"),
        (engine(resources={}), "spec.containers[0].resources", "spec.prefill.resources"),
        (engine(envFrom=[]), "spec.containers[0].envFrom", "spec.prefill.env"),
        (engine(startupProbe={}), "spec.containers[0].startupProbe", "loadBudgetSeconds"),
        (
            engine(lifecycle={"preStop": {}}),
            "spec.containers[0].lifecycle.preStop",
            "spec.prefill.drain.preStopSeconds",
        ),
        (
            engine(env=[{"name": "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "value": "1"}]),
            "spec.containers[0].env[0].name",
            "a request id that comes again",
        ),
        (
            engine(env=[{"name": "UCX_TLS", "value": "tcp"}]),
            "spec.containers[0].env[0].name",
            "spec.network.ucx.transports",
        ),
        (engine(ports=[{"containerPort": 8000}]), "spec.containers[0].ports[0]", "another port"),
        (
            engine(volumeMounts=[{"name": "v", "mountPath": "/hybridpd/python/"}]),
            "spec.containers[0].volumeMounts[0]",
            "another path",
        ),
        (engine(**{"$patch": "delete"}), "spec.containers[0].$patch", "a patch without it"),
        (
            {"spec": {"initContainers": [{"name": "connector", "image": "a:1"}]}},
            "spec.initContainers[0].image",
            "spec.connector.image",
        ),
        (
            {"spec": {"volumes": [{"name": "hybridpd-connector", "emptyDir": {}}]}},
            "spec.volumes[0]",
            "carries the connector",
        ),
        (
            {"spec": {"volumes": [{"name": "hybridpd-side-channel-key", "emptyDir": {}}]}},
            "spec.volumes[0]",
            "spec.connector.sideChannelKeySecret",
        ),
        (
            engine(volumeMounts=[{"name": "v", "mountPath": "/hybridpd/side-channel"}]),
            "spec.containers[0].volumeMounts[0]",
            "another path",
        ),
        (
            engine(volumeMounts=[{"name": "v", "mountPath": "//hybridpd/side-channel"}]),
            "spec.containers[0].volumeMounts[0]",
            "another path",
        ),
        (
            engine(volumeMounts=[{"name": "v", "mountPath": "/hybridpd/./side-channel/"}]),
            "spec.containers[0].volumeMounts[0]",
            "another path",
        ),
        (
            engine(volumeMounts=[{"name": "v", "mountPath": "/hybridpd/x/../side-channel"}]),
            "spec.containers[0].volumeMounts[0]",
            "another path",
        ),
        ({"spec": {"$patch": "replace"}}, "spec.$patch", "a patch without it"),
        ({"spec": {"hostNetwork": True}}, "spec.hostNetwork", "same ports"),
        ({"spec": {"affinity": {}}}, "spec.affinity", "spec.prefill.affinity"),
        (
            {"spec": {"terminationGracePeriodSeconds": 5}},
            "spec.terminationGracePeriodSeconds",
            "spec.prefill.drain.terminationGracePeriodSeconds",
        ),
        (
            {"metadata": {"labels": {"hybridpd.dev/role": "decode"}}},
            "metadata.labels.hybridpd.dev/role",
            "selectors rely on it",
        ),
        ({"metadata": {"name": "x"}}, "metadata.name", "labels and annotations"),
        ({"status": {}}, "status", "metadata and spec"),
        (engine(env=[{"nam": "A"}]), "spec.containers[0].env[0].nam", "expected"),
    ],
)
def test_a_pod_template_cannot_change_what_is_owned(
    template: dict[str, Any], field: str, instead: str
) -> None:
    found = pod_template_problems(template, "prefill", (8000, 5600))
    messages = [one.message for one in found if one.field == f"spec.prefill.podTemplate.{field}"]
    assert messages
    assert instead in messages[0]


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({"spec": None}, "spec"),
        ({"metadata": "x"}, "metadata"),
        ({"spec": {"containers": None}}, "spec.containers"),
        ({"spec": {"containers": {"name": "engine"}}}, "spec.containers"),
        ({"spec": {"containers": [{"image": "a:1"}]}}, "spec.containers[0].name"),
        ({"spec": {"volumes": [None]}}, "spec.volumes[0]"),
        (engine(env=[{"name": ["A"]}]), "spec.containers[0].env[0].name"),
        (engine(volumeMounts=[{"name": "v"}]), "spec.containers[0].volumeMounts[0].mountPath"),
    ],
)
def test_a_pod_template_that_cannot_be_merged_is_refused(
    template: dict[str, Any], field: str
) -> None:
    found = pod_template_problems(template, "decode")
    assert f"spec.decode.podTemplate.{field}" in [one.field for one in found]


def test_a_pod_template_may_add_and_tune() -> None:
    template = {
        "metadata": {"annotations": {"a": "b"}, "labels": {"team": "x"}},
        "spec": {
            "priorityClassName": "high",
            "containers": [
                {
                    "name": "engine",
                    "env": [{"name": "PYTHONPATH", "value": "/mine"}],
                    "readinessProbe": {"timeoutSeconds": 20},
                    "ports": [{"containerPort": 9000}],
                    "volumeMounts": [{"name": "mine", "mountPath": "/mine"}],
                },
                {"name": "sidecar", "image": "example/sidecar:1", "args": ["x"]},
            ],
            "volumes": [{"name": "mine", "emptyDir": {}}],
        },
    }
    assert pod_template_problems(template, "decode", (8000, 5600)) == ()


def test_the_routers_template_has_its_own_container() -> None:
    template = {"spec": {"containers": [{"name": "router", "args": []}, {"name": "engine"}]}}
    (problem,) = pod_template_problems(template, "router")
    assert problem.field == "spec.router.podTemplate.spec.containers[0].args"
    grace = {"spec": {"terminationGracePeriodSeconds": 5}}
    assert pod_template_problems(grace, "router") == ()
