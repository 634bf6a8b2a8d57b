"""A pair that cannot exchange state starts nothing, and says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import waits
from kubectl import Kubectl, Object
from services import example

WORKLOADS = "statefulsets,deployments,pods"


def test_incompatible_tensor_parallel_sizes_start_no_pod(
    kubectl: Kubectl, unscheduled: Callable[..., Object]
) -> None:
    """The model has 2 KV heads and 8 state heads in 2 groups: 3 divides none of them."""
    name = "incompatible"
    unscheduled(name, decode={"tensorParallelSize": 3})
    service = waits.for_condition(kubectl, name, "Compatible", "False")
    verdict = waits.condition(service, "Compatible")
    assert "decode" in verdict["message"]
    assert "3" in verdict["message"]
    assert waits.condition(service, "Ready")["status"] == "False"
    assert kubectl.find(WORKLOADS, waits.selector_of(name)) == []


def test_a_corrected_service_starts(kubectl: Kubectl, unscheduled: Callable[..., Object]) -> None:
    name = "corrected"
    unscheduled(name, decode={"tensorParallelSize": 3})
    waits.for_condition(kubectl, name, "Compatible", "False")
    kubectl.merge("hpd", name, {"spec": {"decode": {"tensorParallelSize": 2}}})
    waits.for_condition(kubectl, name, "Compatible", "True")
    waits.for_children(kubectl, name)


def test_a_running_service_that_turns_incompatible_says_so(
    kubectl: Kubectl, unscheduled: Callable[..., Object]
) -> None:
    name = "turned"
    unscheduled(name)
    waits.for_children(kubectl, name)
    kubectl.merge("hpd", name, {"spec": {"decode": {"tensorParallelSize": 3}}})
    service = waits.for_condition(kubectl, name, "Compatible", "False")
    assert waits.condition(service, "Ready")["status"] == "False"
    sizes = {
        sts["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        for sts in kubectl.find("statefulsets", waits.selector_of(name))
    }
    assert "3" not in sizes


def test_a_model_without_facts_is_unknown_and_started(
    kubectl: Kubectl, unscheduled: Callable[..., Object]
) -> None:
    name = "no-facts"
    unscheduled(name, model={"config": None})
    service = waits.for_condition(kubectl, name, "Compatible", "Unknown")
    assert waits.condition(service, "Compatible")["reason"] == "NoFacts"
    waits.for_children(kubectl, name)

    def warned() -> tuple[bool, list[str]]:
        events = kubectl.find("events")
        about = [e for e in events if e["involvedObject"]["name"] == name]
        return any(e["type"] == "Warning" for e in about), [e["reason"] for e in about]

    waits.until(f"{name}: a warning event", warned, waits.OPERATOR_SECONDS)


@pytest.mark.parametrize(
    "template",
    [
        {"spec": {"hostNetwork": True}},
        {"spec": {"containers": [{"name": "engine", "image": "example/other:v1"}]}},
        {"metadata": {"labels": {"hybridpd.dev/revision": "mine"}}},
    ],
    ids=["hostNetwork", "engine image", "revision label"],
)
def test_what_the_operator_owns_cannot_be_patched(
    kubectl: Kubectl, unscheduled: Callable[..., Object], template: Object
) -> None:
    """The definition cannot look into podTemplate; the operator can, and starts nothing."""
    name = "owned"
    unscheduled(name, prefill={"podTemplate": template})
    service = waits.for_condition(kubectl, name, "Accepted", "False")
    assert "prefill.podTemplate" in waits.condition(service, "Accepted")["message"]
    assert kubectl.find(WORKLOADS, waits.selector_of(name)) == []


def test_the_documented_example_is_accepted_by_a_dry_run(kubectl: Kubectl) -> None:
    assert "(server dry run)" in kubectl.apply(example(), "--dry-run=server")
