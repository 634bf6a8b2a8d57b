"""Events on transitions: what changed between two statuses that a person should read. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hybridpd_operator import names
from hybridpd_operator.kinds import EVENT, Manifest
from hybridpd_operator.problems import NO_FACTS
from hybridpd_operator.status import condition

NORMAL: Final = "Normal"
WARNING: Final = "Warning"
_MESSAGE_CHARACTERS: Final = 1024


@dataclass(frozen=True)
class Notice:
    """One event about a service."""

    kind: str
    reason: str
    message: str


def notices(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Notice, ...]:
    """What to say about the step from one status to the next; nothing for an equal one."""
    return tuple(_notices(before, after))


def _notices(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Notice]:
    for kind, tell in _TELLERS.items():
        new, old = condition(after, kind), condition(before, kind)
        if new is None or (old and _told(old) == _told(new)):
            continue
        level = tell(old["status"] if old else "", new)
        if level:
            yield Notice(level, _reason(kind, new), str(new["message"])[:_MESSAGE_CHARACTERS])


def _told(one: Mapping[str, Any]) -> tuple[str, str]:
    """What makes two states of a condition the same news."""
    return str(one["status"]), str(one["reason"])


def _reason(kind: str, new: Mapping[str, Any]) -> str:
    """The condition's reason says it, except where it would be a bare "Ready" or "Valid"."""
    if new["status"] == "True" and kind in ("Ready", "KVTransferVerified"):
        return kind
    return str(new["reason"])


def _compatible(_: str, new: Mapping[str, Any]) -> str:
    """A pair that cannot work stalls the service and is told there."""
    return WARNING if new["reason"] == NO_FACTS else ""


def _ready(old_status: str, new: Mapping[str, Any]) -> str:
    if new["status"] == "True":
        return NORMAL
    return WARNING if old_status == "True" else ""


def _verified(_: str, new: Mapping[str, Any]) -> str:
    return {"True": NORMAL, "False": WARNING}.get(str(new["status"]), "")


def _reconciling(_: str, new: Mapping[str, Any]) -> str:
    return NORMAL if new["status"] == "True" else ""


def _stalled(_: str, new: Mapping[str, Any]) -> str:
    return WARNING if new["status"] == "True" else ""


_TELLERS: Final = {
    "Compatible": _compatible,
    "Stalled": _stalled,
    "Reconciling": _reconciling,
    "Ready": _ready,
    "KVTransferVerified": _verified,
}


def event(notice: Notice, resource: Manifest, now: str) -> Manifest:
    """A core/v1 Event about ``resource``. The server completes ``generateName``."""
    metadata = resource["metadata"]
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {
            "generateName": f"{metadata['name']}.",
            "namespace": metadata["namespace"],
        },
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "resourceVersion": metadata.get("resourceVersion", ""),
        },
        "type": notice.kind,
        "reason": notice.reason,
        "message": notice.message,
        "source": {"component": "hybridpd-operator"},
        "reportingComponent": "hybridpd.dev/operator",
        "reportingInstance": "hybridpd-operator",
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
