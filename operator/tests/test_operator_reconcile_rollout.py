"""Passes over an edited service: what stays, what is replaced, and that revisions never meet."""

import pytest
from operator_world import IMAGES, World

from hybridpd_operator import kinds, names
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


def test_a_pod_that_will_not_end_is_named(world: World) -> None:
    """Its node is dead: the kubelet never says that the pod is gone."""
    world.create()
    world.settle()
    old = world.status["revision"]
    world.edit({"engine": {"extraArgs": ["--max-num-seqs", "16"]}})
    world.run()
    world.cluster.finish_pods()
    world.run()
    world.run()
    assert world.condition("Reconciling") == ("True", "StoppingOldEngines"), "it has time yet"
    world.child(kinds.POD, f"demo-decode-{old}-0")["metadata"]["deletionTimestamp"] = (
        "2026-01-01T00:00:00Z"
    )
    world.run()
    assert world.condition("Stalled") == ("True", "PodsOfOldRevisionStuck")
    assert f"pod demo-decode-{old}-0" in world.message("Stalled")
    assert "demo-prefill" not in world.message("Stalled")
    assert world.cluster.names_of(kinds.STATEFULSET) == []
    world.cluster.finish_pods()
    world.settle()
    assert world.condition("Ready")[0] == "True"
    assert world.condition("Stalled")[0] == "False"


def test_a_pod_whose_statefulset_was_deleted_without_it_is_named(world: World) -> None:
    world.create()
    world.settle()
    old = world.status["revision"]
    del world.child(kinds.POD, f"demo-decode-{old}-0")["metadata"]["ownerReferences"]
    world.edit({"engine": {"extraArgs": ["--max-num-seqs", "16"]}})
    for _ in range(4):
        world.run()
        world.cluster.finish_pods()
    assert world.condition("Stalled") == ("True", "PodsOfOldRevisionStuck")
    assert f"pod demo-decode-{old}-0, which nothing owns" in world.message("Stalled")


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
