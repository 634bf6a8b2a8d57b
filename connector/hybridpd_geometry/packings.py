"""How one KV head of one kernel block is laid out in memory: one table row per packing.

A head is a sequence of *planes*; a plane is `lanes` lanes; a lane holds `n` tokens of
`token_bytes` each (n = tokens of the kernel block).  A range of tokens is contiguous inside a
lane and must start and end on a multiple of `tile_tokens`.

    token    (GPU)  per token the head's K and V side by side:      [K0 V0][K1 V1]...
    cpu_vec  (CPU)  K feature-major, one lane per feature, then V:  [K.0 K.1 ...][V0][V1]...
    cpu_amx  (CPU)  K in tiles of 16 tokens, V in lanes of 16 features and tiles of 2 tokens
    latent   (MLA)  one latent vector per token, no heads

fp8 changes no order: an element is one byte instead of two or four, also where the tiles of cpu_amx
pair two of them.

Source: vLLM `v1/attention/backends/cpu_attn.py` and `csrc/cpu` for the CPU rows,
`v1/kv_cache_interface.py` (content = K|V per head and token) for the others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hybridpd_geometry.errors import GeometryError
from hybridpd_geometry.exact import divide_exact

_CPU_LANE_FEATURES = 16
_CPU_GRANULE_TOKENS = 16
"""cpu_vec K lanes would allow single tokens (2-4 bytes each); 16 keeps descriptor ids few."""


@dataclass(frozen=True)
class Plane:
    """`lanes` lanes, each `tokens * token_bytes` contiguous bytes; ranges in whole tiles."""

    name: str
    lanes: int
    token_bytes: int
    tile_tokens: int


def _token(head_dim: int, v_head_dim: int, element: int) -> tuple[Plane, ...]:
    return (Plane("kv", 1, (head_dim + v_head_dim) * element, 1),)


def _cpu_vec(head_dim: int, v_head_dim: int, element: int) -> tuple[Plane, ...]:
    return (
        Plane("k", head_dim, element, _CPU_GRANULE_TOKENS),
        Plane("v", 1, v_head_dim * element, 1),
    )


def _cpu_amx(head_dim: int, v_head_dim: int, element: int) -> tuple[Plane, ...]:
    lanes = divide_exact(v_head_dim, _CPU_LANE_FEATURES, "attention.v_head_dim")
    return (
        Plane("k", 1, head_dim * element, 16),
        Plane("v", lanes, _CPU_LANE_FEATURES * element, 2),
    )


def _latent(latent_dim: int, _v_head_dim: int, element: int) -> tuple[Plane, ...]:
    return (Plane("latent", 1, latent_dim * element, 1),)


PACKINGS: Mapping[str, Callable[[int, int, int], tuple[Plane, ...]]] = MappingProxyType(
    {"token": _token, "cpu_vec": _cpu_vec, "cpu_amx": _cpu_amx, "latent": _latent}
)


def planes_of(packing: str, head_dim: int, v_head_dim: int, element: int) -> tuple[Plane, ...]:
    """The planes of one head. For `latent`, `head_dim` is the latent dimension (lora + rope)."""
    build = PACKINGS.get(packing)
    if build is None:
        raise GeometryError("packing", f"one of {', '.join(PACKINGS)}", packing)
    return build(head_dim, v_head_dim, element)


def head_token_bytes(planes: tuple[Plane, ...]) -> int:
    """Bytes one token takes in one head."""
    return sum(plane.lanes * plane.token_bytes for plane in planes)
