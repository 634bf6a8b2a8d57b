"""Laws of the strategic merge, over random pod templates."""

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hybridpd_operator.manifests.merge import merge

WORDS = st.sampled_from(["a", "b", "c"])
SCALARS = st.one_of(WORDS, st.integers(0, 3), st.booleans())


def keyed(key: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    item = st.fixed_dictionaries({key: WORDS}, optional=fields)
    return st.lists(item, max_size=3, unique_by=lambda one: one[key])


CONTAINERS = keyed(
    "name",
    image=WORDS,
    args=st.lists(WORDS, max_size=2),
    env=keyed("name", value=WORDS),
    volumeMounts=keyed("mountPath", name=WORDS),
)
TEMPLATES = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.dictionaries(WORDS, SCALARS, max_size=2),
        "spec": st.fixed_dictionaries(
            {},
            optional={
                "containers": CONTAINERS,
                "volumes": keyed("name", emptyDir=st.just({}), hostPath=st.just({"path": "/x"})),
                "nodeSelector": st.dictionaries(WORDS, WORDS, max_size=2),
                "priorityClassName": WORDS,
            },
        ),
    },
)


@given(TEMPLATES)
def test_an_empty_patch_changes_nothing(base: dict[str, Any]) -> None:
    assert merge(base, {}) == base


@given(TEMPLATES, TEMPLATES)
def test_merging_twice_is_merging_once(base: dict[str, Any], patch: dict[str, Any]) -> None:
    once = merge(base, patch)
    assert merge(once, patch) == once


@given(TEMPLATES, TEMPLATES)
def test_the_arguments_are_not_changed(base: dict[str, Any], patch: dict[str, Any]) -> None:
    before = copy.deepcopy((base, patch))
    merged = merge(base, patch)
    merged.setdefault("spec", {})["touched"] = True
    assert (base, patch) == before


@given(TEMPLATES, TEMPLATES)
def test_items_that_the_patch_does_not_name_survive(
    base: dict[str, Any], patch: dict[str, Any]
) -> None:
    merged = {one["name"]: one for one in merge(base, patch).get("spec", {}).get("containers", [])}
    named = {one["name"] for one in patch.get("spec", {}).get("containers", [])}
    for container in base.get("spec", {}).get("containers", []):
        if container["name"] in named:
            assert container["name"] in merged
        else:
            assert merged[container["name"]] == container


@given(TEMPLATES, TEMPLATES)
def test_what_the_patch_says_holds(base: dict[str, Any], patch: dict[str, Any]) -> None:
    merged = merge(base, patch)
    for container in patch.get("spec", {}).get("containers", []):
        (found,) = (one for one in merged["spec"]["containers"] if one["name"] == container["name"])
        if "args" in container:
            assert found["args"] == container["args"]
        for entry in container.get("env", []):
            (variable,) = (one for one in found["env"] if one["name"] == entry["name"])
            assert entry.items() <= variable.items()


def test_null_removes_a_key_and_a_directive_removes_an_item() -> None:
    base = {"a": 1, "containers": [{"name": "x"}, {"name": "y", "image": "i"}]}
    patch = {"a": None, "containers": [{"name": "x", "$patch": "delete"}]}
    assert merge(base, patch) == {"containers": [{"name": "y", "image": "i"}]}


def test_replace_takes_the_patch_as_it_is() -> None:
    base = {"env": [{"name": "x", "value": "1"}], "resources": {"limits": {"cpu": "1"}}}
    patch = {
        "env": [{"name": "x", "valueFrom": {"f": 1}, "$patch": "replace"}],
        "resources": {"$patch": "replace", "requests": {"cpu": "2"}},
    }
    assert merge(base, patch) == {
        "env": [{"name": "x", "valueFrom": {"f": 1}}],
        "resources": {"requests": {"cpu": "2"}},
    }


def test_a_value_takes_the_place_of_a_reference() -> None:
    base = {"env": [{"name": "x", "valueFrom": {"f": 1}}]}
    assert merge(base, {"env": [{"name": "x", "value": "1"}]}) == {
        "env": [{"name": "x", "value": "1"}]
    }


def test_another_source_takes_the_place_of_a_volumes_source() -> None:
    base = {"volumes": [{"name": "home", "emptyDir": {}}]}
    patch = {"volumes": [{"name": "home", "hostPath": {"path": "/cache"}}]}
    assert merge(base, patch) == patch


def test_ports_with_the_default_protocol_are_one_port() -> None:
    base = {"ports": [{"containerPort": 1, "protocol": "TCP", "name": "a"}]}
    patch = {"ports": [{"containerPort": 1, "name": "b"}, {"containerPort": 1, "protocol": "UDP"}]}
    assert merge(base, patch)["ports"] == [
        {"containerPort": 1, "protocol": "TCP", "name": "b"},
        {"containerPort": 1, "protocol": "UDP"},
    ]
