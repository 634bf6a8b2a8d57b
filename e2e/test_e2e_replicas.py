"""An edit of replicas reaches one StatefulSet and leaves everything else as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import waits
from kubectl import Kubectl, Object

WRITTEN = (
    "statefulsets,deployments,services,serviceaccounts,roles,rolebindings,poddisruptionbudgets"
)


def specs(kubectl: Kubectl, name: str) -> dict[str, tuple[str, int]]:
    """Kind/name → (uid, generation or 0) of every child."""
    return {
        f"{c['kind']}/{c['metadata']['name']}": (
            c["metadata"]["uid"],
            c["metadata"].get("generation", 0),
        )
        for c in kubectl.find(WRITTEN, waits.selector_of(name))
    }


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_replicas_touch_only_that_stateful_set(
    kubectl: Kubectl, unscheduled: Callable[..., Object], role: str
) -> None:
    name = f"scaled-{role}"
    unscheduled(name)
    waits.for_children(kubectl, name)
    before = specs(kubectl, name)
    pods = {pod["metadata"]["uid"] for pod in kubectl.find("pods", waits.selector_of(name))}
    kubectl.merge("hpd", name, {"spec": {role: {"replicas": 2}}})

    def scaled() -> tuple[bool, list[int]]:
        chosen = f"{waits.selector_of(name)},hybridpd.dev/role={role}"
        counts = [sts["spec"]["replicas"] for sts in kubectl.find("statefulsets", chosen)]
        return counts == [2], counts

    waits.until(f"{name}: two replicas", scaled, waits.OPERATOR_SECONDS)
    after = specs(kubectl, name)
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert len(changed) == 1, changed
    assert changed.pop().startswith(f"StatefulSet/{name}-{role}-")
    still = {pod["metadata"]["uid"] for pod in kubectl.find("pods", waits.selector_of(name))}
    assert pods <= still
