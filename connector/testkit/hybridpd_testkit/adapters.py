"""Write a tiny random LoRA adapter for the Llama checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from hybridpd_testkit.checkpoint_families import FAMILIES, HEAD_DIM, HIDDEN_SIZE, QUERY_HEADS

RANK = 4


def write_adapter(directory: Path, seed: int) -> Path:
    """A PEFT adapter on the query and value projections, strong enough to change tokens."""
    family = FAMILIES["llama"]
    random = np.random.default_rng(seed)
    outputs = {"q_proj": QUERY_HEADS * HEAD_DIM, "v_proj": family.attention.kv_heads * HEAD_DIM}
    tensors = {}
    for layer in range(len(family.pattern)):
        for projection, size in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            for matrix, shape in (("A", (RANK, HIDDEN_SIZE)), ("B", (size, RANK))):
                values = random.standard_normal(shape, dtype=np.float32) * np.float32(0.3)
                tensors[f"{name}.lora_{matrix}.weight"] = values
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(outputs),
    }
    for name, content in (
        ("adapter_model.safetensors", save(tensors)),
        ("adapter_config.json", json.dumps(config, indent=1).encode()),
    ):
        (directory / name).write_bytes(content)
        (directory / name).chmod(0o644)
    return directory
