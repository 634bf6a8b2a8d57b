"""The engine's environment: what we own, what we suggest, and the user's between the two."""

from collections.abc import Iterable
from typing import Final

from hybridpd_operator import names
from hybridpd_operator.kinds import Manifest
from hybridpd_operator.manifests.context import Context

#: A writable home for caches: the root file system is read-only.
HOME: Final = "/home/hybridpd"
PYTHON_PATH: Final = "PYTHONPATH"
_USER_PYTHON_PATH: Final = "HYBRIDPD_USER_PYTHONPATH"


def owned(context: Context) -> list[Manifest]:
    """What a hand-over depends on; the API refuses these names in ``env`` and ``podTemplate``."""
    spec = context.spec
    entries: list[Manifest] = [
        # Hybrid state can be cut by rank only in this layout; vLLM wants it on both roles.
        {"name": "VLLM_SSM_CONV_STATE_LAYOUT", "value": "DS"},
        # Bind address and advertised address are one setting: it has to be the pod's.
        _from_pod("VLLM_NIXL_SIDE_CHANNEL_HOST", "status.podIP"),
        {
            "name": "VLLM_NIXL_SIDE_CHANNEL_PORT",
            "value": str(spec.connector.side_channel_port),
        },
        {"name": "VLLM_LOGGING_LEVEL", "value": spec.observability.log_level},
        _from_pod("POD_IP", "status.podIP"),
        _from_pod("POD_NAME", "metadata.name"),
        _from_pod("NODE_NAME", "spec.nodeName"),
    ]
    hub = spec.model.source.hugging_face
    if hub and hub.token_secret:
        secret = {"name": hub.token_secret.name, "key": hub.token_secret.key}
        entries.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}})
    if spec.network.ucx.transports:
        entries.append({"name": "UCX_TLS", "value": ",".join(spec.network.ucx.transports)})
    if spec.network.ucx.net_devices:
        entries.append({"name": "UCX_NET_DEVICES", "value": ",".join(spec.network.ucx.net_devices)})
    return entries


def suggested(context: Context) -> list[Manifest]:
    """Defaults that a user's entry of the same name replaces."""
    entries: list[Manifest] = [
        {"name": "HOME", "value": HOME},
        # The uid has no entry in the image's passwd; libraries ask for the user's name.
        {"name": "USER", "value": "hybridpd"},
        {"name": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "value": "120"},
        # Without pipelining a read between two pods of one node takes a far slower path.
        {"name": "UCX_RMA_PPLN_ENABLE", "value": "y"},
    ]
    if context.spec.engine.gpu_resource_name:
        # Where GPUs have no NVLink UCX would read over TCP instead of CUDA's own way.
        entries.append({"name": "UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "value": "y"})
    return entries


def environment(context: Context, role: str) -> list[Manifest]:
    """Suggested, then the service's, then the role's, then owned: later ones of a name win."""
    spec = context.spec
    return by_name(
        *suggested(context),
        *(entry.to_pod() for entry in spec.engine.env),
        *(entry.to_pod() for entry in context.role(role).env),
        *owned(context),
    )


def by_name(*entries: Manifest) -> list[Manifest]:
    """Each name once, at its first place, with its last value."""
    return list({entry["name"]: entry for entry in entries}.values())


def with_python_path(entries: Iterable[Manifest]) -> list[Manifest]:
    """Put the connector's folder on PYTHONPATH, behind whatever the user has there.

    Runs after the pod template was merged, so that a path set there is kept as well. A path that
    comes from a reference is moved to a name of its own, which the kubelet expands.
    """
    result: list[Manifest] = []
    path = names.CONNECTOR_PYTHON_PATH
    for entry in entries:
        if entry["name"] in (PYTHON_PATH, _USER_PYTHON_PATH):
            if "valueFrom" in entry:
                result.append({"name": _USER_PYTHON_PATH, "valueFrom": entry["valueFrom"]})
                path = f"$({_USER_PYTHON_PATH}):{path}"
            elif entry.get("value"):
                path = f"{entry['value']}:{path}"
        else:
            result.append(entry)
    return [*result, {"name": PYTHON_PATH, "value": path}]


def _from_pod(name: str, field: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": field}}}
