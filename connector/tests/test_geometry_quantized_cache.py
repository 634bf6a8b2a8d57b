"""What a quantised checkpoint asks for its keys and values, and what an engine makes of it.

That vLLM reads the same out of the same lines: connector/tests_vllm/test_vllm_owned_flags.py.
"""

import dataclasses

import pytest
from test_geometry_config import CONFIGS

from hybridpd_geometry import EngineFacts, GeometryError, facts_from_config, plan_engine

FLOAT8 = {"dynamic": False, "num_bits": 8, "type": "float"}
FLOAT4 = {"dynamic": True, "num_bits": 4, "type": "float"}
ASKED = [
    (None, "auto"),
    ("fp8", "auto"),
    ({}, "auto"),
    ({"quant_method": "modelopt"}, "auto"),
    ({"quant_method": "modelopt", "kv_cache_scheme": FLOAT8}, "fp8"),
    ({"quant_method": "modelopt", "kv_cache_scheme": {**FLOAT8, "dynamic": True}}, "auto"),
    ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8"),
    ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
    ({"quant_method": "modelopt_fp4", "kv_cache_scheme": FLOAT4}, "nvfp4"),
    ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}, "auto"),
    ({"quant_method": "modelopt", "kv_cache_quant_algo": 8}, "auto"),
    ({"quant_method": "fp8", "kv_cache_scheme": FLOAT8}, "auto"),
    ({"quant_method": "compressed-tensors"}, "auto"),
    ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "auto"),
    ({"quant_method": "compressed-tensors", "kv_cache_scheme": FLOAT8}, "fp8"),
    ({"quant_method": 7, "kv_cache_scheme": FLOAT8}, "auto"),
]
CONFIG = CONFIGS["nemotron-3-nano"][1]


@pytest.mark.parametrize(("quantization", "dtype"), ASKED)
def test_what_a_checkpoint_asks_for(quantization, dtype):
    facts = facts_from_config({**CONFIG, "quantization_config": quantization})
    assert facts == dataclasses.replace(facts_from_config(CONFIG), kv_dtype=dtype)
    outer = {"model_type": "outer", "text_config": CONFIG, "quantization_config": quantization}
    assert facts_from_config(outer).kv_dtype == dtype


def test_an_engine_follows_the_checkpoint_unless_it_is_told_otherwise():
    plain = facts_from_config(CONFIG)
    quantised = dataclasses.replace(plain, kv_dtype="fp8")

    def token_bytes(model, **settings):
        return plan_engine(model, EngineFacts(tp_size=2, **settings)).token_bytes

    assert token_bytes(plain) == 2 * token_bytes(quantised)
    assert token_bytes(quantised) == token_bytes(plain, kv_dtype="fp8_e4m3")
    assert token_bytes(quantised, kv_dtype="bfloat16") == token_bytes(plain)


def test_a_cache_that_is_not_moved_is_refused_by_name():
    model = dataclasses.replace(facts_from_config(CONFIG), kv_dtype="nvfp4")
    with pytest.raises(GeometryError, match=r"kv_dtype: expected .*, got nvfp4"):
        plan_engine(model, EngineFacts(tp_size=2))
