"""Bytes per element, by the names vLLM uses on its command line and in `config.json`."""

from collections.abc import Mapping
from types import MappingProxyType

from hybridpd_geometry.errors import GeometryError

AUTO = "auto"
"""Asks for the model's own dtype (KV cache, conv state) or the family's default (SSM state)."""

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
        "fp8_e4m3": 1,
        "fp8_e5m2": 1,
        "fp8": 1,
        "int8": 1,
    }
)

KV_DTYPES = (AUTO, "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Values of vLLM's `--kv-cache-dtype` whose caches are moved: plain rows, with scales that belong
to the weights. All others make scales at run time or pack their values together with them."""

_ALIASES: Mapping[str, str] = MappingProxyType(
    {"float": "float32", "half": "float16", "fp8": "fp8_e4m3"}
)


def canonical_dtype(name: str, field: str) -> str:
    """One spelling per dtype (`half` → `float16`, `fp8` → `fp8_e4m3`, `torch.` dropped)."""
    bare = name.removeprefix("torch.")
    bare = _ALIASES.get(bare, bare)
    if bare not in DTYPE_BYTES:
        raise GeometryError(field, f"one of {', '.join(sorted(DTYPE_BYTES))}", name)
    return bare


def element_bytes(name: str, field: str) -> int:
    """Bytes of one element of dtype `name`; `auto` must have been resolved before."""
    return DTYPE_BYTES[canonical_dtype(name, field)]
