"""The router's Deployment: vllm-router with Kubernetes discovery, one per revision."""

from typing import Final

from hybridpd_operator import kinds, names
from hybridpd_operator.kinds import Manifest
from hybridpd_operator.manifests import placement, pod_parts
from hybridpd_operator.manifests.context import Context, child
from hybridpd_operator.manifests.engine_env import by_name
from hybridpd_operator.manifests.merge import merge

COMMAND: Final = ("python3", "-m", "vllm_router.launch_router")
#: Seconds a router still takes requests after it was told to end: endpoints need to hear of it.
PRE_STOP_SECONDS: Final = 5
_GRACE_MARGIN_SECONDS: Final = 15
_PROBE_TIMEOUT_SECONDS: Final = 5
_PROBE_FAILURES: Final = 3
_STARTUP_BUDGET_SECONDS: Final = 120
_DISCOVERY_INTERVAL_SECONDS: Final = 5


def arguments(context: Context) -> list[str]:
    """Arguments of the router. Both selectors name the revision: it can never mix two."""
    spec = context.spec
    return [
        *("--host", "0.0.0.0"),  # noqa: S104  (the pod's own network namespace)
        *("--port", str(names.HTTP_PORT)),
        "--vllm-pd-disaggregation",
        "--service-discovery",
        *("--service-discovery-namespace", context.service.namespace),
        *("--service-discovery-port", str(names.HTTP_PORT)),
        "--prefill-selector",
        *_selector(context, names.PREFILL),
        "--decode-selector",
        *_selector(context, names.DECODE),
        *("--kv-connector", "nixl"),
        *("--policy", spec.router.policy_flag),
        *("--prometheus-host", "0.0.0.0"),  # noqa: S104
        *("--prometheus-port", str(names.ROUTER_METRICS_PORT)),
        *("--log-level", spec.observability.log_level.lower()),
        *spec.router.extra_args,
    ]


def deployment(context: Context) -> Manifest:
    """The router of one revision. It keeps no KV state, so it rolls as Deployments do."""
    name = names.revisioned(context.name, names.ROUTER, context.revision)
    labels = names.role_labels(context.name, names.ROUTER, context.revision)
    return {
        **child(context, kinds.DEPLOYMENT, name, labels),
        "spec": {
            "replicas": context.spec.router.replicas,
            "revisionHistoryLimit": 1,
            "progressDeadlineSeconds": _progress_deadline_seconds(context),
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
            },
            "selector": {
                "matchLabels": names.selector_labels(context.name, names.ROUTER, context.revision)
            },
            "template": _template(context),
        },
    }


def _selector(context: Context, role: str) -> list[str]:
    labels = names.selector_labels(context.name, role, context.revision)
    return [f"{key}={labels[key]}" for key in sorted(labels)]


def _progress_deadline_seconds(context: Context) -> int:
    """The router turns ready with the engines, so it may take as long as they do."""
    spec = context.spec
    slowest = max(spec.prefill.load_budget_seconds, spec.decode.load_budget_seconds)
    return slowest + _STARTUP_BUDGET_SECONDS


def _template(context: Context) -> Manifest:
    owned = _owned(context)
    base = merge(_defaults(context), owned)
    return merge(merge(base, context.spec.router.pod_template or {}), owned)


def _owned(context: Context) -> Manifest:
    return {
        "metadata": {"labels": names.role_labels(context.name, names.ROUTER, context.revision)},
        "spec": {
            "serviceAccountName": names.router_account(context.name),
            "automountServiceAccountToken": True,
            "enableServiceLinks": False,
            "containers": [
                {
                    "name": names.ROUTER_CONTAINER,
                    "image": context.router_image,
                    "command": list(COMMAND),
                    "args": arguments(context),
                    "ports": [
                        {
                            "name": "http",
                            "containerPort": names.HTTP_PORT,
                            "protocol": "TCP",
                        },
                        {
                            "name": "metrics",
                            "containerPort": names.ROUTER_METRICS_PORT,
                            "protocol": "TCP",
                        },
                    ],
                }
            ],
        },
    }


def _defaults(context: Context) -> Manifest:
    router, drain = context.spec.router, context.spec.decode.drain
    resources = {
        "requests": dict(router.resources.requests),
        "limits": dict(router.resources.limits),
    }
    spec: Manifest = {
        "securityContext": pod_parts.pod_security(),
        # A stream lives as long as the engine may take to finish it.
        "terminationGracePeriodSeconds": PRE_STOP_SECONDS
        + drain.shutdown_timeout_seconds
        + _GRACE_MARGIN_SECONDS,
        "containers": [
            {
                "name": names.ROUTER_CONTAINER,
                "imagePullPolicy": router.image_pull_policy or context.images.router_pull_policy,
                "env": by_name(
                    {"name": "HOME", "value": "/tmp"},  # noqa: S108
                    *(entry.to_pod() for entry in router.env),
                ),
                "resources": {key: value for key, value in resources.items() if value},
                "securityContext": pod_parts.container_security(),
                "volumeMounts": [{"name": pod_parts.TMP_VOLUME, "mountPath": "/tmp"}],  # noqa: S108
                "startupProbe": pod_parts.http_probe(
                    "/liveness",
                    timeout_seconds=_PROBE_TIMEOUT_SECONDS,
                    failures=pod_parts.failures_within(_STARTUP_BUDGET_SECONDS),
                ),
                "readinessProbe": pod_parts.http_probe(
                    "/readiness", timeout_seconds=_PROBE_TIMEOUT_SECONDS, failures=_PROBE_FAILURES
                ),
                "livenessProbe": pod_parts.http_probe(
                    "/liveness", timeout_seconds=_PROBE_TIMEOUT_SECONDS, failures=_PROBE_FAILURES
                ),
                "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
            }
        ],
        "volumes": [pod_parts.empty_dir(pod_parts.TMP_VOLUME)],
        "topologySpreadConstraints": pod_parts.host_spread(
            names.selector_labels(context.name, names.ROUTER, context.revision)
        ),
        **placement.of_router(router),
    }
    if context.pull_secrets:
        spec["imagePullSecrets"] = context.pull_secrets
    metadata: Manifest = {}
    if context.spec.observability.scrape_annotations:
        metadata["annotations"] = pod_parts.scrape_annotations(names.ROUTER_METRICS_PORT)
    return {"metadata": metadata, "spec": spec}
