"""The dtype of keys and values that a quantised checkpoint asks for in its `config.json`.

vLLM follows it where `--kv-cache-dtype` is `auto` (`utils/torch_utils.py`,
`get_kv_cache_quant_algo_string`; `Attention.__init__` for compressed-tensors).
"""

from collections.abc import Mapping

from hybridpd_geometry.dtypes import AUTO


def kv_dtype_of(quantization: object) -> str:
    """`auto` when `quantization_config` leaves it to the model's dtype."""
    if not isinstance(quantization, Mapping):
        return AUTO
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        return AUTO if quantization.get("kv_cache_scheme") is None else "fp8"
    if not isinstance(method, str) or not method.startswith("modelopt"):
        return AUTO
    inner = quantization.get("quantization", quantization)
    asked = [
        place.get(name)
        for name in ("kv_cache_scheme", "kv_cache_quant_algo")
        for place in (inner, quantization)
        if isinstance(place, Mapping)
    ]
    algorithm = next((one for one in asked if one), None)
    if isinstance(algorithm, Mapping):
        kind = (algorithm.get("type"), algorithm.get("num_bits"))
        if kind == ("float", 8) and algorithm.get("dynamic") is False:
            return "fp8"
        return "nvfp4" if kind == ("float", 4) else AUTO
    known = algorithm.lower() if isinstance(algorithm, str) else ""
    return known if known in ("fp8", "nvfp4") else AUTO
