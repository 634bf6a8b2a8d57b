"""Pod template of an engine: one vLLM process tree, the connector brought by an init container."""

from collections.abc import Sequence
from typing import Any, Final

from hybridpd_operator import names
from hybridpd_operator.kinds import Manifest
from hybridpd_operator.manifests import engine_command, engine_env, placement, pod_parts
from hybridpd_operator.manifests.context import Context
from hybridpd_operator.manifests.merge import merge
from hybridpd_operator.spec_roles import Role

_HOME_VOLUME: Final = "home"
_SHM_VOLUME: Final = "shm"
#: Ready must survive a busy machine: the router drops a pod that turns NotReady at once.
_PROBE_TIMEOUT_SECONDS: Final = 10
_READINESS_FAILURES: Final = 3
_LIVENESS_FAILURES: Final = 6


def template(context: Context, role: str) -> Manifest:
    """The role's pod template: defaults, the user's patch, and what we own on top again."""
    owned = _owned(context, role)
    base = merge(_defaults(context, role), owned)
    patched = merge(merge(base, context.role(role).pod_template or {}), owned)
    for container in patched["spec"]["containers"]:
        if container["name"] == names.ENGINE_CONTAINER:
            container["env"] = engine_env.with_python_path(container["env"])
    return patched


def _owned(context: Context, role: str) -> Manifest:
    """What the hand-over, the selectors and the rollout depend on; no patch takes it away."""
    engine: Manifest = {
        "name": names.ENGINE_CONTAINER,
        "image": context.engine_image,
        "command": list(engine_command.COMMAND),
        "args": engine_command.arguments(context, role),
        "env": engine_env.owned(context),
        "ports": [
            {"name": "http", "containerPort": names.HTTP_PORT, "protocol": "TCP"},
            {
                "name": "nixl",
                "containerPort": context.spec.connector.side_channel_port,
                "protocol": "TCP",
            },
        ],
        "volumeMounts": [
            {
                "name": names.CONNECTOR_VOLUME,
                "mountPath": names.CONNECTOR_PYTHON_PATH,
                "readOnly": True,
            },
            *_key_mounts(context),
        ],
    }
    return {
        "metadata": {"labels": names.role_labels(context.name, role, context.revision)},
        "spec": {
            "serviceAccountName": names.engine_account(context.name),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "initContainers": [_connector(context)],
            "containers": [engine],
            "volumes": [pod_parts.empty_dir(names.CONNECTOR_VOLUME), *_key_volumes(context)],
        },
    }


def _key_mounts(context: Context) -> Sequence[Manifest]:
    if context.spec.connector.side_channel_key_secret is None:
        return ()
    # The folder, not the file: the kubelet replaces its content when the Secret changes.
    mount = {"mountPath": names.SIDE_CHANNEL_KEY_FOLDER, "readOnly": True}
    return ({"name": names.SIDE_CHANNEL_KEY_VOLUME, **mount},)


def _key_volumes(context: Context) -> Sequence[Manifest]:
    """The kubelet reads the Secret, never the operator. Mode: for root and the pod's group."""
    secret = context.spec.connector.side_channel_key_secret
    if secret is None:
        return ()
    source: Manifest = {
        "secretName": secret.name,
        "items": [{"key": secret.key, "path": names.SIDE_CHANNEL_KEY_FILE}],
        "defaultMode": 0o440,
    }
    return ({"name": names.SIDE_CHANNEL_KEY_VOLUME, "secret": source},)


def _connector(context: Context) -> Manifest:
    """Copies the connector's packages; small and Guaranteed, so it never lowers the pod's QoS."""
    resources = {"cpu": "100m", "memory": "128Mi"}
    return {
        "name": names.CONNECTOR_CONTAINER,
        "image": context.connector_image,
        "imagePullPolicy": context.spec.connector.image_pull_policy
        or context.images.connector_pull_policy,
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": pod_parts.container_security(),
        "volumeMounts": [
            {"name": names.CONNECTOR_VOLUME, "mountPath": names.CONNECTOR_PYTHON_PATH}
        ],
    }


def _defaults(context: Context, role: str) -> Manifest:
    side = context.role(role)
    spec: Manifest = {
        "securityContext": pod_parts.pod_security(),
        "terminationGracePeriodSeconds": side.drain.termination_grace_period_seconds,
        "containers": [_engine_defaults(context, role, side)],
        "volumes": _volumes(context, side),
        "topologySpreadConstraints": pod_parts.host_spread(
            names.selector_labels(context.name, role, context.revision)
        ),
        **placement.of_engine(context.spec, side),
    }
    if context.pull_secrets:
        spec["imagePullSecrets"] = context.pull_secrets
    metadata: Manifest = {}
    if context.spec.observability.scrape_annotations:
        metadata["annotations"] = pod_parts.scrape_annotations(names.HTTP_PORT)
    return {"metadata": metadata, "spec": spec}


def _engine_defaults(context: Context, role: str, side: Role) -> Manifest:
    spec = context.spec
    container: Manifest = {
        "name": names.ENGINE_CONTAINER,
        "imagePullPolicy": spec.engine.image_pull_policy or context.images.engine_pull_policy,
        "env": engine_env.environment(context, role),
        "resources": _resources(context, side),
        "securityContext": pod_parts.container_security(
            *(("IPC_LOCK",) if spec.network.rdma else ())
        ),
        "volumeMounts": [
            {"name": pod_parts.TMP_VOLUME, "mountPath": "/tmp"},  # noqa: S108
            {"name": _HOME_VOLUME, "mountPath": engine_env.HOME},
            {"name": _SHM_VOLUME, "mountPath": "/dev/shm"},  # noqa: S108
            *_model_mounts(context),
        ],
        # The port opens when the model is loaded: the budget is the load time.
        "startupProbe": pod_parts.http_probe(
            "/health",
            timeout_seconds=_PROBE_TIMEOUT_SECONDS,
            failures=pod_parts.failures_within(side.load_budget_seconds),
        ),
        "readinessProbe": pod_parts.http_probe(
            "/health", timeout_seconds=_PROBE_TIMEOUT_SECONDS, failures=_READINESS_FAILURES
        ),
        "livenessProbe": pod_parts.http_probe(
            "/health", timeout_seconds=_PROBE_TIMEOUT_SECONDS, failures=_LIVENESS_FAILURES
        ),
    }
    if side.drain.pre_stop_seconds:
        # The router stops sending while the engine still answers; then SIGTERM drains it.
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": side.drain.pre_stop_seconds}}}
    return container


def _resources(context: Context, side: Role) -> Manifest:
    """The user's CPU and memory; accelerators and RDMA devices counted from the TP size."""
    devices: dict[str, str] = {}
    gpu = context.spec.engine.gpu_resource_name
    if gpu:
        devices[gpu] = str(side.tensor_parallel_size)
    rdma = context.spec.network.rdma
    if rdma:
        devices[rdma.resource] = str(rdma.count or side.tensor_parallel_size)
    resources = {
        "requests": {**side.resources.requests, **devices},
        "limits": {**side.resources.limits, **devices},
    }
    return {key: value for key, value in resources.items() if value}


def _volumes(context: Context, side: Role) -> list[Manifest]:
    return [
        pod_parts.empty_dir(pod_parts.TMP_VOLUME),
        pod_parts.empty_dir(_HOME_VOLUME),
        {
            "name": _SHM_VOLUME,
            "emptyDir": {"medium": "Memory", "sizeLimit": f"{side.shared_memory_gib}Gi"},
        },
        *_model_volumes(context),
    ]


def _model_volumes(context: Context) -> list[Manifest]:
    source = context.spec.model.source
    if source.persistent_volume_claim:
        claim: dict[str, Any] = {
            "claimName": source.persistent_volume_claim.claim_name,
            "readOnly": True,
        }
        return [{"name": names.MODEL_VOLUME, "persistentVolumeClaim": claim}]
    if source.host_path:
        host_path = {"path": source.host_path.path, "type": "Directory"}
        return [{"name": names.MODEL_VOLUME, "hostPath": host_path}]
    return []


def _model_mounts(context: Context) -> Sequence[Manifest]:
    source = context.spec.model.source
    if not source.is_local:
        return ()
    mount: Manifest = {
        "name": names.MODEL_VOLUME,
        "mountPath": names.MODEL_PATH,
        "readOnly": True,
    }
    if source.persistent_volume_claim and source.persistent_volume_claim.path:
        mount["subPath"] = source.persistent_volume_claim.path
    return (mount,)
