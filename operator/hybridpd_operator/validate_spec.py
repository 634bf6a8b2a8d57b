"""Rules that a custom resource alone decides. The CRD has most of them as CEL; this is the same
answer without a cluster, plus what CEL cannot see (abbreviated flags, pod templates).
"""

import re
from collections.abc import Callable, Iterator

from hybridpd_operator.names import (
    ENGINE_ROLES,
    HTTP_PORT,
    ROUTER_METRICS_PORT,
    service_name_problem,
)
from hybridpd_operator.problems import (
    CONFLICTING_FIELDS,
    DRAIN_TOO_SHORT,
    INVALID_FIELD,
    INVALID_NAME,
    MOVING_IMAGE,
    NODE_TOO_SMALL,
    ONE_SIDED_REPLICAS,
    RESERVED_POD_FIELD,
    UNSUPPORTED_VERSION,
    Problem,
)
from hybridpd_operator.reserved_args import (
    OWNED_FLAGS,
    OWNED_ROUTER_FLAGS,
    env_problems,
    flag_problems,
)
from hybridpd_operator.reserved_pod import pod_template_problems
from hybridpd_operator.spec import CPU, Service, Spec
from hybridpd_operator.spec_roles import (
    H200_NODE_GPUS,
    H200_PRODUCTS,
    LEASE_MARGIN_SECONDS,
    EnvVar,
)

Check = Callable[[Service], Iterator[Problem]]

#: vLLM minors whose connector interface can report a failed load of a hybrid model.
SUPPORTED_MINORS = (30, 31, 32, 33)
_VERSION = re.compile(r"^0[.]([0-9]+)([.][0-9]+([.a-z+][.a-z0-9+]*)?)?$")
_BOTH_ROLES = "prefill and spec.decode"


def spec_problems(service: Service) -> tuple[Problem, ...]:
    """Every problem of the resource itself, in the order of `CHECKS`."""
    return tuple(problem for check in CHECKS for problem in check(service))


def check_name(service: Service) -> Iterator[Problem]:
    """Children are named after the service."""
    text = service_name_problem(service.name)
    if text is not None:
        yield Problem(INVALID_NAME, "metadata.name", text.removeprefix("metadata.name: "))


def check_source(service: Service) -> Iterator[Problem]:
    """One source of weights, one source of facts, no way out of the folder."""
    model = service.spec.model
    given = {
        "huggingFace": model.source.hugging_face,
        "persistentVolumeClaim": model.source.persistent_volume_claim,
        "hostPath": model.source.host_path,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        text = f"expected at most one source, got {' and '.join(names)}; remove all but one"
        yield Problem(CONFLICTING_FIELDS, "spec.model.source", text)
    for name in ("persistentVolumeClaim", "hostPath"):
        path = getattr(given[name], "path", None)
        if path is not None and ".." in path.split("/"):
            field = f"spec.model.source.{name}.path"
            text = f"expected a folder without '..', got {path!r}; write the real path"
            yield Problem(INVALID_FIELD, field, text)
    config = model.config
    if config is not None and (config.inline is None) == (config.config_map is None):
        got = "none" if config.inline is None else "both"
        text = f"expected exactly one of inline and configMap, got {got}"
        yield Problem(CONFLICTING_FIELDS, "spec.model.config", text)


def check_version(service: Service) -> Iterator[Problem]:
    """vLLM within the range the connector supports, and the same as the image's tag says."""
    engine = service.spec.engine
    if engine.image is not None and engine.image.endswith(":latest"):
        text = (
            "expected a version tag or a digest, got :latest; a moving tag lets prefill and "
            "decode run different builds"
        )
        yield Problem(MOVING_IMAGE, "spec.engine.image", text)
    stated, tagged = engine.vllm_version, engine.tagged_version
    if stated and tagged and not re.match(re.escape(stated) + r"([^0-9]|$)", tagged):
        text = f"vllmVersion is {stated} and the image's tag says {tagged}; make them equal"
        yield Problem(UNSUPPORTED_VERSION, "spec.engine.vllmVersion", text)
    version = engine.stated_version
    if version is None:
        return
    if minor_of(version) not in SUPPORTED_MINORS:
        field = "spec.engine.vllmVersion" if stated else "spec.engine.image"
        text = (
            f"expected vLLM 0.{SUPPORTED_MINORS[0]} to 0.{SUPPORTED_MINORS[-1]}, got {version}; "
            "use an image with one of these"
        )
        yield Problem(UNSUPPORTED_VERSION, field, text)


def minor_of(version: str) -> int | None:
    """32 of `0.32.0`; None when it is no version of vLLM 0."""
    found = _VERSION.match(version)
    return int(found.group(1)) if found else None


def check_drain(service: Service) -> Iterator[Problem]:
    """preStop + shutdown timeout + 15 fit the grace period; prefill outlives a lease."""
    spec = service.spec
    for name in ENGINE_ROLES:
        drain = spec.role(name).drain
        if drain.termination_grace_period_seconds < drain.least_grace_seconds:
            text = (
                f"expected at least preStopSeconds {drain.pre_stop_seconds} + "
                f"shutdownTimeoutSeconds {drain.shutdown_timeout_seconds} + 15 = "
                f"{drain.least_grace_seconds}, got {drain.termination_grace_period_seconds}; "
                "raise it, or lower the other two"
            )
            field = f"spec.{name}.drain.terminationGracePeriodSeconds"
            yield Problem(DRAIN_TOO_SHORT, field, text)
    least = spec.connector.lease_seconds + LEASE_MARGIN_SECONDS
    timeout = spec.prefill.drain.shutdown_timeout_seconds
    if timeout < least:
        text = (
            f"expected at least connector.leaseSeconds {spec.connector.lease_seconds} + "
            f"{LEASE_MARGIN_SECONDS} = {least}, got {timeout}; raise it, or lower the lease"
        )
        yield Problem(DRAIN_TOO_SHORT, "spec.prefill.drain.shutdownTimeoutSeconds", text)


def check_replicas(service: Service) -> Iterator[Problem]:
    """Both roles run, or both are paused."""
    prefill, decode = service.spec.prefill.replicas, service.spec.decode.replicas
    if (prefill == 0) != (decode == 0):
        text = (
            f"prefill has {prefill} replicas and decode {decode}; one role alone serves nothing: "
            "set both to 0 or both above 0"
        )
        field = "spec.prefill.replicas" if prefill == 0 else "spec.decode.replicas"
        yield Problem(ONE_SIDED_REPLICAS, field, text)


def check_nodes(service: Service) -> Iterator[Problem]:
    """An engine fits one of the nodes that its pods are kept to."""
    for name in ENGINE_ROLES:
        role = service.spec.role(name)
        only_h200 = bool(role.gpu_products) and set(role.gpu_products) <= set(H200_PRODUCTS)
        bound = only_h200 and not role.affinity and service.spec.engine.device != CPU
        if bound and role.tensor_parallel_size > H200_NODE_GPUS:
            text = (
                f"an engine is one pod on one node, and H200 nodes have {H200_NODE_GPUS} GPUs; got "
                f"{role.tensor_parallel_size}: lower it, or name larger nodes in gpuProducts or "
                "affinity"
            )
            yield Problem(NODE_TOO_SMALL, f"spec.{name}.tensorParallelSize", text)


def check_ports(service: Service) -> Iterator[Problem]:
    """The side channel does not sit on the HTTP port."""
    port = service.spec.connector.side_channel_port
    if port == HTTP_PORT:
        text = f"expected another port than the HTTP server's {HTTP_PORT}, got {port}"
        yield Problem(CONFLICTING_FIELDS, "spec.connector.sideChannelPort", text)


def check_resources(service: Service) -> Iterator[Problem]:
    """Accelerators are counted from the TP size, RDMA devices from network.rdma."""
    spec = service.spec
    rdma = spec.network.rdma.resource if spec.network.rdma else None
    for name in ENGINE_ROLES:
        resources = spec.role(name).resources
        for part, amounts in (("requests", resources.requests), ("limits", resources.limits)):
            for key in amounts:
                instead = _device_field(key, spec.engine.gpu_resource_name, rdma, name)
                if instead:
                    text = f"the operator counts {key}; remove it and use {instead}"
                    field = f"spec.{name}.resources.{part}.{key}"
                    yield Problem(RESERVED_POD_FIELD, field, text)


def _device_field(key: str, gpu: str | None, rdma: str | None, role: str) -> str | None:
    if key == gpu or key.startswith("nvidia.com/"):
        return f"spec.{role}.tensorParallelSize (and spec.engine.gpuResource for its name)"
    return "spec.network.rdma.count" if key == rdma else None


def check_args(service: Service) -> Iterator[Problem]:
    """No flag that the operator renders."""
    spec = service.spec
    yield from flag_problems(spec.engine.extra_args, "spec.engine.extraArgs", _BOTH_ROLES)
    for name in ENGINE_ROLES:
        path = f"spec.{name}.extraArgs"
        yield from flag_problems(spec.role(name).extra_args, path, name, OWNED_FLAGS)
    yield from flag_problems(
        spec.router.extra_args, "spec.router.extraArgs", "router", OWNED_ROUTER_FLAGS
    )


def check_env(service: Service) -> Iterator[Problem]:
    """No variable that the operator renders, and one meaning per variable."""
    for path, env in _env_lists(service.spec):
        if path != "spec.router.env":
            yield from env_problems(env, path)
        for i, variable in enumerate(env):
            if variable.value is not None and variable.value_from is not None:
                text = "expected value or valueFrom, got both; remove one"
                yield Problem(CONFLICTING_FIELDS, f"{path}[{i}]", text)


def _env_lists(spec: Spec) -> Iterator[tuple[str, tuple[EnvVar, ...]]]:
    yield "spec.engine.env", spec.engine.env
    for name in ENGINE_ROLES:
        yield f"spec.{name}.env", spec.role(name).env
    yield "spec.router.env", spec.router.env


def check_pod_templates(service: Service) -> Iterator[Problem]:
    """No pod template that changes what the operator renders."""
    spec = service.spec
    engine_ports = (HTTP_PORT, spec.connector.side_channel_port)
    for name in ENGINE_ROLES:
        template = spec.role(name).pod_template
        if template is not None:
            yield from pod_template_problems(template, name, engine_ports)
    if spec.router.pod_template is not None:
        ports = (HTTP_PORT, ROUTER_METRICS_PORT)
        yield from pod_template_problems(spec.router.pod_template, "router", ports)


#: The checks in the order in which a reader meets the fields.
CHECKS: tuple[Check, ...] = (
    check_name,
    check_source,
    check_version,
    check_ports,
    check_replicas,
    check_nodes,
    check_drain,
    check_resources,
    check_args,
    check_env,
    check_pod_templates,
)
