"""What makes two engines a different pair. The one place where that is decided.

A revision is the hash of every field of ``spec`` that reaches an engine's pod. ``ENTERS`` lists
them; ``STAYS_OUT`` lists all others with the reason. A test holds that each field of the spec is
in exactly one of the two, so a new field cannot slip past this decision.

Values are those of the parsed spec: a default that is written out gives the same revision as one
that is left out. Images that come from the operator's own settings stay out on purpose: upgrading
the operator must not restart every engine of the cluster. A revision keeps the images it began
with (annotations on its StatefulSets); the next revision gets the new ones.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from hybridpd_operator import names
from hybridpd_operator.spec import Spec

#: Raised by hand when the operator renders pods so differently that old and new cannot be a pair.
RENDERING: Final = 1

_ROLE_ENTERS: Final = (
    "tensor_parallel_size",
    "gpu_memory_percent",
    "kv_cache_mib",
    "resources",
    "shared_memory_gib",
    "gpu_products",
    "node_selector",
    "affinity",
    "tolerations",
    "load_budget_seconds",
    "drain",
    "extra_args",
    "env",
    "pod_template",
)

#: Fields whose edit replaces the pair. A name stands for everything below it.
ENTERS: Final[tuple[str, ...]] = (
    "model.id",
    "model.revision",
    "model.served_name",
    "model.max_model_len",
    "model.trust_remote_code",
    "model.source",
    "engine.image",
    "engine.device",
    "engine.gpu_resource",
    "engine.dtype",
    "engine.kv_cache_dtype",
    "engine.conv_cache_dtype",
    "engine.ssm_cache_dtype",
    "engine.block_size",
    "engine.prefix_caching",
    "engine.load_format",
    "engine.extra_args",
    "engine.env",
    "connector.image",
    "connector.lease_seconds",
    "connector.load_failure_policy",
    "connector.checksum",
    "connector.require_fast_link",
    "connector.side_channel_port",
    "connector.side_channel_key_secret",
    "connector.backends",
    *(f"prefill.{field}" for field in _ROLE_ENTERS),
    *(f"decode.{field}" for field in _ROLE_ENTERS),
    "network",
    "observability.log_level",
)

#: Fields whose edit leaves the engines alone, and why.
STAYS_OUT: Final[Mapping[str, str]] = {
    "model.config": "facts for the check before the start; engines read the model's own",
    "engine.vllm_version": "says which rules apply; the image decides what runs",
    "engine.image_pull_policy": "the same image either way; holds from the next pod on",
    "connector.image_pull_policy": "the same image either way; holds from the next pod on",
    "prefill.replicas": "scales in place",
    "decode.replicas": "scales in place",
    "prefill.disruption_budget": "an object of its own",
    "decode.disruption_budget": "an object of its own",
    "router": "keeps no KV state; its Deployment rolls by itself",
    "rollout": "says how, not what",
    "observability.scrape_annotations": "a hint for others; holds from the next pod on",
    "image_pull_secrets": "the same image either way; holds from the next pod on",
}


def revision_of(spec: Spec) -> str:
    """Eight hex digits that stand for every field in ``ENTERS``."""
    inputs = _set_ones((path, _at(spec, path)) for path in ENTERS)
    return names.short_hash(json.dumps([RENDERING, inputs], sort_keys=True))


def leaf_paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Every field of a spec dataclass as a dotted path; nested dataclasses are walked."""
    for field in dataclasses.fields(value):
        path = f"{prefix}{field.name}"
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from leaf_paths(inner, f"{path}.")
        else:
            yield path


def _at(spec: Spec, path: str) -> Any:
    value: Any = spec
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _plain(value: Any) -> Any:
    """Dataclasses, tuples and mappings as what JSON can hold; what is not set is left out.

    So an optional field that a later version of the API adds keeps every revision as it is.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _set_ones((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _set_ones(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {key: _plain(item) for key, item in items if item not in (None, (), {})}
