"""Named waits. Each says which race it closes, and on failure what it last saw."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kubectl import Kubectl, KubectlError, Object

PAUSE_SECONDS = 1.0
ENGINE_START_SECONDS = 420  # nothing compiled yet, two cores shared by two engines
OPERATOR_SECONDS = 90
CHILD_KINDS = (
    "statefulsets,deployments,services,serviceaccounts,roles,rolebindings,poddisruptionbudgets"
)


class WaitError(AssertionError):
    """A wait ran out; the message holds what was last seen."""


def until(what: str, probe: Callable[[], tuple[bool, Any]], seconds: float) -> Any:
    """Ask `probe` until its first value is true and give its second; WaitError after `seconds`.

    A kubectl that fails meanwhile counts as "not yet": the API server may be busy.
    """
    deadline = time.monotonic() + seconds
    last: Any = None
    while True:
        try:
            done, last = probe()
        except KubectlError as error:
            done, last = False, error
        if done:
            return last
        if time.monotonic() >= deadline:
            raise WaitError(f"{what}: not within {seconds:.0f} s; last seen: {last}")
        time.sleep(PAUSE_SECONDS)


def selector_of(name: str) -> str:
    """Selects every child of one HybridPDService."""
    return f"hybridpd.dev/service={name}"


def condition(service: Object | None, kind: str) -> Object:
    """A condition of a service; status `Absent` when it has none."""
    status = (service or {}).get("status", {})
    for entry in status.get("conditions", []):
        if entry["type"] == kind:
            return dict(entry)
    return {"type": kind, "status": "Absent", "reason": "", "message": ""}


def observed(service: Object | None) -> bool:
    """Whether the status speaks about the spec as it is now."""
    if service is None:
        return False
    seen = service.get("status", {}).get("observedGeneration")
    return bool(seen == service["metadata"]["generation"])


def summary(service: Object | None) -> str:
    """Conditions in one line, for messages."""
    if service is None:
        return "no such service"
    status = service.get("status", {})
    parts = [f"{c['type']}={c['status']}({c['reason']})" for c in status.get("conditions", [])]
    return f"generation {service['metadata']['generation']}, status {' '.join(parts) or 'empty'}"


def for_condition(
    kubectl: Kubectl, name: str, kind: str, status: str, seconds: float = OPERATOR_SECONDS
) -> Object:
    """A condition at the current generation.

    Race: right after an edit the old status still stands, and may already hold the value sought.
    """

    def probe() -> tuple[bool, Any]:
        service = kubectl.get("hpd", name)
        reached = observed(service) and condition(service, kind)["status"] == status
        return reached, service if reached else summary(service)

    found: Object = until(f"{name}: {kind}={status}", probe, seconds)
    return found


def for_ready(kubectl: Kubectl, name: str, seconds: float = ENGINE_START_SECONDS) -> Object:
    """Ready at the current generation with nothing left to do.

    Race: Ready of the old pair, seen between an edit and the operator's first look at it.
    """

    def probe() -> tuple[bool, Any]:
        service = kubectl.get("hpd", name)
        reached = (
            observed(service)
            and condition(service, "Ready")["status"] == "True"
            and condition(service, "Reconciling")["status"] != "True"
        )
        return reached, service if reached else summary(service)

    found: Object = until(f"{name}: Ready", probe, seconds)
    return found


def for_children(kubectl: Kubectl, name: str, seconds: float = OPERATOR_SECONDS) -> list[Object]:
    """Both StatefulSets and a router Deployment of exactly one revision.

    Race: children appear one by one, and an old revision's may still be there beside them.
    """

    def probe() -> tuple[bool, Any]:
        children = kubectl.find(CHILD_KINDS, selector_of(name))
        workloads = [c for c in children if c["kind"] in ("StatefulSet", "Deployment")]
        roles = sorted(c["metadata"]["labels"]["hybridpd.dev/role"] for c in workloads)
        revisions = {c["metadata"]["labels"].get("hybridpd.dev/revision") for c in workloads}
        whole = roles == ["decode", "prefill", "router"] and len(revisions) == 1
        return whole, children if whole else f"{roles} at revisions {revisions}"

    found: list[Object] = until(f"{name}: children of one revision", probe, seconds)
    return found


def for_nothing_left(kubectl: Kubectl, name: str, seconds: float = OPERATOR_SECONDS) -> None:
    """The service and every child and pod are gone.

    Race: the owner disappears before the garbage collector has reached its children.
    """

    def probe() -> tuple[bool, Any]:
        left = kubectl.find(f"{CHILD_KINDS},pods", selector_of(name))
        names = [f"{item['kind']}/{item['metadata']['name']}" for item in left]
        if kubectl.get("hpd", name):
            names.append(f"HybridPDService/{name}")
        return not names, names

    until(f"{name}: nothing left", probe, seconds)


def for_deployment(kubectl: Kubectl, name: str, seconds: float = OPERATOR_SECONDS) -> Object:
    """A Deployment whose newest template is the only one running and available.

    Race: an upgrade's old pod still answers while the new one starts.
    """

    def probe() -> tuple[bool, Any]:
        deployment = kubectl.get("deployment", name) or {}
        status = deployment.get("status", {})
        wanted = deployment.get("spec", {}).get("replicas")
        done = status.get("observedGeneration") == deployment.get("metadata", {}).get(
            "generation"
        ) and wanted == status.get("availableReplicas") == status.get(
            "updatedReplicas"
        ) == status.get("replicas")
        return done, deployment if done else status

    found: Object = until(f"deployment {name}: available", probe, seconds)
    return found


def for_pod_ready(kubectl: Kubectl, name: str, seconds: float = ENGINE_START_SECONDS) -> Object:
    """One pod is Ready; WaitError at once when it can never be."""

    def probe() -> tuple[bool, Any]:
        pod = kubectl.get("pod", name) or {}
        status = pod.get("status", {})
        if status.get("phase") in ("Failed", "Succeeded"):
            raise WaitError(f"pod {name}: ended with {status}")
        ready = any(
            entry["type"] == "Ready" and entry["status"] == "True"
            for entry in status.get("conditions", [])
        )
        return ready, pod if ready else status.get("containerStatuses", status.get("phase"))

    found: Object = until(f"pod {name}: Ready", probe, seconds)
    return found


def for_pod_replaced(kubectl: Kubectl, name: str, old_uid: str, seconds: float = 120) -> Object:
    """A StatefulSet pod exists again under its name with another identity.

    Race: the name never disappears, so its presence alone says nothing.
    """

    def probe() -> tuple[bool, Any]:
        pod = kubectl.get("pod", name)
        uid = pod["metadata"]["uid"] if pod else None
        return uid not in (None, old_uid), pod if uid != old_uid else f"still {old_uid}"

    found: Object = until(f"pod {name}: replaced", probe, seconds)
    return found
