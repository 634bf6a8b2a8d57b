"""A cluster in memory that behaves like an API server where the operator can tell.

Server-side apply with field owners (``managedFields``), uids, generations, owner references with
garbage collection, terminating pods, and a stand-in for the StatefulSet and Deployment
controllers. Every request is recorded, so that tests can count writes.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridpd_operator import kinds, names
from hybridpd_operator.cluster_api import ConflictError, NotFoundError
from hybridpd_operator.kinds import Kind, Manifest
from hybridpd_operator.manifests.merge import MERGE_KEYS

Slot = tuple[str, str, str]

#: When the grace period of a pod that is deleted here ends: after every test.
GRACE_ENDS = "2026-02-01T00:00:00Z"

#: Lists that the API keys item by item, as far as our objects use them.
LIST_KEYS: Mapping[str, tuple[str, ...]] = {
    **{field: keys for field, keys in MERGE_KEYS.items() if field != "tolerations"},
    "ownerReferences": ("uid",),
    "conditions": ("type",),
}


def clone(value: Any) -> Any:
    """A deep copy of plain JSON; several times faster than ``copy.deepcopy``."""
    return json.loads(json.dumps(value))


class FakeCluster:
    """Implements ``cluster_api.Cluster``; tests reach behind it through the other methods."""

    def __init__(self) -> None:
        self.objects: dict[Slot, Manifest] = {}
        self.writes: list[tuple[str, str, str]] = []
        self.events: list[Manifest] = []
        self.pruned_status_fields: frozenset[str] = frozenset()
        self.fail: Callable[[str, str, str], Exception | None] = lambda verb, kind, name: None
        self._serial = itertools.count(1)

    # --- the protocol -----------------------------------------------------------------------

    def get(self, kind: Kind, namespace: str, name: str) -> Manifest:
        self._maybe_fail("get", kind.name, name)
        try:
            return clone(self.objects[(kind.name, namespace, name)])
        except KeyError:
            raise NotFoundError(f"GET {kind.name} {name}", 404, "not found") from None

    def list(self, kind: Kind, namespace: str | None, labels: str = "") -> Sequence[Manifest]:
        self._maybe_fail("list", kind.name, "")
        wanted = dict(pair.split("=") for pair in labels.split(",") if pair)
        return [
            clone(one)
            for (name, where, _), one in sorted(self.objects.items())
            if name == kind.name and namespace in (None, where)
            if wanted.items() <= (one["metadata"].get("labels") or {}).items()
        ]

    def apply(self, manifest: Manifest, *, subresource: str = "") -> Manifest:
        name = manifest["metadata"]["name"]
        what = subresource or manifest["kind"]
        self._maybe_fail("apply", what, name)
        slot = (manifest["kind"], manifest["metadata"]["namespace"], name)
        live = self.objects.get(slot)
        self.writes.append(("apply", what, name))
        if subresource == "status":
            return self._apply_status(manifest, live)
        if live is None:
            live = self.put(manifest)
        else:
            self._merge_applied(live, manifest)
        self._own(live, manifest)
        return clone(live)

    def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        self._maybe_fail("delete", kind.name, name)
        live = self.objects.get((kind.name, namespace, name))
        if live is None:
            return
        if live["metadata"]["uid"] != uid:
            raise ConflictError(f"DELETE {kind.name} {name}", 409, "uid differs")
        self.writes.append(("delete", kind.name, name))
        self.remove(kind, namespace, name)

    def create(self, manifest: Manifest) -> None:
        self._maybe_fail("create", manifest["kind"], "")
        self.events.append(clone(manifest))

    # --- what tests do to it ----------------------------------------------------------------

    def put(self, manifest: Manifest) -> Manifest:
        """Store an object as somebody else would create it."""
        live = clone(manifest)
        metadata = live["metadata"]
        metadata.setdefault("namespace", "default")
        metadata.setdefault("uid", f"uid-{next(self._serial)}")
        metadata["generation"] = metadata.get("generation", 1)
        metadata["resourceVersion"] = str(next(self._serial))
        self.objects[(live["kind"], metadata["namespace"], metadata["name"])] = live
        return live

    def edit(self, kind: Kind, namespace: str, name: str, path: Sequence[Any], value: Any) -> None:
        """Change one field as ``kubectl edit`` does: the field's owner changes with it."""
        live = self.objects[(kind.name, namespace, name)]
        node: Any = live
        for step in path[:-1]:
            node = node[step]
        if value is None:
            del node[path[-1]]
        else:
            node[path[-1]] = value
        live["metadata"]["resourceVersion"] = str(next(self._serial))
        for entry in live["metadata"].get("managedFields", ()):
            _forget(entry["fieldsV1"], live if value is None else None, path, live)
        if path[0] == "spec":
            live["metadata"]["generation"] += 1

    def remove(self, kind: Kind, namespace: str, name: str, *, cascade: bool = True) -> None:
        """Delete one object; what it owns follows, pods only begin to end."""
        live = self.objects[(kind.name, namespace, name)]
        if kind is kinds.POD:
            live["metadata"]["deletionTimestamp"] = GRACE_ENDS
            return
        del self.objects[(kind.name, namespace, name)]
        if not cascade:
            return
        uid = live["metadata"]["uid"]
        for owned_kind, where, owned in list(self.objects):
            one = self.objects.get((owned_kind, where, owned))
            owners = (one or {}).get("metadata", {}).get("ownerReferences") or ()
            if where == namespace and any(owner["uid"] == uid for owner in owners):
                self.remove(kinds.kind_named(owned_kind), namespace, owned)

    def run_workloads(self, *, ready: bool = True) -> None:
        """Do the workload controllers' part: make the pods that are wanted, at once ready."""
        for (kind, namespace, name), live in list(self.objects.items()):
            if kind in (kinds.STATEFULSET.name, kinds.DEPLOYMENT.name):
                self._run_workload(namespace, name, live, ready=ready)

    def finish_pods(self) -> None:
        """Terminating pods are gone now."""
        for slot, live in [*self.objects.items()]:
            if slot[0] == kinds.POD.name and "deletionTimestamp" in live["metadata"]:
                del self.objects[slot]

    def names_of(self, kind: Kind) -> Sequence[str]:
        """Names of all objects of a kind."""
        return [name for found, _, name in sorted(self.objects) if found == kind.name]

    def taken_writes(self) -> Sequence[tuple[str, str, str]]:
        """The writes since the last call."""
        taken, self.writes = self.writes, []
        return taken

    # --- inside -----------------------------------------------------------------------------

    def _maybe_fail(self, verb: str, kind: str, name: str) -> None:
        error = self.fail(verb, kind, name)
        if error:
            raise error

    def _apply_status(self, manifest: Manifest, live: Manifest | None) -> Manifest:
        if live is None:
            raise NotFoundError("PATCH status", 404, "not found")
        if manifest["metadata"].get("uid") != live["metadata"]["uid"]:
            raise ConflictError("PATCH status", 409, "uid differs")
        live["status"] = {
            key: clone(value)
            for key, value in manifest["status"].items()
            if key not in self.pruned_status_fields
        }
        live["metadata"]["resourceVersion"] = str(next(self._serial))
        return clone(live)

    def _merge_applied(self, live: Manifest, manifest: Manifest) -> None:
        before = clone(live.get("spec"))
        metadata = live["metadata"]
        for key, value in manifest.items():
            if key == "metadata":
                for part in ("labels", "annotations"):
                    metadata[part] = {**(metadata.get(part) or {}), **value.get(part, {})}
                metadata["ownerReferences"] = clone(value.get("ownerReferences", []))
            else:
                live[key] = clone(value)
        if live.get("spec") != before:
            metadata["generation"] += 1
        metadata["resourceVersion"] = str(next(self._serial))

    def _own(self, live: Manifest, manifest: Manifest) -> None:
        body = {k: v for k, v in manifest.items() if k not in ("apiVersion", "kind")}
        body["metadata"] = {
            k: v for k, v in manifest["metadata"].items() if k not in ("name", "namespace")
        }
        others = [
            entry
            for entry in live["metadata"].get("managedFields", ())
            if entry["manager"] != names.FIELD_MANAGER
        ]
        ours = {
            "manager": names.FIELD_MANAGER,
            "operation": "Apply",
            "fieldsV1": fields_of(body),
        }
        live["metadata"]["managedFields"] = [ours, *others]

    def _run_workload(self, namespace: str, name: str, live: Manifest, *, ready: bool) -> None:
        template = live["spec"]["template"]
        for ordinal in range(live["spec"]["replicas"]):
            pod_name = f"{name}-{ordinal}"
            if (kinds.POD.name, namespace, pod_name) in self.objects:
                pod = self.objects[(kinds.POD.name, namespace, pod_name)]
            else:
                pod = self.put(
                    {
                        "apiVersion": "v1",
                        "kind": "Pod",
                        "metadata": {
                            "name": pod_name,
                            "namespace": namespace,
                            "labels": dict(template["metadata"]["labels"]),
                            "ownerReferences": [{"uid": live["metadata"]["uid"]}],
                        },
                    }
                )
            if "deletionTimestamp" not in pod["metadata"]:
                pod["status"] = {
                    "podIP": f"192.0.2.{ordinal + 1}",
                    "conditions": [{"type": "Ready", "status": str(ready)}],
                }
        for slot in list(self.objects):
            kind, where, pod_name = slot
            stem, _, ordinal = pod_name.rpartition("-")
            ours = kind == kinds.POD.name and where == namespace and stem == name
            if ours and int(ordinal) >= live["spec"]["replicas"]:
                del self.objects[slot]


def fields_of(value: Any, field: str = "") -> dict[str, Any]:
    """The ``fieldsV1`` set of an applied value."""
    if isinstance(value, Mapping):
        return {f"f:{key}": fields_of(item, key) for key, item in value.items() if _held(item, key)}
    if isinstance(value, list) and field in LIST_KEYS:
        return {_key_text(item, LIST_KEYS[field]): fields_of(item) for item in value}
    return {}


def _held(item: Any, field: str) -> bool:
    """No owner is kept of a null, nor of a keyed list without items."""
    return item is not None and not (item == [] and field in LIST_KEYS)


def _key_text(item: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    key = {name: item.get(name, "TCP" if name == "protocol" else None) for name in keys}
    # Ports of a Service are keyed by "port"; those of a container by "containerPort".
    if "port" in item:
        key = {"port": item["port"], "protocol": item.get("protocol", "TCP")}
    return "k:" + json.dumps(key, separators=(",", ":"))


def _forget(fields: dict[str, Any], _: Any, path: Sequence[Any], live: Mapping[str, Any]) -> None:
    """Take the edited path out of a field set, as the API server does on a foreign write."""
    node, value, field = fields, live, ""
    for position, step in enumerate(path):
        last = position == len(path) - 1
        if isinstance(step, int):
            listed = value[step] if step < len(value) else {}
            text = _key_text(listed, LIST_KEYS[field]) if field in LIST_KEYS else ""
            if text not in node:
                return
            node, value = node[text], listed
            continue
        text = f"f:{step}"
        if text not in node:
            return
        if last:
            del node[text]
            return
        node, value, field = node[text], value.get(step, {}), step
