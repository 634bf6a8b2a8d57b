"""Passes among the objects, edits and pods of others: what is put back, left alone, waited for."""

from operator_fake_cluster import FakeCluster, clone
from operator_world import KEY, World, resource

from hybridpd_operator import kinds, names
from hybridpd_operator.cluster_api import RefusedError

TP_1_TO_3 = {"prefill": {"tensorParallelSize": 1}, "decode": {"tensorParallelSize": 3}}


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
    assert world.condition("Reconciling") == ("True", "WaitingForDeletion")
    assert "StatefulSet demo-prefill-" in world.message("Reconciling")


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


def test_another_revision_left_by_an_orphaning_delete_is_replaced(world: World) -> None:
    world.create(uid="uid-before")
    world.settle()
    old = world.status["revision"]
    del world.cluster.objects[(names.KIND, *KEY)]
    for one in world.cluster.objects.values():
        if one["kind"] != "Pod":
            one["metadata"].pop("ownerReferences", None)
    world.create({"engine": {"extraArgs": ["--max-num-seqs", "16"]}}, uid="uid-after")
    world.settle()
    assert world.condition("Ready")[0] == "True"
    assert world.status["revision"] != old
    assert f"demo-prefill-{old}" not in world.cluster.names_of(kinds.STATEFULSET)


def test_a_copy_that_somebody_made_of_a_child_is_not_deleted(world: World) -> None:
    world.create()
    world.settle()
    copy = clone(world.child(kinds.SERVICE, "demo"))
    for field in ("ownerReferences", "managedFields", "uid"):
        del copy["metadata"][field]
    copy["metadata"]["name"] = "copy-of-demo"
    world.cluster.put(copy)
    world.settle()
    assert "copy-of-demo" in world.cluster.names_of(kinds.SERVICE)


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


def test_a_deletion_the_server_refuses_is_told(world: World) -> None:
    world.create()
    world.settle()
    world.edit({"router": {"kind": "None"}})

    def refuse(verb: str, kind: str, name: str) -> RefusedError | None:
        return RefusedError(f"DELETE {name}", 403, "not here") if verb == "delete" else None

    world.cluster.fail = refuse
    world.run()
    assert world.condition("Stalled") == ("True", "DeleteRefused")
    assert "not here" in world.message("Stalled")


def test_a_config_map_that_may_not_be_read_is_told(world: World) -> None:
    def refuse(verb: str, kind: str, name: str) -> RefusedError | None:
        return RefusedError("GET", 403, "no right to it") if kind == "ConfigMap" else None

    world.cluster.fail = refuse
    world.create({"model": {"id": "a/b", "config": {"configMap": {"name": "facts"}}}})
    world.run()
    assert world.condition("Compatible") == ("False", "BadModelConfig")
    assert "no right to it" in world.message("Compatible")


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


def test_a_pod_that_a_dead_node_holds_is_named(world: World) -> None:
    world.create()
    world.settle()
    pod = f"demo-decode-{world.status['revision']}-0"
    world.child(kinds.POD, pod)["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.run()
    assert world.condition("DecodeReady") == ("False", "StuckTerminating")
    assert pod in world.message("DecodeReady")


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
