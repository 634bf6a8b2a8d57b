"""The tiny checkpoints of families that only GPUs compute: vLLM loads them whole, at TP 1 and 2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridpd_testkit.checkpoint_families import GPU_FAMILIES, weights_of
from hybridpd_testkit.checkpoints import write_checkpoint

LOADER = Path(__file__).with_name("weights_loader.py")
CLASSES = {
    "jamba": "vllm.model_executor.models.jamba.JambaForCausalLM",
    "kimi-linear": "vllm.models.kimi_k3.nvidia.model.KimiLinearForCausalLM",
}


@pytest.fixture(scope="module")
def vllm_loads(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = [write_checkpoint(name, folder / name) for name in GPU_FAMILIES]
    done = subprocess.run(
        [sys.executable, LOADER, folder, *paths],
        capture_output=True,
        text=True,
        check=False,
        # As the engines on GPUs have it: else this class wants CuTe's Python packages.
        env={**os.environ, "VLLM_KIMI_K3_GEMM_AR": "0", "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.rpartition("ANSWER")[2])


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", GPU_FAMILIES)
def test_vllm_loads_every_tensor_and_leaves_none_out(name, tp_size, vllm_loads):
    found = vllm_loads[f"{name}-tp{tp_size}"]
    assert found["class"] == CLASSES[name]
    assert found["tensors"] == len(list(weights_of(GPU_FAMILIES[name])))
    assert found["parameters"] > 40
    assert found["unloaded"] == []
    assert found["unknown"] == []
