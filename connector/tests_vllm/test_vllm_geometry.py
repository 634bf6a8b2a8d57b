"""Geometry against what vLLM itself plans for the published models: bytes, blocks, groups, tensors.

No engine is started: one process (vllm_planner.py) lets vLLM read each catalogue entry's
config.json, compute its state shapes, align its block size and plan its cache at TP 1, 2, 4 and 8
where the dimensions allow, and the arithmetic here must say the same.
"""

import dataclasses
import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from hybridpd_geometry import (
    DTYPE_BYTES,
    EngineFacts,
    facts_from_config,
    layout_of,
    legal_tp_sizes,
    plan_engine,
)
from hybridpd_operator.catalogue import entries
from hybridpd_testkit.checkpoint_families import GPU_FAMILIES, config_of

PLANNER = Path(__file__).with_name("vllm_planner.py")
MEMORY_BYTES = 8 << 30
CONFIGS = {entry.name: dict(entry.config) for entry in entries()}
# The tiny models that no CPU engine computes are at least planned (in bfloat16: vLLM takes float32
# only from its command line).
CONFIGS |= {
    f"tiny-{name}": {**config_of(family), "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    for name, family in GPU_FAMILIES.items()
}
TP_SIZES = (1, 2, 4, 8)
#: Settings of an engine, and the TP sizes at which they are asked.
ENGINES = {
    "a16": ({"alignment_tokens": 16}, TP_SIZES),
    "a64": ({"alignment_tokens": 64}, TP_SIZES),
    "a128": ({"alignment_tokens": 128}, TP_SIZES),
    "drafts": ({"spec_tokens": 2}, TP_SIZES),
    "block-size": ({"block_size": 96}, (1, 4)),
    "fp8": ({"kv_dtype": "fp8"}, (2,)),
    "states": ({"conv_dtype": "float32", "ssm_dtype": "bfloat16"}, (2,)),
}
CASES = {
    f"{name}-tp{tp}-{setting}": (name, EngineFacts(tp, **fields))
    for name, config in CONFIGS.items()
    for setting, (fields, tp_sizes) in ENGINES.items()
    for tp in tp_sizes
    if tp in legal_tp_sizes(facts_from_config(config))
}


@pytest.fixture(scope="module")
def vllm_says(tmp_path_factory):
    asked = [
        {"config": CONFIGS[name], "engine": dataclasses.asdict(engine)}
        for name, engine in CASES.values()
    ]
    done = subprocess.run(
        [sys.executable, PLANNER, tmp_path_factory.mktemp("configs")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VLLM_SSM_CONV_STATE_LAYOUT": "DS", "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads(done.stdout.rpartition("ANSWER")[2])
    return dict(zip(CASES, answers, strict=True))


def test_every_published_model_is_asked_at_tp_1_and_2():
    assert {(name, engine.tp_size) for name, engine in CASES.values()} >= {
        (name, tp) for name in CONFIGS for tp in (1, 2)
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_as_the_engine_holds_it_gives_the_same_facts(name, vllm_says):
    """The connector has no config.json: it reads vLLM's object, made by vLLM's or transformers'
    class, which renames fields and fills in others."""
    read = facts_from_config(vllm_says[f"{name}-tp1-a16"]["text_config"])
    ours = facts_from_config(CONFIGS[name])
    for field in ("attention_layers", "state_layers", "attention", "state"):
        assert getattr(read, field) == getattr(ours, field), field


@pytest.mark.parametrize("case", CASES)
def test_sizes_groups_and_tensors(case, vllm_says):
    name, engine = CASES[case]
    said = vllm_says[case]
    facts = facts_from_config(CONFIGS[name])
    geometry = plan_engine(facts, engine)
    state_bytes = [prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in said["state"]]
    assert [geometry.conv_bytes, geometry.ssm_bytes][: len(state_bytes)] == state_bytes
    assert geometry.state_bytes == sum(state_bytes)
    assert said["block_tokens"] == geometry.block_tokens
    assert said["page_bytes"] == [geometry.page_bytes]
    ours = [[f"layers.{i}.{group.kind}" for i in group.layers] for group in geometry.groups]
    assert said["groups"] == ours
    blocks = geometry.blocks_for_memory(MEMORY_BYTES)
    assert said["num_blocks"] == blocks
    region_bytes = blocks * geometry.page_bytes
    for size, layers, layer_stride, block_stride in said["tensors"]:
        assert size == geometry.region_count * region_bytes
        assert layers in ours
        assert (layer_stride, block_stride) == (region_bytes, geometry.page_bytes)
    layout = layout_of(facts, engine, name)
    assert [[x.name for x in layout.layers if x.group == g] for g in range(len(ours))] == ours
