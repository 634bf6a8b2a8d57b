"""Model folders for the load benchmark: published shapes, random weights, a full tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Nemotron-3-Nano-30B-A3B: 23 Mamba2, 6 attention and 23 MoE layers.
NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "dtype": "bfloat16",
    "vocab_size": 131072,
    "hidden_size": 2688,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1856,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 128,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "mamba_ssm_cache_dtype": "float32",
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 262144,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# Small enough to rehearse the program on a CPU.
SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MODELS = {
    "nano": NANO,
    # Half the experts: the caches and layers of Nano, and two engines fit on one GPU of 141 GB.
    "nano64": {**NANO, "n_routed_experts": 64},
    # A quarter: for pairs of other TP sizes, where a GPU holds parts of more engines.
    "nano32": {**NANO, "n_routed_experts": 32},
    # As many layers and kernels a step, in a tenth of the memory: sixteen engines fit on one GPU.
    "nano-thin": {
        **NANO,
        "vocab_size": 32768,
        "hidden_size": 1344,
        "mamba_num_heads": 16,
        "n_routed_experts": 8,
    },
    "small": SMALL,
}


def write_model(name: str, folder: Path) -> None:
    """Write config.json and a tokenizer.

    Every id needs a token: at an unknown one the API server's incremental detokenizer starts over,
    and the server becomes the bottleneck that the benchmark then measures.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    config = MODELS[name]
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())):
        vocabulary[letter] = index + 3
    vocabulary |= {f"w{i}": i for i in range(len(vocabulary), config["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
