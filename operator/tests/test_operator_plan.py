"""Plans as values: what a pass wants, and what it takes away."""

from operator_world import IMAGES, resource

from hybridpd_operator import drift, kinds, names
from hybridpd_operator.kinds import Manifest
from hybridpd_operator.observed import Child, Observed, child_from
from hybridpd_operator.plan import Plan, make_plan
from hybridpd_operator.rollout import Phase
from hybridpd_operator.settings import Images
from hybridpd_operator.spec import parse_service

SERVICE = parse_service(resource())


def seen(*manifests: Manifest) -> Observed:
    children: list[Child] = []
    for number, manifest in enumerate(manifests):
        metadata = {**manifest["metadata"], "uid": f"child-{number}"}
        children.append(child_from({**manifest, "metadata": metadata}))
    return Observed(resource(), children=tuple(children))


def plan(observed: Observed, *, may_start: bool = True, images: Images = IMAGES) -> Plan:
    return make_plan(SERVICE, observed, images, may_start=may_start)


def relabelled(manifest: Manifest, name: str, **labels: str) -> Manifest:
    metadata = manifest["metadata"]
    return {
        **manifest,
        "metadata": {**metadata, "name": name, "labels": {**metadata["labels"], **labels}},
    }


def without_annotation(manifest: Manifest, name: str) -> Manifest:
    metadata = manifest["metadata"]
    kept = {key: text for key, text in metadata["annotations"].items() if key != name}
    return {**manifest, "metadata": {**metadata, "annotations": kept}}


def object_of(kind: kinds.Kind) -> Manifest:
    return next(one for one in plan(seen()).objects if one["kind"] == kind.name)


def test_a_plan_is_deterministic() -> None:
    assert plan(seen()) == plan(seen())


def test_every_object_is_stamped() -> None:
    for one in plan(seen()).objects:
        plain = {**one, "metadata": {**one["metadata"]}}
        annotations = {
            key: value
            for key, value in one["metadata"]["annotations"].items()
            if key != names.ANNOTATION_RENDERED
        }
        plain["metadata"]["annotations"] = annotations
        if not annotations:
            del plain["metadata"]["annotations"]
        assert drift.stamped(plain) == one


def test_what_exists_and_is_wanted_stays() -> None:
    everything = plan(seen()).objects
    assert plan(seen(*everything)).removals == ()
    assert plan(seen(*everything)).objects == everything


def test_a_shared_child_nobody_wants_goes() -> None:
    stray = relabelled(object_of(kinds.DISRUPTION_BUDGET), "demo-old-name")
    assert [child.ref.name for child in plan(seen(stray)).removals] == ["demo-old-name"]


def test_a_child_of_somebody_else_stays() -> None:
    stray = relabelled(object_of(kinds.DISRUPTION_BUDGET), "demo-old-name")
    stray["metadata"]["ownerReferences"] = []
    assert plan(seen(stray)).removals == ()


def test_a_child_already_on_its_way_out_is_not_deleted_again() -> None:
    stray = relabelled(object_of(kinds.DISRUPTION_BUDGET), "demo-old-name")
    stray["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert plan(seen(stray)).removals == ()


def test_a_blocked_service_is_left_wholly_alone() -> None:
    stray = relabelled(object_of(kinds.DISRUPTION_BUDGET), "demo-old-name")
    blocked = plan(seen(stray), may_start=False)
    assert (blocked.objects, blocked.removals) == ((), ())
    assert blocked.decision.phase is Phase.BLOCKED


def test_engines_of_an_old_revision_wait_for_their_router() -> None:
    sets = object_of(kinds.STATEFULSET)
    old_set = relabelled(sets, "demo-prefill-old", **{names.LABEL_REVISION: "old"})
    old_router = relabelled(
        object_of(kinds.DEPLOYMENT), "demo-router-old", **{names.LABEL_REVISION: "old"}
    )
    both = plan(seen(old_set, old_router))
    assert [child.ref.name for child in both.removals] == ["demo-router-old"]
    assert not any(one["kind"] == "StatefulSet" for one in both.objects)
    alone = plan(seen(old_set))
    assert [child.ref.name for child in alone.removals] == ["demo-prefill-old"]


def test_a_revision_keeps_the_images_it_began_with() -> None:
    older = Images(connector="connector:1", router="router:1", engine="engine:1")
    newer = Images(connector="connector:2", router="router:2", engine="engine:2")
    service = parse_service(resource({"engine": {"image": None, "vllmVersion": "0.32.0"}}))
    begun = make_plan(service, seen(), older, may_start=True)
    later = make_plan(service, seen(*begun.objects), newer, may_start=True)

    def image_of(one: Plan, kind: str) -> str:
        found = next(obj for obj in one.objects if obj["kind"] == kind)
        return str(found["spec"]["template"]["spec"]["containers"][0]["image"])

    assert image_of(begun, "StatefulSet") == image_of(later, "StatefulSet") == "engine:1"
    assert image_of(later, "Deployment") == "router:2", "a router keeps no state"


def test_a_revision_that_began_before_a_setting_existed_never_gets_it() -> None:
    """Its connector image, which it keeps, would refuse to start with a key it does not know."""

    def told(one: Plan) -> list[bool]:
        return ["prefill_peers" in str(obj) for obj in one.objects if obj["kind"] == "StatefulSet"]

    begun = plan(seen())
    older = [without_annotation(obj, names.ANNOTATION_PREFILL_PEERS) for obj in begun.objects]
    assert told(begun) == told(plan(seen(*begun.objects))) == [False, True]
    later = plan(seen(*older))
    assert told(later) == [False, False]
    assert later.revision == begun.revision
    assert told(plan(seen(*later.objects))) == [False, False]


def test_parts_of_the_desired_revision_stay_while_an_old_one_stops() -> None:
    sets = object_of(kinds.STATEFULSET)
    old_set = relabelled(sets, "demo-prefill-old", **{names.LABEL_REVISION: "old"})
    assert [child.ref.name for child in plan(seen(old_set, sets)).removals] == ["demo-prefill-old"]
