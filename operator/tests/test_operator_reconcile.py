"""Whole passes over a cluster in memory: (resource, cluster before) -> (cluster after, status).

Left out: what only a real API server does (defaults, field owners of every list); the end-to-end
tests run the same transitions there.
"""

import pytest
from operator_fake_cluster import FakeCluster
from operator_world import IMAGES, KEY, World, resource

from hybridpd_operator import kinds, names
from hybridpd_operator.cluster_api import ClusterError, RefusedError
from hybridpd_operator.observed import EngineSample
from hybridpd_operator.settings import Images

TP_1_TO_3 = {"prefill": {"tensorParallelSize": 1}, "decode": {"tensorParallelSize": 3}}


def revisions_behind(world: World) -> set[str]:
    """Revisions of every workload and pod that exist."""
    return {
        one["metadata"]["labels"][names.LABEL_REVISION]
        for (kind, _, _), one in world.cluster.objects.items()
        if kind in ("StatefulSet", "Deployment", "Pod")
    }


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


def test_replicas_touch_one_statefulset_only(world: World) -> None:
    world.create()
    world.settle()
    revision = world.status["revision"]
    world.edit({"prefill": {"replicas": 3}})
    world.cluster.taken_writes()
    world.run()
    writes = world.cluster.taken_writes()
    assert ("apply", "StatefulSet", f"demo-prefill-{revision}") in writes
    assert {what for _, what, _ in writes} == {"StatefulSet", "status"}
    world.settle()
    assert world.status["revision"] == revision
    assert world.status["prefill"]["ready"] == "3/3"


def test_an_engine_flag_recreates_and_no_two_revisions_ever_meet(world: World) -> None:
    world.create()
    world.settle()
    old = world.status["revision"]
    world.edit({"engine": {"extraArgs": ["--max-num-seqs", "16"]}})
    new = world.revision_now()
    assert new != old
    phases = []
    for _ in range(12):
        world.run()
        assert len(revisions_behind(world)) <= 1
        (service,) = (
            one
            for (kind, _, name), one in world.cluster.objects.items()
            if kind == "Service" and name == "demo"
        )
        assert service["spec"]["selector"][names.LABEL_REVISION] in (old, new)
        phases.append(world.condition("Reconciling")[1])
        world.cluster.finish_pods()
        world.cluster.run_workloads()
    order = list(dict.fromkeys(phases))
    assert order == ["StoppingOldRouter", "StoppingOldEngines", "Starting", "Settled"]
    assert revisions_behind(world) == {new}
    assert world.status["revision"] == new
    assert world.condition("Ready")[0] == "True"


def test_engines_stay_while_the_old_router_ends(world: World) -> None:
    world.create()
    world.settle()
    old = world.status["revision"]
    world.edit({"engine": {"extraArgs": ["--max-num-seqs", "16"]}})
    world.run()
    world.run()
    assert world.cluster.names_of(kinds.DEPLOYMENT) == []
    assert f"demo-prefill-{old}" in world.cluster.names_of(kinds.STATEFULSET)
    assert world.condition("Ready") == ("False", "StoppingOldRouter")
    world.cluster.finish_pods()
    world.run()
    assert world.cluster.names_of(kinds.STATEFULSET) == []
    world.run()
    assert world.cluster.names_of(kinds.STATEFULSET) == [], "pods are still terminating"


def test_an_edit_taken_back_half_way_keeps_what_is_left(world: World) -> None:
    world.create()
    world.settle()
    old = world.status["revision"]
    world.edit({"engine": {"extraArgs": ["--max-num-seqs", "16"]}})
    world.run()
    world.edit({"engine": {"extraArgs": []}})
    world.settle()
    assert world.status["revision"] == old
    assert world.condition("Ready")[0] == "True"


@pytest.mark.parametrize("passes_before", range(1, 7))
def test_an_operator_restarted_half_way_converges(world: World, passes_before: int) -> None:
    world.create()
    world.settle()
    world.edit({"engine": {"extraArgs": ["--max-num-seqs", "16"]}})
    for _ in range(passes_before):
        world.run()
        world.cluster.finish_pods()
        world.cluster.run_workloads()
    world.restart_operator()
    world.settle()
    assert world.status["revision"] == world.revision_now()
    assert world.condition("Ready")[0] == "True"


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


def test_an_edit_that_cannot_work_leaves_the_running_pair_alone(world: World) -> None:
    world.create()
    world.settle()
    old = world.status["revision"]
    world.edit(TP_1_TO_3)
    world.cluster.taken_writes()
    world.settle()
    assert revisions_behind(world) == {old}
    assert world.status["revision"] == old
    assert world.condition("Ready")[0] == "False"
    assert old in world.message("Ready")
    assert all(what == "status" for _, what, _ in world.cluster.taken_writes())


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


def test_a_foreign_change_to_our_field_is_reverted(world: World) -> None:
    world.create()
    world.settle()
    name = f"demo-prefill-{world.status['revision']}"
    world.cluster.edit(kinds.STATEFULSET, "default", name, ("spec", "replicas"), 7)
    world.cluster.taken_writes()
    world.run()
    assert world.cluster.taken_writes() == [("apply", "StatefulSet", name)]
    assert world.child(kinds.STATEFULSET, name)["spec"]["replicas"] == 1
    assert world.metrics.value("hybridpd_operator_reverts_total") == 1
    world.settle()


def test_a_foreign_environment_variable_is_reverted(world: World) -> None:
    world.create()
    world.settle()
    name = f"demo-decode-{world.status['revision']}"
    container = ("spec", "template", "spec", "containers", 0, "env", 0, "value")
    world.cluster.edit(kinds.STATEFULSET, "default", name, container, "elsewhere")
    world.cluster.taken_writes()
    world.run()
    assert world.cluster.taken_writes() == [("apply", "StatefulSet", name)]


def test_what_others_add_is_left_alone(world: World) -> None:
    world.create()
    world.settle()
    path = ("metadata", "annotations", "example.com/note")
    world.cluster.edit(kinds.SERVICE, "default", "demo", path, "theirs")
    world.cluster.taken_writes()
    world.run()
    assert world.cluster.taken_writes() == []


def test_a_deleted_child_comes_back(world: World) -> None:
    world.create()
    world.settle()
    world.cluster.remove(kinds.SERVICE, "default", "demo")
    world.cluster.taken_writes()
    world.settle()
    assert "demo" in world.cluster.names_of(kinds.SERVICE)


def test_a_child_that_lost_its_labels_gets_them_back(world: World) -> None:
    world.create()
    world.settle()
    world.cluster.edit(kinds.SERVICE, "default", "demo", ("metadata", "labels"), {})
    world.settle()
    labels = world.child(kinds.SERVICE, "demo")["metadata"]["labels"]
    assert labels[names.LABEL_SERVICE] == "demo"


def test_a_router_no_longer_wanted_is_pruned(world: World) -> None:
    world.create()
    world.settle()
    world.edit({"router": {"kind": "None"}})
    world.settle()
    assert world.cluster.names_of(kinds.DEPLOYMENT) == []
    assert world.cluster.names_of(kinds.ROLE) == []
    assert "demo" not in world.cluster.names_of(kinds.SERVICE)
    assert world.condition("RouterReady") == ("True", "NotRendered")
    assert world.condition("Ready")[0] == "True"
    assert "endpoint" not in world.status


def test_a_service_of_somebody_else_is_not_taken_over(world: World) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "demo", "namespace": "default"},
        "spec": {"selector": {"app": "shop"}},
    }
    world.cluster.put(theirs)
    world.create()
    world.settle()
    assert world.child(kinds.SERVICE, "demo")["spec"] == {"selector": {"app": "shop"}}
    assert world.condition("Stalled") == ("True", "NameConflict")
    assert "Service demo" in world.message("Stalled")


def test_what_another_service_left_behind_is_not_adopted(world: World) -> None:
    labels = {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_SERVICE: "another"}
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "demo", "namespace": "default", "labels": labels},
    }
    world.cluster.put(theirs)
    world.create()
    world.settle()
    assert world.condition("Stalled") == ("True", "NameConflict")


def test_children_of_a_deleted_namesake_are_waited_for(world: World) -> None:
    world.create(uid="uid-before")
    world.settle()
    del world.cluster.objects[(names.KIND, *KEY)]
    world.create(uid="uid-after")
    world.cluster.taken_writes()
    again = world.run()
    kinds_written = {what for _, what, _ in world.cluster.taken_writes()}
    assert kinds_written == {"status"}
    assert again == 2.0


def test_children_left_by_an_orphaning_delete_are_adopted(world: World) -> None:
    world.create(uid="uid-before")
    world.settle()
    del world.cluster.objects[(names.KIND, *KEY)]
    for one in world.cluster.objects.values():
        one["metadata"].pop("ownerReferences", None)
    world.create(uid="uid-after")
    world.settle()
    assert world.condition("Ready")[0] == "True"
    (owner,) = world.child(kinds.SERVICE, "demo")["metadata"]["ownerReferences"]
    assert owner["uid"] == "uid-after"


def test_an_object_the_server_refuses_stalls_and_the_rest_is_applied(world: World) -> None:
    world.create()

    def refuse(verb: str, kind: str, name: str) -> RefusedError | None:
        if verb == "apply" and kind == "PodDisruptionBudget" and name == "demo-decode":
            return RefusedError("PATCH", 422, "quota says no")
        return None

    world.cluster.fail = refuse
    world.settle()
    assert world.condition("Stalled") == ("True", "ApplyRefused")
    assert "quota says no" in world.message("Stalled")
    assert len(world.cluster.names_of(kinds.STATEFULSET)) == 2


def test_a_new_default_image_waits_for_the_next_revision(world: World) -> None:
    world.create()
    world.settle()
    newer = Images(connector="hybridpd/connector:2", router=IMAGES.router)
    world.restart_operator(newer)
    world.cluster.taken_writes()
    world.settle()
    assert world.cluster.taken_writes() == []
    world.edit({"engine": {"extraArgs": ["--max-num-seqs", "16"]}})
    world.settle()
    name = f"demo-decode-{world.status['revision']}"
    (init,) = world.child(kinds.STATEFULSET, name)["spec"]["template"]["spec"]["initContainers"]
    assert init["image"] == "hybridpd/connector:2"


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


def stray_pod(world: World, role: str) -> None:
    """A ready pod of a revision that is not the current one."""
    labels = names.role_labels("demo", role, "another")
    world.cluster.put(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"stray-{role}", "namespace": "default", "labels": labels},
            "status": {"podIP": "192.0.2.9", "conditions": [{"type": "Ready", "status": "True"}]},
        }
    )


def test_counts_and_counters_are_those_of_the_current_revision(world: World) -> None:
    world.create()
    world.settle()
    revision = world.status["revision"]
    for role in names.ENGINE_ROLES:
        stray_pod(world, role)
    world.run()
    assert world.status["revision"] == revision
    assert world.status["decode"]["ready"] == "1/1"
    assert all(not pod.name.startswith("stray") for pod in world.scraper.last_pods)


def test_a_new_revision_begins_without_the_old_ones_numbers(world: World) -> None:
    world.create()
    world.settle()
    world.scraper.decode = EngineSample("", names.DECODE, loads=9, read_bytes=9)
    world.settle()
    assert world.condition("KVTransferVerified")[0] == "True"
    world.scraper.decode = EngineSample("", names.DECODE)
    world.edit({"engine": {"extraArgs": ["--max-num-seqs", "16"]}})
    world.settle()
    assert world.condition("KVTransferVerified") == ("Unknown", "NoTraffic")
    assert "transfer" not in world.status


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


def test_a_pod_that_cannot_start_is_named(world: World) -> None:
    world.create()
    world.settle(ready=False)
    pod = world.child(kinds.POD, f"demo-prefill-{world.status['revision']}-0")
    pod["status"]["containerStatuses"] = [
        {"name": "engine", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    ]
    world.run()
    assert world.condition("PrefillReady") == ("False", "ImagePullBackOff")
    assert pod["metadata"]["name"] in world.message("PrefillReady")
    assert "ImagePullBackOff" in world.status["prefill"]["message"]


def test_scaled_to_zero_is_settled_and_not_ready(world: World) -> None:
    world.create({"prefill": {"replicas": 0}, "decode": {"replicas": 0}})
    world.settle()
    assert world.condition("Ready") == ("False", "ScaledToZero")
    assert world.condition("PrefillReady") == ("False", "ScaledToZero")


def test_two_services_do_not_touch_each_other(world: World, cluster: FakeCluster) -> None:
    world.create()
    world.settle()
    other = resource(name="other", uid="uid-other")
    cluster.put(other)
    cluster.taken_writes()
    world.reconciler.run(KEY._replace(name="other"))
    assert all(name.startswith("other") for _, _, name in cluster.taken_writes())
    world.run()
    assert cluster.taken_writes() == []


def test_an_older_definition_that_drops_fields_costs_no_endless_writes(world: World) -> None:
    world.cluster.pruned_status_fields = frozenset({"geometry"})
    world.create()
    world.settle()
    world.cluster.taken_writes()
    world.run()
    assert world.cluster.taken_writes() == []
    world.edit({"prefill": {"replicas": 2}})
    world.settle()
    assert world.status["prefill"]["ready"] == "2/2"


def test_no_engine_image_anywhere_is_said_before_anything_starts(world: World) -> None:
    world.create({"engine": {"image": None, "vllmVersion": "0.32.0"}})
    world.settle()
    assert world.condition("Accepted")[0] == "False"
    assert "spec.engine.image" in world.message("Accepted")
    assert world.cluster.names_of(kinds.STATEFULSET) == []
    world.restart_operator(Images(connector="c:1", router="r:1", engine="e:1"))
    world.settle()
    assert world.condition("Ready")[0] == "True"
