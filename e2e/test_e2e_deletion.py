"""Deletion leaves nothing, in both directions of the garbage collector."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import waits
from kubectl import Kubectl, Object
from services import Pair


@pytest.mark.parametrize("cascade", ["background", "foreground"])
def test_a_deleted_service_leaves_nothing(
    kubectl: Kubectl, unscheduled: Callable[..., Object], cascade: str
) -> None:
    name = f"deleted-{cascade}"
    unscheduled(name)
    waits.for_children(kubectl, name)
    kubectl.delete("hpd", name, f"--cascade={cascade}")
    waits.for_nothing_left(kubectl, name)


def test_a_service_deleted_while_the_operator_is_away_leaves_nothing(
    kubectl: Kubectl, operator: Kubectl, unscheduled: Callable[..., Object]
) -> None:
    """No finalizer: nothing waits for an operator that is not there."""
    name = "orphan"
    unscheduled(name)
    waits.for_children(kubectl, name)
    operator.run("scale", "deployment/hybridpd", "--replicas=0")
    try:
        kubectl.delete("hpd", name)
        waits.for_nothing_left(kubectl, name)
    finally:
        operator.run("scale", "deployment/hybridpd", "--replicas=1")
    waits.for_deployment(operator, "hybridpd")


def test_the_real_pair_is_deleted_in_the_foreground_and_leaves_nothing(started: Pair) -> None:
    """Foreground keeps the owner until the last child is gone: an operator that writes meanwhile
    would bring children back and the deletion would never end."""
    waits.for_ready(started.kubectl, started.name)
    started.kubectl.delete("hpd", started.name, "--cascade=foreground")
    waits.for_nothing_left(started.kubectl, started.name, seconds=150)
