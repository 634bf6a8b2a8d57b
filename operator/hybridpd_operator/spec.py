"""A `HybridPDService` as frozen dataclasses.

Field names are the CRD's in snake_case, defaults are the CRD's, units are in the names. Everything
here is decidable from one custom resource alone; rules across fields are in `validate_spec.py`,
rules that need the model are in `validate.py`.
"""

# ruff: noqa: RUF009  (`put` is `dataclasses.field` with a kind: nothing mutable is shared)

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridpd_operator.errors import FieldError, InvalidSpecError
from hybridpd_operator.names import API_VERSION, KIND
from hybridpd_operator.spec_fields import (
    Choice,
    Flag,
    Integer,
    Items,
    Nested,
    Raw,
    Text,
    put,
    put_object,
    read_object,
)
from hybridpd_operator.spec_roles import (
    DNS_NAME,
    ENV,
    EXTRA_ARGS,
    IMAGE,
    PULL_POLICY,
    EnvVar,
    Role,
    Router,
)

CUDA = "CUDA"
CPU = "CPU"
DEFAULT_GPU_RESOURCE = "nvidia.com/gpu"

MODEL_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$"
ABSOLUTE_PATH = r"^/[^\s:]*$"
DATA_KEY = r"^[-._A-Za-z0-9]+$"
RELATIVE_PATH = r"^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$"
#: A tag of a repository called vllm-something that states a version, such as `vllm-openai:v0.32.0`.
_TAGGED_VERSION = re.compile(r"vllm[^/:]*:v?([0-9]+[.][0-9]+[.][0-9]+)[^/]*$")


@dataclass(frozen=True)
class SecretKey:
    """A key of a Secret in the service's namespace."""

    name: str = put(Text(253, pattern=DNS_NAME))
    key: str = put(Text(253), "token")


@dataclass(frozen=True)
class HuggingFaceSource:
    """Weights from the Hugging Face hub; the token is needed for gated models only."""

    token_secret: SecretKey | None = put(Nested(SecretKey), None)


@dataclass(frozen=True)
class VolumeClaimSource:
    """Weights on a PersistentVolumeClaim, mounted read-only; `path` is a folder inside it."""

    claim_name: str = put(Text(253, pattern=DNS_NAME))
    path: str | None = put(Text(1024, pattern=RELATIVE_PATH), None)


@dataclass(frozen=True)
class HostPathSource:
    """Weights in a folder that every node which may run an engine has, mounted read-only."""

    path: str = put(Text(1024, pattern=ABSOLUTE_PATH))


@dataclass(frozen=True)
class ModelSource:
    """Where the weights are; at most one. Nothing given means the Hugging Face hub."""

    hugging_face: HuggingFaceSource | None = put(Nested(HuggingFaceSource), None)
    persistent_volume_claim: VolumeClaimSource | None = put(Nested(VolumeClaimSource), None)
    host_path: HostPathSource | None = put(Nested(HostPathSource), None)

    @property
    def is_local(self) -> bool:
        """True when engines load from a mounted folder, not from the hub."""
        return self.persistent_volume_claim is not None or self.host_path is not None


@dataclass(frozen=True)
class ConfigMapKey:
    """A key of a ConfigMap in the service's namespace."""

    name: str = put(Text(253, pattern=DNS_NAME))
    key: str = put(Text(253), "config.json")


@dataclass(frozen=True)
class ModelConfig:
    """The model's config.json, for models that the bundled catalogue does not know. Exactly one."""

    inline: Mapping[str, Any] | None = put(Raw(), None)
    config_map: ConfigMapKey | None = put(Nested(ConfigMapKey), None)


@dataclass(frozen=True)
class Model:
    """The model both roles serve. One string for both: it is part of the hand-over check."""

    id: str = put(Text(256, pattern=MODEL_ID_PATTERN))
    revision: str | None = put(Text(128, pattern=r"^[A-Za-z0-9._/-]+$"), None)
    served_name: str | None = put(Text(256), None)
    max_model_len: int | None = put(Integer(2, 1 << 26), None)
    trust_remote_code: bool = put(Flag(), False)
    source: ModelSource = put_object(ModelSource)
    config: ModelConfig | None = put(Nested(ModelConfig), None)

    @property
    def name(self) -> str:
        """The name clients put into `model`."""
        return self.served_name or self.id


@dataclass(frozen=True)
class Engine:
    """What both roles' vLLM has in common; one image for both by construction."""

    image: str | None = put(IMAGE, None)
    image_pull_policy: str | None = put(PULL_POLICY, None)
    vllm_version: str | None = put(Text(32), None)
    device: str = put(Choice((CUDA, CPU)), CUDA)
    gpu_resource: str | None = put(Text(253, min_length=0), None)
    dtype: str = put(Choice(("auto", "bfloat16", "float16", "float32")), "auto")
    kv_cache_dtype: str = put(
        Choice(("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")), "auto"
    )
    conv_cache_dtype: str = put(Choice(("auto", "bfloat16", "float16", "float32")), "auto")
    ssm_cache_dtype: str = put(Choice(("auto", "bfloat16", "float16", "float32")), "auto")
    block_size: int | None = put(Integer(16, 65536, multiple_of=16), None)
    prefix_caching: bool = put(Flag(), False)
    load_format: str = put(Text(64, pattern=r"^[a-z0-9_]+$"), "auto")
    extra_args: tuple[str, ...] = put(EXTRA_ARGS, ())
    env: tuple[EnvVar, ...] = put(ENV, ())

    @property
    def gpu_resource_name(self) -> str | None:
        """The extended resource a pod asks for, one per rank; None asks for none."""
        if self.gpu_resource is not None:
            return self.gpu_resource or None
        return DEFAULT_GPU_RESOURCE if self.device == CUDA else None

    @property
    def tagged_version(self) -> str | None:
        """The vLLM version that the image's tag states, if it states one."""
        found = _TAGGED_VERSION.search(self.image or "")
        return found.group(1) if found else None

    @property
    def stated_version(self) -> str | None:
        """`vllmVersion`, else what the tag says, else None."""
        return self.vllm_version or self.tagged_version


@dataclass(frozen=True)
class SideChannelKey:
    """A key of a Secret in the service's namespace, mounted as a file; never read by us."""

    name: str = put(Text(253, pattern=DNS_NAME))
    key: str = put(Text(253, pattern=DATA_KEY), "key")


@dataclass(frozen=True)
class Connector:
    """The bundled NIXL connector, and how it reaches the engine image (an init container)."""

    image: str | None = put(IMAGE, None)
    image_pull_policy: str | None = put(PULL_POLICY, None)
    lease_seconds: int = put(Integer(10, 3600), 30)
    load_failure_policy: str = put(Choice(("Fail", "Recompute")), "Fail")
    checksum: str | None = put(Choice(("Off", "Sample", "All")), None)
    require_fast_link: bool | None = put(Flag(), None)
    side_channel_port: int = put(Integer(1024, 65535), 5600)
    side_channel_key_secret: SideChannelKey | None = put(Nested(SideChannelKey), None)
    backends: tuple[str, ...] = put(Items(Text(32, pattern=r"^[A-Za-z0-9_]+$"), 8, 1), ("UCX",))


@dataclass(frozen=True)
class Rdma:
    """The extended resource of the RDMA device plugin, and how many each pod asks for."""

    resource: str = put(Text(253, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9_.-]+$"))
    count: int | None = put(Integer(1, 64), None)


@dataclass(frozen=True)
class Ucx:
    """UCX settings of the engines; an empty list leaves the choice to UCX."""

    transports: tuple[str, ...] = put(Items(Text(32, pattern=r"^[a-z0-9_]+$"), 16), ())
    net_devices: tuple[str, ...] = put(Items(Text(64, pattern=r"^[A-Za-z0-9_.:-]+$"), 32), ())


@dataclass(frozen=True)
class Network:
    """What the KV transfer runs over."""

    rdma: Rdma | None = put(Nested(Rdma), None)
    ucx: Ucx = put_object(Ucx)


@dataclass(frozen=True)
class Rollout:
    """How an edit that changes the revision is carried out."""

    strategy: str = put(Choice(("Recreate",)), "Recreate")


@dataclass(frozen=True)
class Observability:
    """Logs and metrics of the engines and the router."""

    log_level: str = put(Choice(("DEBUG", "INFO", "WARNING", "ERROR")), "INFO")
    scrape_annotations: bool = put(Flag(), True)


@dataclass(frozen=True)
class PullSecret:
    """An image pull secret in the service's namespace."""

    name: str = put(Text(253, pattern=DNS_NAME))


@dataclass(frozen=True)
class Spec:
    """`spec` of a `HybridPDService`."""

    model: Model = put(Nested(Model))
    engine: Engine = put_object(Engine)
    connector: Connector = put_object(Connector)
    prefill: Role = put_object(Role)
    decode: Role = put_object(Role)
    router: Router = put_object(Router)
    rollout: Rollout = put_object(Rollout)
    network: Network = put_object(Network)
    observability: Observability = put_object(Observability)
    image_pull_secrets: tuple[PullSecret, ...] = put(Items(Nested(PullSecret), 16, key="name"), ())

    def role(self, name: str) -> Role:
        """`prefill` or `decode` by name."""
        return {"prefill": self.prefill, "decode": self.decode}[name]


@dataclass(frozen=True)
class Service:
    """A custom resource: identity and spec. `uid` is empty for one read from a file."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: Spec
    deleting: bool = False


def parse_service(resource: Mapping[str, Any]) -> Service:
    """A custom resource, as the API or a file gives it, as a `Service`.

    Raises InvalidSpecError with every problem of `apiVersion`, `kind`, `metadata` and `spec`.
    Unknown keys of `spec` are problems; `status` and other metadata are not looked at.
    """
    problems: list[FieldError] = []
    for key, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if resource.get(key) != expected:
            problems.append(FieldError(key, expected, repr(resource.get(key))))
    metadata = resource.get("metadata")
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
        problems.append(FieldError("metadata.name", "a name", "nothing"))
        metadata = {}
    spec, found = read_object(Spec, resource.get("spec", {}), "spec")
    problems.extend(found)
    if problems or spec is None:
        raise InvalidSpecError(tuple(problems))
    return Service(
        name=metadata["name"],
        namespace=metadata.get("namespace") or "default",
        uid=metadata.get("uid") or "",
        generation=metadata.get("generation") or 1,
        spec=spec,
        deleting=bool(metadata.get("deletionTimestamp")),
    )
