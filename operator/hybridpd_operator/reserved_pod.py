"""What a `podTemplate` may not change, and the typed field that does it instead.

A pod template is a strategic merge patch; everything that the hand-over, the selectors or the
drain arithmetic depend on is refused here rather than silently put back.
"""

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybridpd_operator.errors import FieldError
from hybridpd_operator.manifests.merge import MERGE_KEYS
from hybridpd_operator.names import (
    CONNECTOR_CONTAINER,
    CONNECTOR_PYTHON_PATH,
    CONNECTOR_VOLUME,
    ENGINE_CONTAINER,
    GROUP,
    HTTP_PORT,
    LABEL_INSTANCE,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    ROUTER_CONTAINER,
    SIDE_CHANNEL_KEY_FOLDER,
    SIDE_CHANNEL_KEY_VOLUME,
)
from hybridpd_operator.problems import INVALID_FIELD, RESERVED_POD_FIELD, Problem
from hybridpd_operator.reserved_args import advice, env_problems
from hybridpd_operator.spec_fields import Items, Nested
from hybridpd_operator.spec_roles import EnvVar

_TOP_KEYS = ("metadata", "spec")
_METADATA_KEYS = ("labels", "annotations")
_OWNED_LABELS = (LABEL_NAME, LABEL_INSTANCE, LABEL_MANAGED_BY)
_DIRECTIVE = "$patch"
#: Fields that name an item of a list; where there are more, none of them has to be given.
_MOST_NAMES = 2

#: `spec` fields of every pod, and what to use instead ({role}: prefill, decode or router).
_POD_FIELDS: Mapping[str, str] = {
    "affinity": "spec.{role}.affinity",
    "nodeSelector": "spec.{role}.nodeSelector",
    "tolerations": "spec.{role}.tolerations",
    "imagePullSecrets": "spec.imagePullSecrets",
    "serviceAccountName": "nothing: each role has an account of its own",
    "serviceAccount": "nothing: each role has an account of its own",
    "enableServiceLinks": "nothing: Services must not inject variables into the engine",
    "automountServiceAccountToken": "nothing: engines hold no token, the router needs one",
    "hostNetwork": "nothing: two pods of one node would fight over the same ports",
    "restartPolicy": "nothing: pods of a role always restart",
}
_GRACE = "spec.{role}.drain.terminationGracePeriodSeconds"
_CONTAINER_FIELDS: Mapping[str, str] = {
    "image": "spec.{owner}.image",
    "imagePullPolicy": "spec.{owner}.imagePullPolicy",
    "command": "spec.{role}.extraArgs",
    "args": "spec.{role}.extraArgs",
}
_ENGINE_FIELDS: Mapping[str, str] = {
    **_CONTAINER_FIELDS,
    "envFrom": "spec.{role}.env, one variable at a time: whole ConfigMaps cannot be checked",
    "startupProbe": "spec.{role}.loadBudgetSeconds",
    "resources": "spec.{role}.resources",
}
_OWNED_VOLUMES: Mapping[str, str] = {
    CONNECTOR_VOLUME: "nothing: it carries the connector into the engine",
    SIDE_CHANNEL_KEY_VOLUME: "spec.connector.sideChannelKeySecret",
}
_OWNED_PATHS: Mapping[str, str] = {
    CONNECTOR_PYTHON_PATH: "another path: the connector's packages are there",
    SIDE_CHANNEL_KEY_FOLDER: "another path: the side channel's key is there",
}


@dataclass(frozen=True)
class _Owned:
    """A container that the operator renders."""

    name: str
    list_name: str
    fields: Mapping[str, str]
    owner: str
    ports: tuple[int, ...]


def pod_template_problems(
    template: Mapping[str, Any], role: str, ports: tuple[int, ...] = (HTTP_PORT,)
) -> tuple[Problem, ...]:
    """Everything in `spec.<role>.podTemplate` that belongs to the operator.

    `ports` are the container ports that the operator opens in the role's container.
    """
    return tuple(_problems(template, role, ports))


def _problems(template: Mapping[str, Any], role: str, ports: tuple[int, ...]) -> Iterator[Problem]:
    path = f"spec.{role}.podTemplate"
    yield from _unknown_keys(template, path, _TOP_KEYS)
    yield from _misshapen(template, path)
    metadata = _mapping(template.get("metadata"))
    yield from _unknown_keys(metadata, f"{path}.metadata", _METADATA_KEYS)
    for label in map(str, _mapping(metadata.get("labels"))):
        if label.startswith(f"{GROUP}/") or label in _OWNED_LABELS:
            yield _reserved(f"{path}.metadata.labels.{label}", "nothing: selectors rely on it")
    spec = _mapping(template.get("spec"))
    yield from _pod_fields(spec, f"{path}.spec", role)
    for owned in _owned_containers(role, ports):
        for where, container in _items(spec.get(owned.list_name), f"{path}.spec.{owned.list_name}"):
            if container.get("name") == owned.name:
                yield from _container(container, where, role, owned)
    for where, volume in _items(spec.get("volumes"), f"{path}.spec.volumes"):
        name = volume.get("name")
        if isinstance(name, str) and name in _OWNED_VOLUMES:
            yield _reserved(where, _OWNED_VOLUMES[name])


def _owned_containers(role: str, ports: tuple[int, ...]) -> tuple[_Owned, ...]:
    if role == "router":
        return (_Owned(ROUTER_CONTAINER, "containers", _CONTAINER_FIELDS, "router", ports),)
    return (
        _Owned(ENGINE_CONTAINER, "containers", _ENGINE_FIELDS, "engine", ports),
        _Owned(CONNECTOR_CONTAINER, "initContainers", _CONTAINER_FIELDS, "connector", ()),
    )


def _pod_fields(spec: Mapping[str, Any], path: str, role: str) -> Iterator[Problem]:
    if _DIRECTIVE in spec:
        yield _reserved(f"{path}.{_DIRECTIVE}", "a patch without it: the pod cannot be replaced")
    for key, instead in _POD_FIELDS.items():
        if key in spec:
            yield _reserved(f"{path}.{key}", instead.format(role=role))
    if role != "router" and "terminationGracePeriodSeconds" in spec:
        yield _reserved(f"{path}.terminationGracePeriodSeconds", _GRACE.format(role=role))


def _container(
    container: Mapping[str, Any], path: str, role: str, owned: _Owned
) -> Iterator[Problem]:
    if _DIRECTIVE in container:
        yield _reserved(f"{path}.{_DIRECTIVE}", "a patch without it: the operator needs it whole")
    for key, instead in owned.fields.items():
        if key in container:
            yield _reserved(f"{path}.{key}", instead.format(role=role, owner=owned.owner))
    if owned.name == ENGINE_CONTAINER and "preStop" in _mapping(container.get("lifecycle")):
        yield _reserved(f"{path}.lifecycle.preStop", f"spec.{role}.drain.preStopSeconds")
    if owned.name != ROUTER_CONTAINER:
        yield from _env(container.get("env"), f"{path}.env")
    for where, port in _items(container.get("ports"), f"{path}.ports"):
        if port.get("containerPort") in owned.ports:
            yield _reserved(where, "another port: the operator opens this one")
    for where, mount in _items(container.get("volumeMounts"), f"{path}.volumeMounts"):
        # As the kubelet reads it: doubled slashes and dots name the same folder.
        taken = posixpath.normpath("/" + str(mount.get("mountPath", "")).lstrip("/"))
        if taken in _OWNED_PATHS:
            yield _reserved(where, _OWNED_PATHS[taken])


def _env(env: object, path: str) -> Iterator[Problem]:
    if env is None:
        return
    found: list[FieldError] = []
    named = [{k: v for k, v in item.items() if k != _DIRECTIVE} for _, item in _items(env, path)]
    read = Items(Nested(EnvVar), 64).read(named, path, found)
    if found:
        for problem in found:
            yield Problem(INVALID_FIELD, problem.path, f"expected {problem.expected}")
    else:
        yield from env_problems(read, path)


def _misshapen(template: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """What a merge could not lay over the pod: lists without items, items without their name."""
    for key in _TOP_KEYS:
        if key in template and not isinstance(template[key], Mapping):
            yield _shape(f"{path}.{key}", "an object", template[key])
    spec = _mapping(template.get("spec"))
    if "containers" in spec and spec["containers"] is None:
        yield _shape(f"{path}.spec.containers", "a list", None)
    yield from _misshapen_lists(spec, f"{path}.spec")


def _misshapen_lists(value: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for key, inner in value.items():
        where = f"{path}.{key}"
        if isinstance(inner, Mapping):
            yield from _misshapen_lists(inner, where)
        if key not in MERGE_KEYS or inner is None:
            continue
        if not isinstance(inner, list | tuple):
            yield _shape(where, "a list", inner)
            continue
        for i, item in enumerate(inner):
            if not isinstance(item, Mapping):
                yield _shape(f"{where}[{i}]", "an object", item)
                continue
            yield from _unnamed(item, f"{where}[{i}]", MERGE_KEYS[key])
            yield from _misshapen_lists(item, f"{where}[{i}]")


def _unnamed(item: Mapping[str, Any], path: str, keys: tuple[str, ...]) -> Iterator[Problem]:
    for key in keys:
        if not isinstance(item.get(key, ""), str | int):
            yield _shape(f"{path}.{key}", "a name or number", item[key])
    # Tolerations have no name: all their fields together tell them apart.
    if len(keys) <= _MOST_NAMES and not item.get(keys[0]):
        yield _shape(f"{path}.{keys[0]}", "a value, which the list merges by", item.get(keys[0]))


def _shape(path: str, expected: str, got: object) -> Problem:
    return Problem(INVALID_FIELD, path, f"expected {expected}, got {str(got)[:60]}; correct it")


def _unknown_keys(value: Mapping[str, Any], path: str, known: tuple[str, ...]) -> Iterator[Problem]:
    for key in value:
        if key not in known:
            yield Problem(
                INVALID_FIELD,
                f"{path}.{key}",
                f"expected only {' and '.join(known)}, got {key!r}; remove it",
            )


def _reserved(path: str, instead: str) -> Problem:
    return Problem(RESERVED_POD_FIELD, path, f"the operator sets this{advice(instead)}")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _items(value: object, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            if isinstance(item, Mapping):
                yield f"{path}[{i}]", item
