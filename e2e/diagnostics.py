"""What to look at after a failure, as text. Called on failures only."""

from __future__ import annotations

import release
from kubectl import Kubectl, KubectlError

LOG_LINES = 40


def report(kubectl: Kubectl) -> str:
    """Services, pods, events and the last log lines of operator and engines."""
    operator = kubectl.within(release.NAMESPACE)
    parts = [
        _section("services", kubectl, "get", "hpd", "-o", "yaml"),
        _section("objects", kubectl, "get", "pods,sts,deploy,svc", "-o", "wide", "--show-labels"),
        _section("events", kubectl, "get", "events", "--sort-by=.lastTimestamp"),
        _section(
            "operator", operator, "logs", f"deploy/{release.DEPLOYMENT}", f"--tail={LOG_LINES}"
        ),
    ]
    parts += [
        _section(f"log of {pod}", kubectl, "logs", pod, "--tail=25") for pod in _pods(kubectl)
    ]
    return "\n".join(parts)


def _pods(kubectl: Kubectl) -> list[str]:
    try:
        return kubectl.run("get", "pods", "-o", "name").split()
    except KubectlError:
        return []


def _section(title: str, kubectl: Kubectl, *arguments: str) -> str:
    try:
        text = kubectl.run(*arguments, seconds=20)
    except KubectlError as error:
        text = str(error)
    lines = text.splitlines()
    kept = lines if len(lines) <= 120 else [*lines[:60], "…", *lines[-60:]]
    return "\n".join([f"--- {title}", *kept])
