"""Problems of a custom resource and the reasons they carry.

A reason is a stable word for machines (alerts, CI); the message is a sentence for people that names
both values and what to change.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Problem:
    """One reason why a service cannot be started as written. `field` is a path in the resource."""

    reason: str
    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


# --- decided from the resource alone -------------------------------------------------------------
#: A field is unknown, missing, of the wrong type or out of its bounds.
INVALID_FIELD: Final = "InvalidField"
#: `metadata.name` cannot name the children (length or characters).
INVALID_NAME: Final = "InvalidName"
#: Fields that exclude each other are set together, or none of a set is.
CONFLICTING_FIELDS: Final = "ConflictingFields"
#: preStop, shutdown timeout, lease and grace period do not fit into each other.
DRAIN_TOO_SHORT: Final = "DrainTooShort"
#: vLLM outside the range that the connector supports, or not the version of the image's tag.
UNSUPPORTED_VERSION: Final = "UnsupportedVersion"
#: An image by a moving tag: prefill and decode could run different builds.
MOVING_IMAGE: Final = "MovingImage"
#: One role has no replicas and the other has some.
ONE_SIDED_REPLICAS: Final = "OneSidedReplicas"
#: More ranks than a node of the wanted kind has GPUs: an engine is one pod on one node.
NODE_TOO_SMALL: Final = "NodeTooSmall"
#: `extraArgs` sets, abbreviates or breaks a flag that the operator renders.
RESERVED_FLAG: Final = "ReservedFlag"
#: `env` sets a variable that the operator renders.
RESERVED_ENV: Final = "ReservedEnv"
#: `podTemplate` changes something that the operator renders.
RESERVED_POD_FIELD: Final = "ReservedPodField"

# --- decided with the model's facts ---------------------------------------------------------------
#: The config.json given in the resource cannot be turned into facts.
BAD_MODEL_CONFIG: Final = "BadModelConfig"
#: The model has layers whose cache the connector does not move.
UNSUPPORTED_MODEL: Final = "UnsupportedModel"
#: A TP size does not divide a dimension that it shards.
TENSOR_PARALLEL_SIZE: Final = "TensorParallelSize"
#: `maxModelLen` is longer than the model's context.
MAX_MODEL_LEN: Final = "MaxModelLen"
#: The memory for the KV cache does not hold one request of the longest length.
CACHE_TOO_SMALL: Final = "CacheTooSmall"
#: Prefill and decode lay out their caches in ways that cannot be paired.
LAYOUT_MISMATCH: Final = "LayoutMismatch"
#: The engine cannot be planned with these settings (block size, dtype, family).
IMPOSSIBLE_ENGINE: Final = "ImpossibleEngine"

# --- reasons of the condition `Compatible` that are no problem ---------------------------------
#: Every check passed.
COMPATIBLE: Final = "Compatible"
#: No facts about the model: nothing was checked against its geometry.
NO_FACTS: Final = "NoFacts"

SPEC_REASONS: Final = (
    INVALID_FIELD,
    INVALID_NAME,
    CONFLICTING_FIELDS,
    DRAIN_TOO_SHORT,
    UNSUPPORTED_VERSION,
    MOVING_IMAGE,
    ONE_SIDED_REPLICAS,
    NODE_TOO_SMALL,
    RESERVED_FLAG,
    RESERVED_ENV,
    RESERVED_POD_FIELD,
)
MODEL_REASONS: Final = (
    BAD_MODEL_CONFIG,
    UNSUPPORTED_MODEL,
    TENSOR_PARALLEL_SIZE,
    MAX_MODEL_LEN,
    CACHE_TOO_SMALL,
    LAYOUT_MISMATCH,
    IMPOSSIBLE_ENGINE,
)
