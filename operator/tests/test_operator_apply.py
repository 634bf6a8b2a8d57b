"""When a write is needed: what we want changed, or somebody changed what is ours."""

from typing import Any

import pytest
from operator_fake_cluster import FakeCluster, clone, fields_of
from operator_world import context

from hybridpd_operator import drift, kinds, names
from hybridpd_operator.kinds import Manifest
from hybridpd_operator.plan import render

OBJECTS = render(context())
IDS = [f"{one['kind']}-{one['metadata']['name']}" for one in OBJECTS]


def live_of(rendered: Manifest) -> Manifest:
    """The object as the server answers after our apply."""
    return FakeCluster().apply(rendered)


@pytest.mark.parametrize("rendered", OBJECTS, ids=IDS)
def test_nothing_to_do_after_an_apply(rendered: Manifest) -> None:
    assert drift.difference(rendered, live_of(rendered)) is None


@pytest.mark.parametrize("rendered", OBJECTS, ids=IDS)
def test_every_single_lost_field_is_noticed(rendered: Manifest) -> None:
    """Takes each owned leaf away in turn; none may be the one that nobody compares."""
    live = live_of(rendered)
    fields = live["metadata"]["managedFields"][0]["fieldsV1"]
    leaves = list(_leaf_paths(fields))
    assert len(leaves) > 5
    for path in leaves:
        damaged = clone(live)
        _take_out(damaged["metadata"]["managedFields"][0]["fieldsV1"], path)
        found = drift.difference(rendered, damaged)
        assert found is not None, path
        assert found != drift.NEW


def _take_out(node: dict[str, Any], path: tuple[str, ...]) -> None:
    """Remove a leaf; a branch that is left empty goes with it, as on the server."""
    step, *rest = path
    if rest:
        _take_out(node[step], tuple(rest))
    if not rest or not node[step]:
        del node[step]


def _leaf_paths(node: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not node:
        return [path] if path else []
    return [leaf for key, below in node.items() for leaf in _leaf_paths(below, (*path, key))]


@pytest.mark.parametrize(
    "patch",
    [
        {"prefill": {"podTemplate": {"spec": {"hostAliases": []}}}},
        {"prefill": {"podTemplate": {"spec": {"containers": [{"name": "side", "env": []}]}}}},
        {"prefill": {"affinity": {"podAffinity": None}}},
    ],
    ids=["an empty list", "an empty list of a sidecar", "a null"],
)
def test_what_the_server_keeps_no_owner_of_is_no_drift(patch: dict[str, Any]) -> None:
    for rendered in render(context(patch)):
        assert drift.difference(rendered, live_of(rendered)) is None


def test_another_rendering_is_new() -> None:
    (service,) = (one for one in OBJECTS if one["metadata"]["name"] == "demo")
    live = live_of(service)
    changed = {key: value for key, value in service.items() if key != "metadata"}
    metadata = {**service["metadata"], "annotations": {}, "labels": {"a": "b"}}
    assert drift.difference(drift.stamped({**changed, "metadata": metadata}), live) == drift.NEW


def test_the_stamp_is_of_the_object_without_it() -> None:
    plain = {"kind": "X", "metadata": {"name": "n"}, "spec": {"a": 1}}
    first, again = drift.stamped(plain), drift.stamped(clone(plain))
    assert first == again
    assert plain["metadata"] == {"name": "n"}
    other = drift.stamped({**plain, "spec": {"a": 2}})
    key = names.ANNOTATION_RENDERED
    assert first["metadata"]["annotations"][key] != other["metadata"]["annotations"][key]


def test_owners_wiped_from_the_object_mean_a_write() -> None:
    live = live_of(OBJECTS[0])
    live["metadata"]["managedFields"] = []
    found = drift.difference(OBJECTS[0], live)
    assert found is not None
    assert "no field is owned" in found


def test_fields_of_the_status_subresource_do_not_count() -> None:
    live = live_of(OBJECTS[0])
    entry = {**live["metadata"]["managedFields"][0], "subresource": "status"}
    live["metadata"]["managedFields"] = [entry]
    assert drift.difference(OBJECTS[0], live) is not None


def test_port_keys_match_when_the_server_filled_the_protocol_in() -> None:
    rendered = drift.stamped(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "n", "namespace": "d"},
            "spec": {"ports": [{"port": 8000, "name": "http"}]},
        }
    )
    assert drift.difference(rendered, live_of(rendered)) is None


def test_a_list_without_keys_is_owned_as_a_whole() -> None:
    fields = fields_of({"spec": {"args": ["a", "b"], "tolerations": [{"key": "x"}]}})
    assert fields == {"f:spec": {"f:args": {}, "f:tolerations": {}}}


def test_objects_come_in_the_order_of_application() -> None:
    order = [kind.name for kind in kinds.CHILD_KINDS]
    positions = [order.index(one["kind"]) for one in OBJECTS]
    assert positions == sorted(positions)
