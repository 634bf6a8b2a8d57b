"""Parts that engine and router pods share: security, probes, temporary volumes."""

from typing import Final

from hybridpd_operator.kinds import Manifest

UID: Final = 1000
TMP_VOLUME: Final = "tmp"
_PROBE_PERIOD_SECONDS: Final = 10


def pod_security() -> Manifest:
    """Fits the "restricted" pod security standard."""
    return {
        "runAsNonRoot": True,
        "runAsUser": UID,
        "runAsGroup": UID,
        "fsGroup": UID,
        # A volume whose root has the right group already is not walked again file by file.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(*added_capabilities: str) -> Manifest:
    """No privilege, read-only root; RDMA alone needs a capability back."""
    capabilities: Manifest = {"drop": ["ALL"]}
    if added_capabilities:
        capabilities["add"] = list(added_capabilities)
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": capabilities,
    }


def http_probe(path: str, *, timeout_seconds: int, failures: int) -> Manifest:
    """GET ``path`` on the container's http port, every ten seconds."""
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": _PROBE_PERIOD_SECONDS,
        "timeoutSeconds": timeout_seconds,
        "failureThreshold": failures,
    }


def failures_within(budget_seconds: int) -> int:
    """How many failed probes fit a budget, rounded up."""
    return -(-budget_seconds // _PROBE_PERIOD_SECONDS)


def empty_dir(name: str) -> Manifest:
    """A writable volume that lives as long as the pod."""
    return {"name": name, "emptyDir": {}}


def scrape_annotations(port: int) -> dict[str, str]:
    """The annotations many Prometheus installations look for."""
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port),
        "prometheus.io/path": "/metrics",
    }


def host_spread(selector: dict[str, str]) -> list[Manifest]:
    """Prefer different nodes for the pods of one role."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector},
        }
    ]
