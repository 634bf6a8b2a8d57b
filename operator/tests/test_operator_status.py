"""Status and events as values: what a person and kstatus read from one pass."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_world import IMAGES, World, resource

from hybridpd_operator import names, status, transitions
from hybridpd_operator.assessment import Assessment
from hybridpd_operator.kinds import Manifest
from hybridpd_operator.observed import Observed, pod_from
from hybridpd_operator.plan import make_plan
from hybridpd_operator.status import Pass, Stall, build
from hybridpd_operator.validate import assess

NOW = "2026-01-01T00:00:00Z"
CRD = Path(__file__).parents[2] / "crds" / "hybridpd.dev_hybridpdservices.yaml"


def one_pass(
    patch: dict[str, Any] | None = None,
    before: Manifest | None = None,
    *,
    stall: Stall | None = None,
    now: str = NOW,
) -> Pass:
    observed = Observed({**resource(patch), "status": before or {}})
    assessment = assess(observed.resource, None, "")
    plan = None
    if assessment.service:
        plan = make_plan(assessment.service, observed, IMAGES, may_start=assessment.may_start)
    return Pass(observed, assessment, plan, None, stall, now)


def conditions(built: Manifest) -> dict[str, tuple[str, str]]:
    return {one["type"]: (one["status"], one["reason"]) for one in built["conditions"]}


def test_conditions_are_always_all_there_in_one_order() -> None:
    for patch in (None, {"prefill": {"tensorParallelSize": 3}}, {"model": {"id": "a/b"}}):
        assert [one["type"] for one in build(one_pass(patch))["conditions"]] == list(status.TYPES)


def test_an_unreadable_resource_still_says_what_it_can() -> None:
    found = conditions(build(one_pass({"prefill": {"replicas": "x"}})))
    assert found["Accepted"][0] == "False"
    assert found["Ready"][0] == "False"
    assert found["Stalled"][0] == "True"
    assert found["Reconciling"][0] == "False"
    assert "PrefillReady" not in found


def test_an_equal_pass_gives_an_equal_status() -> None:
    first = build(one_pass())
    second = build(one_pass(before=first, now="2026-02-02T00:00:00Z"))
    assert second == first


def test_a_service_without_a_side_channel_key_is_accepted_and_told_so() -> None:
    def accepted(patch: dict[str, Any] | None) -> Manifest:
        (one,) = (one for one in build(one_pass(patch))["conditions"] if one["type"] == "Accepted")
        return one

    without = accepted(None)
    with_key = accepted({"connector": {"sideChannelKeySecret": {"name": "pair-key"}}})
    assert without["status"] == with_key["status"] == "True"
    assert without["reason"] == with_key["reason"] == "Valid"
    assert "spec.connector.sideChannelKeySecret" in without["message"]
    assert "side channel" not in with_key["message"]


def test_reconciling_and_stalled_are_never_both_true() -> None:
    stalled = build(one_pass(stall=Stall("NameConflict", "Service demo exists")))
    assert conditions(stalled)["Stalled"] == ("True", "NameConflict")
    assert conditions(stalled)["Reconciling"][0] == "False"
    assert conditions(stalled)["Ready"] == ("False", "NameConflict")
    starting = build(one_pass())
    assert conditions(starting)["Stalled"][0] == "False"
    assert conditions(starting)["Reconciling"] == ("True", "Starting")


def test_messages_and_problems_are_bounded() -> None:
    many = [{"name": f"VLLM_{n}", "value": "x"} for n in range(64)]
    bad = [
        {**entry, "name": "UCX_TLS" if n == 0 else entry["name"]} for n, entry in enumerate(many)
    ]
    flags = [f"--tensor-parallel-size={n}" for n in range(60)]
    patch = {"engine": {"env": bad, "extraArgs": flags}, "decode": {"extraArgs": flags}}
    built = build(one_pass(patch))
    assert len(built["problems"]) <= 64
    (accepted,) = (one for one in built["conditions"] if one["type"] == "Accepted")
    assert accepted["status"] == "False"
    assert len(accepted["message"]) <= 4096
    assert "more" in accepted["message"]


def test_everything_we_write_is_in_the_definition(world: World) -> None:
    """A field the schema does not know would be pruned, and so be written again for ever."""
    schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    statuses = [
        build(one_pass()),
        build(one_pass({"prefill": {"tensorParallelSize": 3}})),
        build(one_pass({"prefill": {"replicas": "x"}})),
    ]
    world.create()
    world.settle()
    statuses.append(world.status)
    for built in statuses:
        assert list(_outside(built, schema["properties"]["status"])) == []


def _outside(value: Any, schema: dict[str, Any], path: str = "status") -> list[str]:
    """Paths of ``value`` that a structural schema prunes or refuses."""
    if isinstance(value, dict):
        known = schema.get("properties", {})
        missing = [
            f"{path}.{key} is required" for key in schema.get("required", ()) if key not in value
        ]
        return missing + [
            found
            for key, item in value.items()
            for found in (
                _outside(item, known[key], f"{path}.{key}") if key in known else [f"{path}.{key}"]
            )
        ]
    if isinstance(value, list):
        return [
            found
            for index, item in enumerate(value)
            for found in _outside(item, schema["items"], f"{path}[{index}]")
        ]
    kinds = {"string": str, "integer": int}
    right = isinstance(value, kinds[schema["type"]])
    allowed = value in schema.get("enum", (value,))
    return [] if right and allowed else [f"{path}={value!r}"]


@pytest.mark.parametrize(
    ("pod_status", "trouble"),
    [
        ({}, ""),
        (
            {
                "containerStatuses": [
                    {"name": "engine", "state": {"waiting": {"reason": "PodInitializing"}}}
                ]
            },
            "",
        ),
        (
            {
                "initContainerStatuses": [
                    {"name": "connector", "state": {"waiting": {"reason": "ErrImagePull"}}}
                ]
            },
            "ErrImagePull in container connector",
        ),
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes",
                    }
                ]
            },
            "Unschedulable: 0/3 nodes",
        ),
    ],
)
def test_trouble_of_a_pod_is_read_from_its_status(pod_status: Manifest, trouble: str) -> None:
    assert pod_from({"metadata": {"name": "p"}, "status": pod_status}).trouble == trouble


def test_events_tell_transitions_once() -> None:
    first = build(one_pass({"model": {"id": "a/b"}}))
    told = [notice.reason for notice in transitions.notices({}, first)]
    assert told == ["NoFacts", "Starting"]
    assert transitions.notices(first, first) == ()


def test_an_event_carries_what_kubectl_describe_needs() -> None:
    (first, *_) = transitions.notices({}, build(one_pass({"prefill": {"tensorParallelSize": 3}})))
    event = transitions.event(first, resource(), NOW)
    assert event["type"] == "Warning"
    assert event["involvedObject"]["uid"] == "uid-demo"
    assert event["involvedObject"]["kind"] == names.KIND
    assert event["metadata"]["generateName"].startswith("demo.")
    assert len(event["message"]) <= 1024


def test_losing_ready_is_a_warning_and_winning_it_is_not() -> None:
    def ready(value: str, reason: str) -> Manifest:
        return {
            "conditions": [{"type": "Ready", "status": value, "reason": reason, "message": "m"}]
        }

    (won,) = transitions.notices(ready("False", "Starting"), ready("True", "Ready"))
    (lost,) = transitions.notices(ready("True", "Ready"), ready("False", "CrashLoopBackOff"))
    assert (won.kind, won.reason) == ("Normal", "Ready")
    assert (lost.kind, lost.reason) == ("Warning", "CrashLoopBackOff")
    assert transitions.notices(ready("False", "A"), ready("False", "B")) == ()


def test_an_assessment_without_facts_may_start_and_is_unknown() -> None:
    service = assess(resource(), None, "").service
    unknown = Assessment(service, has_facts=False)
    assert unknown.may_start
    assert unknown.compatible is None
    assert not Assessment(None).may_start
