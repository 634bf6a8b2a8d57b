"""Whole passes over a cluster in memory: (resource, cluster before) -> (cluster after, status).

Left out: what only a real API server does (defaults, field owners of every list); the end-to-end
tests run the same transitions there.
"""

import json

import pytest
from operator_world import KEY, World

from hybridpd_operator import catalogue, kinds, names
from hybridpd_operator.cluster_api import ClusterError
from hybridpd_operator.observed import EngineSample
from hybridpd_operator.settings import Images

TP_1_TO_3 = {"prefill": {"tensorParallelSize": 1}, "decode": {"tensorParallelSize": 3}}


def test_a_new_service_gets_every_child_and_becomes_ready(world: World) -> None:
    world.create()
    world.settle()
    revision = world.revision_now()
    cluster = world.cluster
    assert cluster.names_of(kinds.STATEFULSET) == [
        f"demo-decode-{revision}",
        f"demo-prefill-{revision}",
    ]
    assert cluster.names_of(kinds.DEPLOYMENT) == [f"demo-router-{revision}"]
    assert cluster.names_of(kinds.SERVICE) == [
        "demo",
        f"demo-decode-{revision}",
        f"demo-prefill-{revision}",
    ]
    assert cluster.names_of(kinds.SERVICE_ACCOUNT) == ["demo-engine", "demo-router"]
    assert cluster.names_of(kinds.ROLE) == cluster.names_of(kinds.ROLE_BINDING) == ["demo-router"]
    assert cluster.names_of(kinds.DISRUPTION_BUDGET) == [
        "demo-decode",
        "demo-prefill",
        "demo-router",
    ]
    for kind in ("Ready", "Accepted", "Compatible", "PrefillReady", "DecodeReady", "RouterReady"):
        assert world.condition(kind)[0] == "True", kind
    assert world.condition("Reconciling")[0] == world.condition("Stalled")[0] == "False"
    assert world.condition("KVTransferVerified") == ("Unknown", "NoTraffic")
    assert world.status["revision"] == revision
    assert world.status["observedGeneration"] == 1
    assert world.status["endpoint"] == "http://demo.default.svc:8000"
    assert world.status["prefill"]["ready"] == "1/1"


def test_every_child_is_owned_and_none_has_a_finalizer(world: World) -> None:
    world.create()
    world.settle()
    for (kind, _, _), one in world.cluster.objects.items():
        if kind in (names.KIND, "Pod"):
            continue
        (owner,) = one["metadata"]["ownerReferences"]
        assert owner["uid"] == "uid-demo"
        assert owner["controller"] is owner["blockOwnerDeletion"] is True
        assert "finalizers" not in one["metadata"]
        assert one["metadata"]["labels"][names.LABEL_SERVICE] == "demo"
    assert "finalizers" not in world.service["metadata"]


def test_a_settled_service_costs_no_write(world: World) -> None:
    world.create()
    world.settle()
    world.cluster.taken_writes()
    events = list(world.cluster.events)
    for _ in range(5):
        world.run()
    assert world.cluster.taken_writes() == []
    assert world.cluster.events == events


@pytest.mark.parametrize("failing_write", range(14))
def test_a_write_that_fails_is_made_up_for(world: World, failing_write: int) -> None:
    world.create()
    count = iter(range(1000))

    def fail(verb: str, kind: str, name: str) -> ClusterError | None:
        if verb in ("apply", "delete") and next(count) == failing_write:
            return ClusterError(f"{verb} {kind} {name}", 500, "leader changed")
        return None

    world.cluster.fail = fail
    for _ in range(3):
        try:
            world.run()
        except ClusterError:
            continue
    world.settle()
    assert world.condition("Ready")[0] == "True"


def test_a_server_that_keeps_failing_is_told_and_settles(world: World) -> None:
    """A webhook that is down: the answers differ in detail, the status is written once."""
    world.create()
    serial = iter(range(1000))

    def fail(verb: str, kind: str, name: str) -> ClusterError | None:
        if verb == "apply" and kind == "StatefulSet":
            return ClusterError(f"PATCH {name}", 500, f"webhook is down, request {next(serial)}")
        return None

    world.cluster.fail = fail
    for _ in range(4):
        with pytest.raises(ClusterError, match="webhook is down"):
            world.run()
    assert world.condition("Reconciling") == ("True", "Retrying")
    assert "webhook is down, request 0" in world.message("Reconciling")
    assert world.condition("Ready")[0] == "False"
    assert [what for _, what, _ in world.cluster.taken_writes()].count("status") == 1
    world.cluster.fail = lambda verb, kind, name: None
    world.settle()
    assert world.condition("Ready")[0] == "True"


def test_an_incompatible_pair_starts_nothing_and_says_why(world: World) -> None:
    world.create(TP_1_TO_3)
    world.settle()
    assert world.cluster.names_of(kinds.STATEFULSET) == []
    assert world.cluster.names_of(kinds.SERVICE_ACCOUNT) == []
    assert world.condition("Compatible")[0] == "False"
    assert world.condition("Stalled")[0] == "True"
    assert world.condition("Reconciling")[0] == "False"
    assert world.condition("Ready") == ("False", world.condition("Compatible")[1])
    assert world.status["problems"]
    assert "revision" not in world.status


def test_an_unknown_model_starts_with_one_warning(world: World) -> None:
    world.create({"model": {"id": "somebody/unheard-of"}})
    world.settle()
    assert world.condition("Compatible") == ("Unknown", "NoFacts")
    assert world.condition("Ready")[0] == "True"
    assert world.event_reasons().count("NoFacts") == 1
    world.restart_operator()
    world.settle()
    assert world.event_reasons().count("NoFacts") == 1


def test_a_named_config_map_has_to_be_there(world: World) -> None:
    named = {"model": {"id": "a/b", "config": {"configMap": {"name": "facts"}}}}
    world.create(named)
    again = world.run()
    assert world.condition("Compatible") == ("False", "BadModelConfig")
    assert "facts" in world.message("Compatible")
    assert world.cluster.names_of(kinds.STATEFULSET) == []
    assert again is not None, "ConfigMaps are not watched"


def test_a_config_map_that_was_missing_starts_the_pair_once_it_is_there(world: World) -> None:
    world.create({"model": {"id": "a/b", "config": {"configMap": {"name": "facts"}}}})
    world.run()
    config = catalogue.config_of("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    facts = {"config.json": json.dumps(config)}
    world.cluster.put(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "facts"}, "data": facts}
    )
    world.settle()
    assert world.condition("Ready")[0] == "True"


def test_a_config_map_nested_without_end_is_a_condition(world: World) -> None:
    world.create({"model": {"id": "a/b", "config": {"configMap": {"name": "facts"}}}})
    facts = {"config.json": "[" * 100_000}
    world.cluster.put(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "facts"}, "data": facts}
    )
    world.run()
    assert world.condition("Compatible") == ("False", "BadModelConfig")


def test_a_spec_the_schema_would_refuse_is_a_condition_not_a_crash(world: World) -> None:
    world.create({"prefill": {"replicas": "many"}})
    world.settle()
    assert world.condition("Accepted")[0] == "False"
    assert "spec.prefill.replicas" in world.message("Accepted")
    assert world.cluster.names_of(kinds.STATEFULSET) == []


def test_a_service_being_deleted_is_not_written_to(world: World) -> None:
    world.create()
    world.settle()
    world.service["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.edit({"prefill": {"replicas": 5}})
    world.cluster.taken_writes()
    assert world.run() is None
    assert world.cluster.taken_writes() == []


def test_a_service_that_is_gone_is_no_error(world: World) -> None:
    assert world.run() is None
    assert world.cluster.taken_writes() == []


def test_deleting_a_service_leaves_nothing(world: World) -> None:
    world.create()
    world.settle()
    world.cluster.remove(kinds.HYBRIDPD_SERVICE, *KEY)
    world.cluster.finish_pods()
    world.run()
    assert world.cluster.objects == {}


def test_traffic_verifies_the_transfer_and_then_costs_no_writes(world: World) -> None:
    world.create()
    world.settle()
    world.scraper.decode = EngineSample(
        "", names.DECODE, loads=3, read_bytes=3000, predicted_bytes=3000
    )
    world.settle()
    assert world.condition("KVTransferVerified") == ("True", "Transferred")
    assert world.status["transfer"]["readBytes"] == 3000
    assert world.event_reasons().count("KVTransferVerified") == 1
    world.cluster.taken_writes()
    world.run()
    assert world.cluster.taken_writes() == []


def test_failed_loads_are_told_and_do_not_gate_ready(world: World) -> None:
    world.create()
    world.settle()
    world.scraper.decode = EngineSample(
        "", names.DECODE, loads=3, load_failures=1, failures_by_reason=(("lease_expired", 1),)
    )
    world.settle()
    assert world.condition("KVTransferVerified") == ("False", "LoadsFailed")
    assert "lease_expired: 1" in world.message("KVTransferVerified")
    assert world.condition("Ready")[0] == "True"


def test_an_engine_away_for_a_pass_brings_no_new_failures_back(world: World) -> None:
    world.create({"prefill": {"replicas": 2}})
    world.settle()
    for loads in (1, 100):
        world.scraper.decode = EngineSample("", names.DECODE, loads=loads, load_failures=5)
        world.run()
    assert world.condition("KVTransferVerified")[0] == "True"
    pod = world.child(kinds.POD, f"demo-decode-{world.status['revision']}-0")
    for ready in ("False", "True"):
        pod["status"]["conditions"] = [{"type": "Ready", "status": ready}]
        world.run()
        world.run()
        assert world.condition("KVTransferVerified")[0] == "True"


def test_engines_are_not_asked_on_every_pass(world: World) -> None:
    world.create()
    world.settle()
    fixed = world.reconciler.clock()
    world.reconciler.clock = lambda: fixed
    world.run()
    asked = world.scraper.asked
    for _ in range(5):
        world.run()
    assert world.scraper.asked == asked


def test_the_time_of_a_condition_moves_only_with_its_status(world: World) -> None:
    world.create()
    world.settle()
    before = {one["type"]: one["lastTransitionTime"] for one in world.status["conditions"]}
    world.edit({"prefill": {"replicas": 2}})
    world.run()
    after = {one["type"]: one["lastTransitionTime"] for one in world.status["conditions"]}
    assert {kind for kind in before if before[kind] != after[kind]} == {
        "PrefillReady",
        "Ready",
        "Reconciling",
    }


def test_scaled_to_zero_is_settled_and_not_ready(world: World) -> None:
    world.create({"prefill": {"replicas": 0}, "decode": {"replicas": 0}})
    world.settle(ready=False)  # a router without engines is not ready
    assert world.condition("Ready") == ("False", "ScaledToZero")
    assert world.condition("Reconciling") == ("False", "Settled")
    assert world.condition("PrefillReady") == ("False", "ScaledToZero")


def test_no_engine_image_anywhere_is_said_before_anything_starts(world: World) -> None:
    world.create({"engine": {"image": None, "vllmVersion": "0.32.0"}})
    world.settle()
    assert world.condition("Accepted")[0] == "False"
    assert "spec.engine.image" in world.message("Accepted")
    assert world.cluster.names_of(kinds.STATEFULSET) == []
    world.restart_operator(Images(connector="c:1", router="r:1", engine="e:1"))
    world.settle()
    assert world.condition("Ready")[0] == "True"


def test_a_page_that_no_machine_has_is_refused(world: World) -> None:
    draft = ["--speculative-config", '{"num_speculative_tokens": 100000000000}']
    world.create({"engine": {"extraArgs": draft}})
    world.run()
    assert world.condition("Compatible") == ("False", "ImpossibleEngine")
    assert "decode" not in world.status["geometry"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--num-gpu-blocks-override", "9" * 30],
        ["--speculative-config", '{"num_speculative_tokens": ' + "9" * 30 + "}"],
    ],
)
def test_a_number_that_fits_no_status_is_refused(world: World, arguments: list[str]) -> None:
    world.create({"decode": {"extraArgs": arguments}})
    world.run()
    assert world.condition("Accepted")[0] == "False"
    assert "kvBlocks" not in world.status["geometry"]["decode"]
