"""What makes a new revision: every field of the spec is decided once, and edits follow that."""

import dataclasses
from typing import Any

import pytest
from operator_world import resource

from hybridpd_operator import names, revision
from hybridpd_operator.revision import ENTERS, STAYS_OUT, leaf_paths, revision_of
from hybridpd_operator.spec import Spec, parse_service


def spec_of(patch: dict[str, Any] | None = None) -> Spec:
    return parse_service(resource(patch)).spec


def decided_by(path: str) -> list[str]:
    listed = (*ENTERS, *STAYS_OUT)
    return [entry for entry in listed if path == entry or path.startswith(f"{entry}.")]


def test_every_field_is_decided_exactly_once() -> None:
    paths = list(leaf_paths(spec_of()))
    assert paths
    undecided = {path: decided_by(path) for path in paths if len(decided_by(path)) != 1}
    assert undecided == {}


def test_no_entry_names_a_field_that_does_not_exist() -> None:
    for entry in (*ENTERS, *STAYS_OUT):
        value: Any = spec_of()
        for name in entry.split("."):
            assert name in {field.name for field in dataclasses.fields(value)}, entry
            value = getattr(value, name)


def test_fields_that_stay_out_have_a_reason() -> None:
    assert all(len(reason) > 10 for reason in STAYS_OUT.values())


@pytest.mark.parametrize(
    "patch",
    [
        {"prefill": {"replicas": 4}},
        {"decode": {"disruptionBudget": {"maxUnavailable": 2}}},
        {"router": {"replicas": 3, "policy": "Random", "extraArgs": ["--queue-size", "9"]}},
        {"model": {"config": {"configMap": {"name": "facts"}}}},
        {"engine": {"imagePullPolicy": "Always"}},
        {"imagePullSecrets": [{"name": "s"}]},
    ],
)
def test_edits_that_keep_the_pair(patch: dict[str, Any]) -> None:
    assert revision_of(spec_of(patch)) == revision_of(spec_of())


@pytest.mark.parametrize(
    "patch",
    [
        {"connector": {"sideChannelKeySecret": {"name": "a"}}},
        {"prefill": {"tensorParallelSize": 4}},
        {"decode": {"resources": {"limits": {"memory": "1Gi"}}}},
        {"prefill": {"podTemplate": {"spec": {"priorityClassName": "p"}}}},
        {"engine": {"image": "vllm/vllm-openai:v0.33.0"}},
        {"engine": {"extraArgs": ["--enforce-eager"]}},
        {"connector": {"leaseSeconds": 60}},
        {"connector": {"checksum": "Off"}},
        {"connector": {"requireFastLink": True}},
        {"connector": {"image": "hybridpd/connector:2"}},
        {"network": {"ucx": {"netDevices": ["mlx5_0:1"]}}},
        {"model": {"maxModelLen": 4096}},
    ],
)
def test_edits_that_replace_the_pair(patch: dict[str, Any]) -> None:
    assert revision_of(spec_of(patch)) != revision_of(spec_of())


def test_a_default_written_out_is_the_same_revision() -> None:
    written = {"connector": {"leaseSeconds": 30}, "prefill": {"replicas": 1}}
    assert revision_of(spec_of(written)) == revision_of(spec_of())


def test_a_revision_is_a_label_value_of_fixed_length() -> None:
    value = revision_of(spec_of())
    assert len(value) == names.REVISION_DIGITS
    assert set(value) <= set("0123456789abcdef")


def test_a_new_rendering_is_a_new_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    before = revision_of(spec_of())
    monkeypatch.setattr(revision, "RENDERING", revision.RENDERING + 1)
    assert revision_of(spec_of()) != before


def test_the_value_does_not_change_between_releases() -> None:
    """A changed value would replace every running pair when the operator is upgraded.

    A new field of the spec changes it too: give it a place in ENTERS only with that in mind.
    """
    assert revision_of(spec_of()) == "3538c7d3"


def test_another_key_secret_is_another_pair_and_a_default_key_is_not() -> None:
    def of(**secret: str) -> str:
        return revision_of(spec_of({"connector": {"sideChannelKeySecret": secret}}))

    assert len({of(name="a"), of(name="b"), of(name="a", key="other"), revision_of(spec_of())}) == 4
    assert of(name="a") == of(name="a", key="key")
