"""Geometry against vLLM's own calculators: state shapes and KV-cache groups of every family.

No engine is started: one process imports vLLM, computes shapes and groups for the published
dimensions at several TP sizes, and the arithmetic here must give the same bytes and layers.
"""

import dataclasses
import json
import os
import subprocess
import sys
from math import prod

import pytest

from hybridpd_geometry import (
    DTYPE_BYTES,
    AttentionFacts,
    EngineFacts,
    ModelFacts,
    StateFacts,
    layout_of,
    plan_engine,
    resolve_engine,
)

PROGRAM = """
import json, sys
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size as split
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

def shapes(s, tp, spec):
    kernel = s["conv_kernel"]
    if s["family"] == "mamba1":
        return Shapes.mamba1_state_shape(tp, s["inner"], s["state_size"], kernel)
    if s["family"] == "mamba2":
        return Shapes.mamba2_state_shape(
            tp, s["inner"], s["groups"], s["heads"], s["head_dim"], s["state_size"], kernel, spec)
    if s["family"] == "gdn":
        return Shapes.gated_delta_net_state_shape(
            tp, s["key_heads"], s["heads"], s["key_head_dim"], s["head_dim"], kernel, spec)
    if s["family"] == "kda":
        return Shapes.kda_state_shape(
            tp, s["heads"], s["head_dim"], s["key_heads"], s["key_head_dim"], kernel, spec)
    return Shapes.short_conv_state_shape(tp, s["inner"], kernel, spec)

def one(case):
    found = shapes(case["state"], case["tp"], case["spec"])
    dtypes = tuple(getattr(torch, name) for name in case["dtypes"][: len(found)])
    state = MambaSpec(block_size=16, shapes=found, dtypes=dtypes,
                      page_size_padded=case["page_bytes"])
    attention = FullAttentionSpec(block_size=case["block_tokens"], num_kv_heads=1,
        head_size=case["token_bytes"] // 4, dtype=torch.bfloat16)
    specs = {name: state if name.endswith("state") else attention for name in case["layers"]}
    groups = [group.layer_names for group in split(specs)]
    return {"shapes": found, "groups": groups, "page_bytes": attention.page_size_bytes}

print("ANSWER" + json.dumps([one(case) for case in json.load(sys.stdin)]))
"""


def mamba2(heads, head_dim, state, groups, ssm="auto"):
    return StateFacts("mamba2", heads * head_dim, heads, head_dim, state, groups, ssm_dtype=ssm)


NAMES = {
    "nemotron-3-nano": (23, 6, (32, 2, 128), mamba2(64, 64, 128, 8, "float32")),
    "nemotron-3-super": (40, 8, (32, 2, 128), mamba2(128, 64, 128, 8, "float32")),
    "falcon-h1-7b": (44, 44, (12, 2, 128), mamba2(24, 128, 256, 1)),
    "bamba-9b": (29, 3, (32, 8, 128), mamba2(128, 64, 128, 1)),
    "jamba-mini": (28, 4, (32, 8, 128), StateFacts("mamba1", 8192, state_size=16)),
    "qwen3-next": (36, 12, (16, 2, 256), StateFacts("gdn", 0, 32, 128, 0, 1, 16, 128)),
    "kimi-linear": (20, 7, (32, 1, 576), StateFacts("kda", 0, 32, 128, 0, 1, 32, 128)),
    "lfm2-1.2b": (10, 6, (32, 8, 64), StateFacts("short_conv", 2048, conv_kernel=3)),
}
CASES = [(name, tp, spec) for name in NAMES for tp in (1, 2, 4, 8) for spec in (0, 2)]
LEGAL = [(name, tp, spec) for name, tp, spec in CASES if (name, tp) != ("falcon-h1-7b", 8)]


def model(name):
    states, attentions, (query_heads, kv_heads, head_dim), state = NAMES[name]
    layers = range(states) if states != attentions else range(attentions)
    first = states if states != attentions else 0
    return ModelFacts(
        name,
        attention_layers=tuple(range(first, first + attentions)),
        state_layers=tuple(layers),
        attention=AttentionFacts(query_heads, kv_heads, head_dim, head_dim),
        state=state,
    )


def layer_order(facts):
    """Names in the order the engine meets the layers: by index, attention before state."""
    pairs = [(index, "attention") for index in facts.attention_layers]
    pairs += [(index, "state") for index in facts.state_layers]
    return [f"layers.{index}.{kind}" for index, kind in sorted(pairs)]


@pytest.fixture(scope="module")
def vllm_says():
    asked = []
    for name, tp, spec in LEGAL:
        facts, engine = model(name), EngineFacts(tp, spec_tokens=spec)
        geometry, resolved = plan_engine(facts, engine), resolve_engine(facts, engine)
        asked.append(
            {
                "state": dataclasses.asdict(facts.state),
                "tp": tp,
                "spec": spec,
                "dtypes": [resolved.conv_dtype, resolved.ssm_dtype],
                "page_bytes": geometry.page_bytes,
                "block_tokens": geometry.block_tokens,
                "token_bytes": geometry.token_bytes,
                "layers": layer_order(facts),
            }
        )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VLLM_SSM_CONV_STATE_LAYOUT": "DS", "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(LEGAL, json.loads(done.stdout.rpartition("ANSWER")[2]), strict=True))


@pytest.mark.parametrize("case", LEGAL, ids=lambda case: f"{case[0]}-tp{case[1]}-spec{case[2]}")
def test_state_bytes_and_groups(case, vllm_says):
    name, tp, spec = case
    facts, engine = model(name), EngineFacts(tp, spec_tokens=spec)
    geometry, resolved = plan_engine(facts, engine), resolve_engine(facts, engine)
    conv, *temporal = vllm_says[case]["shapes"]
    assert geometry.conv_bytes == prod(conv) * DTYPE_BYTES[resolved.conv_dtype]
    ssm_elements = sum(prod(shape) for shape in temporal)
    assert geometry.ssm_bytes == ssm_elements * DTYPE_BYTES[resolved.ssm_dtype]
    assert vllm_says[case]["page_bytes"] == geometry.page_bytes
    ours = [[f"layers.{i}.{group.kind}" for i in group.layers] for group in geometry.groups]
    assert vllm_says[case]["groups"] == ours
    layout = layout_of(facts, engine, name)
    assert [[x.name for x in layout.layers if x.group == g] for g in range(len(ours))] == ours
