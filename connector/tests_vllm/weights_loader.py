"""vLLM's own model classes load tiny checkpoints: run as a program, no engine, no kernel.

Takes folders of checkpoints. For each, and for TP 1 and the last rank of TP 2, vLLM builds the
model on the CPU, with NaN in every parameter, and loads the weights. What it printed last is one
JSON line: by folder and TP size, the class, the number of tensors read, and the parameters that
still hold a NaN. A tensor that the model has no place for ends the program: vLLM raises.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    init_distributed_environment,
    initialize_model_parallel,
    parallel_state,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm_planner import inspect_in_this_process


def load(folder, tp_size):
    """One rank's parameters of one checkpoint."""
    dtype = json.loads((folder / "config.json").read_text())["dtype"]
    asked = EngineArgs(model=str(folder), dtype=dtype, enforce_eager=True, max_model_len=2048)
    config = asked.create_engine_config()
    with set_current_vllm_config(config):
        group = join_group()
        group.world_size, group.rank_in_group = tp_size, tp_size - 1
        model_class, _ = get_model_architecture(config.model_config)
        torch.set_default_dtype(config.model_config.dtype)
        model = model_class(vllm_config=config)
        torch.set_default_dtype(torch.float32)
        parameters = dict(model.named_parameters())
        with torch.no_grad(), safe_open(folder / "model.safetensors", "pt") as tensors:
            for parameter in parameters.values():
                parameter.fill_(float("nan"))
            names = list(tensors.keys())
            loaded = model.load_weights((name, tensors.get_tensor(name)) for name in names)
    return {
        "class": f"{model_class.__module__}.{model_class.__name__}",
        "tensors": len(names),
        "parameters": len(parameters),
        "unloaded": sorted(
            name for name, parameter in parameters.items() if parameter.isnan().any()
        ),
        "unknown": sorted(loaded - set(parameters)),
    }


def join_group():
    """vLLM's tensor-parallel group, of this process alone."""
    if not torch.distributed.is_initialized():
        where = f"file://{sys.argv[1]}/group"
        init_distributed_environment(1, 0, where, 0, "gloo")
        initialize_model_parallel(1)
    return parallel_state.get_tp_group()


class NoStream:
    """Kimi-Linear makes a stream for kernels that it runs beside each other; here none runs."""


def main():
    torch.cuda.Stream = NoStream
    inspect_in_this_process()
    found = {
        f"{Path(folder).name}-tp{tp_size}": load(Path(folder), tp_size)
        for folder in sys.argv[2:]
        for tp_size in (1, 2)
    }
    print("ANSWER" + json.dumps(found))


if __name__ == "__main__":
    main()
