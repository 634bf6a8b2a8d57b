"""Shows how a service turns Ready: one line whenever its conditions change."""

from __future__ import annotations

import time

import waits
from kubectl import Kubectl, Object

SHOWN = ("Compatible", "PrefillReady", "DecodeReady", "RouterReady", "Ready")


def follow_until_ready(
    kubectl: Kubectl, name: str, seconds: float = waits.ENGINE_START_SECONDS
) -> Object:
    """Wait for Ready and print each change on the way; WaitError when it does not come."""
    started = time.monotonic()
    last = ""

    def probe() -> tuple[bool, Object | str]:
        nonlocal last
        service = kubectl.get("hpd", name)
        line = "  ".join(f"{kind}={waits.condition(service, kind)['status']}" for kind in SHOWN)
        if line != last:
            print(f"   {time.monotonic() - started:4.0f} s  {line}", flush=True)
            last = line
        ready = waits.condition(service, "Ready")["status"] == "True"
        if service is not None and ready and waits.observed(service):
            return True, service
        return False, waits.summary(service)

    service = waits.until(f"{name}: Ready", probe, seconds)
    assert isinstance(service, dict)
    return service
