"""What one pass saw of the cluster, as values. Reading it is ``gather``'s work."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridpd_operator import names
from hybridpd_operator.kinds import Manifest

#: Container states that no waiting cures; worth showing to the user by name.
_TROUBLE = frozenset(
    {
        "CrashLoopBackOff",
        "ImagePullBackOff",
        "ErrImagePull",
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
_MESSAGE_CHARACTERS = 200


@dataclass(frozen=True, order=True)
class Ref:
    """Kind and name of one object in the service's namespace."""

    kind: str
    name: str


@dataclass(frozen=True)
class Child:
    """One object in the cluster that carries our labels."""

    ref: Ref
    uid: str
    manifest: Manifest

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels of the object."""
        return self.manifest["metadata"].get("labels") or {}

    @property
    def annotations(self) -> Mapping[str, str]:
        """Annotations of the object."""
        return self.manifest["metadata"].get("annotations") or {}

    @property
    def role(self) -> str:
        """prefill, decode, router or "" for what all roles share."""
        return self.labels.get(names.LABEL_ROLE, "")

    @property
    def revision(self) -> str:
        """Revision the object belongs to, or "" for what outlives revisions."""
        return self.labels.get(names.LABEL_REVISION, "")

    @property
    def deleting(self) -> bool:
        """True once somebody asked for its deletion."""
        return "deletionTimestamp" in self.manifest["metadata"]

    def owned_by(self, uid: str) -> bool:
        """True when the service with ``uid`` is the controlling owner."""
        return controller_uid(self.manifest) == uid

    @property
    def left_behind(self) -> bool:
        """True for what we applied and nobody owns: its service was deleted without its children.

        The labels alone do not say so: people copy objects with them.
        """
        return controller_uid(self.manifest) is None and any(
            entry.get("manager") == names.FIELD_MANAGER and entry.get("operation") == "Apply"
            for entry in self.manifest["metadata"].get("managedFields") or ()
        )


@dataclass(frozen=True)
class Pod:
    """One pod of the service. ``trouble`` says why it cannot start, "" when it may still.

    ``gone_by`` is when a deleted pod's grace ends (RFC 3339), "" for one that is not deleted.
    ``has_owner`` is False for a pod whose workload was deleted without it.
    """

    name: str
    role: str
    revision: str
    ready: bool
    deleting: bool
    ip: str = ""
    trouble: str = ""
    gone_by: str = ""
    has_owner: bool = True

    def is_overdue(self, since: str) -> bool:
        """True for a deleted pod whose grace ended before ``since`` (as ``gone_by`` is written)."""
        return "" < self.gone_by < since


@dataclass(frozen=True)
class EngineSample:
    """Counters of one engine process, summed over its metric labels. Bytes and counts."""

    pod: str
    role: str
    loads: int = 0
    load_failures: int = 0
    recomputed_requests: int = 0
    read_bytes: int = 0
    predicted_bytes: int = 0
    leases_expired: int = 0
    failures_by_reason: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Observed:
    """Everything a decision may depend on.

    ``config`` is the model's ``config.json`` from the ConfigMap the service names; when it could
    not be read, ``config_problem`` says why. ``samples`` is None when the metrics were not read in
    this pass, or not all of them.
    """

    resource: Manifest
    children: tuple[Child, ...] = ()
    pods: tuple[Pod, ...] = ()
    config: Mapping[str, Any] | None = None
    config_problem: str = ""
    samples: tuple[EngineSample, ...] | None = None

    @property
    def name(self) -> str:
        """Name of the service."""
        return str(self.resource["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Namespace of the service."""
        return str(self.resource["metadata"]["namespace"])

    @property
    def uid(self) -> str:
        """Uid of the service."""
        return str(self.resource["metadata"]["uid"])

    @property
    def status(self) -> Manifest:
        """Status as last written; empty before the first pass."""
        return self.resource.get("status") or {}

    def child(self, ref: Ref) -> Child | None:
        """The observed child at ``ref``, if there is one."""
        return next((child for child in self.children if child.ref == ref), None)


def controller_uid(manifest: Manifest) -> str | None:
    """Uid of the controlling owner of an object, or None."""
    for owner in manifest["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner["uid"])
    return None


def child_from(manifest: Manifest) -> Child:
    """Read one child from the API server's answer."""
    metadata = manifest["metadata"]
    return Child(Ref(manifest["kind"], metadata["name"]), str(metadata["uid"]), manifest)


def pod_from(manifest: Manifest) -> Pod:
    """Read what matters of one pod from the API server's answer."""
    metadata, status = manifest["metadata"], manifest.get("status") or {}
    labels = metadata.get("labels") or {}
    return Pod(
        name=metadata["name"],
        role=labels.get(names.LABEL_ROLE, ""),
        revision=labels.get(names.LABEL_REVISION, ""),
        ready=any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in status.get("conditions") or ()
        ),
        deleting="deletionTimestamp" in metadata,
        ip=status.get("podIP", ""),
        trouble=_trouble(status),
        # The server sets it to the request plus the grace period.
        gone_by=metadata.get("deletionTimestamp", ""),
        has_owner=bool(metadata.get("ownerReferences")),
    )


def _trouble(status: Manifest) -> str:
    for container in (
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _TROUBLE:
            return f"{waiting['reason']} in container {container['name']}"
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return f"Unschedulable: {condition.get('message', '')}"[:_MESSAGE_CHARACTERS]
    return ""
