"""Dataclasses for the pods of a service: prefill, decode, router, and what they share."""

# ruff: noqa: RUF009  (`put` is `dataclasses.field` with a kind: nothing mutable is shared)

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridpd_operator.spec_fields import (
    Choice,
    Integer,
    Items,
    Nested,
    Quantity,
    Raw,
    Table,
    Text,
    put,
    put_object,
)

#: Node label values of `nvidia.com/gpu.product` that the default node affinity accepts.
H200_PRODUCTS = ("NVIDIA-H200", "NVIDIA-H200-NVL")
H200_NODE_GPUS = 8
#: The taint that GPU nodes usually carry.
GPU_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
PULL_POLICIES = ("Always", "IfNotPresent", "Never")
#: A reference that names a tag or a digest. A bare repository would mean `:latest`.
IMAGE_PATTERN = r"^[a-z0-9][^\s@]*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}|@sha256:[a-f0-9]{64})$"
#: A name of a Secret, ConfigMap or claim: labels of RFC 1123, joined by dots.
DNS_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
#: Seconds the pod still has after preStop and drain, to kill what is left and tear down.
GRACE_MARGIN_SECONDS = 15
#: Seconds prefill drains longer than a lease, so that the last reader's release arrives.
LEASE_MARGIN_SECONDS = 5

IMAGE = Text(512, pattern=IMAGE_PATTERN)
PULL_POLICY = Choice(PULL_POLICIES)


@dataclass(frozen=True)
class EnvVar:
    """One environment variable: a value, or a Kubernetes `valueFrom` passed through."""

    name: str = put(Text(256, pattern=ENV_NAME))
    value: str | None = put(Text(32768, min_length=0), None)
    value_from: Mapping[str, Any] | None = put(Raw(), None)

    def to_pod(self) -> dict[str, Any]:
        """The entry as a container's `env` list wants it."""
        if self.value_from is not None:
            return {"name": self.name, "valueFrom": dict(self.value_from)}
        return {"name": self.name, "value": self.value or ""}


EXTRA_ARGS = Items(Text(1024), 64)
ENV = Items(Nested(EnvVar), 64, key="name")


@dataclass(frozen=True)
class Resources:
    """CPU, memory and other resources of a container. GPUs come from `tensorParallelSize`."""

    requests: Mapping[str, str] = put(Table(Quantity(), 16), {})
    limits: Mapping[str, str] = put(Table(Quantity(), 16), {})


@dataclass(frozen=True)
class Drain:
    """How a pod of a role stops: leave the router, finish what runs, end.

    `terminationGracePeriodSeconds >= preStopSeconds + shutdownTimeoutSeconds + 15`.
    """

    pre_stop_seconds: int = put(Integer(0, 600), 15)
    shutdown_timeout_seconds: int = put(Integer(0, 7200), 60)
    termination_grace_period_seconds: int = put(Integer(1, 14400), 120)

    @property
    def least_grace_seconds(self) -> int:
        return self.pre_stop_seconds + self.shutdown_timeout_seconds + GRACE_MARGIN_SECONDS


@dataclass(frozen=True)
class DisruptionBudget:
    """How many pods of a role a node drain may take at once."""

    max_unavailable: int = put(Integer(1, 1000), 1)


@dataclass(frozen=True)
class Role:
    """The engines of one side, prefill or decode."""

    replicas: int = put(Integer(0, 1000), 1)
    tensor_parallel_size: int = put(Integer(1, 64), 1)
    gpu_memory_percent: int = put(Integer(1, 100), 90)
    kv_cache_mib: int | None = put(Integer(1, 1 << 24), None, name="kvCacheMiB")
    resources: Resources = put_object(Resources)
    shared_memory_gib: int = put(Integer(1, 1024), 16, name="sharedMemoryGiB")
    gpu_products: tuple[str, ...] = put(Items(Text(63), 32), H200_PRODUCTS)
    node_selector: Mapping[str, str] = put(Table(Text(63, min_length=0), 32), {})
    affinity: Mapping[str, Any] | None = put(Raw(), None)
    tolerations: tuple[Mapping[str, Any], ...] = put(Items(Raw(), 32), (GPU_TOLERATION,))
    load_budget_seconds: int = put(Integer(30, 86400), 3600)
    drain: Drain = put_object(Drain)
    disruption_budget: DisruptionBudget = put_object(DisruptionBudget)
    extra_args: tuple[str, ...] = put(EXTRA_ARGS, ())
    env: tuple[EnvVar, ...] = put(ENV, ())
    pod_template: Mapping[str, Any] | None = put(Raw(), None)


#: The API's policy names and the router's own.
ROUTER_POLICIES: Mapping[str, str] = {
    "RoundRobin": "round_robin",
    "Random": "random",
    "PowerOfTwo": "power_of_two",
    "CacheAware": "cache_aware",
    "ConsistentHash": "consistent_hash",
}
ROUTER_KINDS = ("VllmRouter", "None")


@dataclass(frozen=True)
class Router:
    """What stands in front of the pair. Kind `None`: you bring your own, nothing is rendered."""

    kind: str = put(Choice(ROUTER_KINDS), "VllmRouter")
    replicas: int = put(Integer(0, 100), 1)
    image: str | None = put(IMAGE, None)
    image_pull_policy: str | None = put(PULL_POLICY, None)
    policy: str = put(Choice(tuple(ROUTER_POLICIES)), "RoundRobin")
    resources: Resources = put_object(Resources)
    node_selector: Mapping[str, str] = put(Table(Text(63, min_length=0), 32), {})
    affinity: Mapping[str, Any] | None = put(Raw(), None)
    tolerations: tuple[Mapping[str, Any], ...] = put(Items(Raw(), 32), ())
    extra_args: tuple[str, ...] = put(EXTRA_ARGS, ())
    env: tuple[EnvVar, ...] = put(ENV, ())
    pod_template: Mapping[str, Any] | None = put(Raw(), None)

    @property
    def is_rendered(self) -> bool:
        return self.kind == "VllmRouter"

    @property
    def policy_flag(self) -> str:
        """The policy in the spelling of the router's `--policy`."""
        return ROUTER_POLICIES[self.policy]
