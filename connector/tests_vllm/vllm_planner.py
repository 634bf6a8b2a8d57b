"""What vLLM itself plans for a model's cache: run as a program, no engine, no weights.

Reads a list of cases (a config.json and the fields of `EngineFacts`) as JSON from standard input.
For each, vLLM's own code reads the config, computes state shapes and dtypes,
aligns the block size, splits the layers into groups and lays out the tensors. Only the attention
backend is made up, since its one answer that matters here, the smallest kernel block, is the input.
"""

import contextlib
import json
import sys
import tempfile
import types
from pathlib import Path
from types import SimpleNamespace

MEMORY_BYTES = 8 << 30
ATTENTION = ("attention", "full_attention")
STATE = ("mamba", "linear_attention", "conv")


def without_torchvision():
    """Image models import it for code that no cache needs; the CPU engine does not have it."""
    # Asked before the stand-ins are there, transformers remembers that it is missing.
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["torchvision.transforms.v2"].functional = None


def inspect_in_this_process():
    """vLLM looks at each model class in a process of its own, about ten seconds each."""
    from vllm.model_executor.models import registry

    registry._LazyRegisteredModel.inspect_model_cls = lambda self: (
        registry._ModelInfo.from_model_cls(self.load_model_cls())
    )


def platform_with(kernel_block):
    """vLLM's platform, over one attention backend that takes multiples of `kernel_block`."""
    import vllm.config.vllm as current
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backend import AttentionBackend, MultipleOf

    current.set_current_vllm_config = lambda *_args, **_kwargs: contextlib.nullcontext()

    class Backend(AttentionBackend):
        @staticmethod
        def get_name():
            return "MADE_UP"

        @staticmethod
        def get_supported_kernel_block_sizes():
            return [MultipleOf(kernel_block)]

    class Planned(Platform):
        @classmethod
        def _find_non_ssm_backends(cls, vllm_config):
            return [Backend]

        @classmethod
        def _check_aligned_block_size(cls, *_args):
            """Asks every backend's kernels; there is none."""

    return Planned


def drafting(tokens):
    """Drafts from the prompt itself, without a draft model whose layers would be cached too."""
    return SimpleNamespace(
        method="ngram",
        num_speculative_tokens=tokens,
        use_eagle=lambda: False,
        use_eagle_block_drop=lambda: False,
    )


def vllm_config_of(model, case):
    from vllm.config import CacheConfig

    engine = case["engine"]
    drafts = engine["spec_tokens"]
    cache = CacheConfig(
        enable_prefix_caching=False,
        block_size=engine["block_size"],
        cache_dtype=engine["kv_dtype"],
        mamba_cache_dtype=engine["conv_dtype"],
        mamba_ssm_cache_dtype=engine["ssm_dtype"],
    )
    cache.kv_cache_layout = "LBHNC"
    return SimpleNamespace(
        model_config=model,
        cache_config=cache,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=engine["tp_size"],
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        speculative_config=drafting(drafts) if drafts else None,
        num_speculative_tokens=drafts,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        kv_transfer_config=None,
    )


def own_updates(vllm_config, architecture):
    """Defaults that vLLM sets per architecture, such as the dtype of the state."""
    from vllm.model_executor.models.config import (
        MODELS_CONFIG_MAP,
        HybridAttentionMambaModelConfig,
    )

    if architecture in MODELS_CONFIG_MAP:
        MODELS_CONFIG_MAP[architecture].verify_and_update_config(vllm_config)
    HybridAttentionMambaModelConfig.verify_and_update_config(vllm_config)


def layer_kinds(config, hybrid):
    """For each layer the kinds of cache it has, in the order in which vLLM builds them."""
    layers = range(config.num_hidden_layers)
    if not hybrid:
        return [("attention",) for _ in layers]
    if config.model_type == "falcon_h1":
        return [("attention", "state") for _ in layers]
    if hasattr(config, "is_kda_layer"):
        return [("state",) if config.is_kda_layer(index) else ("attention",) for index in layers]
    named = getattr(config, "layers_block_type", None) or config.layer_types
    words = {**dict.fromkeys(ATTENTION, ("attention",)), **dict.fromkeys(STATE, ("state",))}
    return [words.get(kind, ()) for kind in named]


def state_shapes(vllm_config, model_class):
    """The shapes that the layers allocate: LFM2's class leaves drafts out, its layers do not."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    shapes = model_class.get_mamba_state_shape_from_config(vllm_config)
    config = vllm_config.model_config.hf_text_config
    if not config.model_type.startswith("lfm2"):
        return shapes
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    channels = config.conv_dim if config.model_type == "lfm2" else config.hidden_size
    return MambaStateShapeCalculator.short_conv_state_shape(
        tp_size, channels, config.conv_L_cache, vllm_config.num_speculative_tokens
    )


def specs_of(vllm_config, model_class):
    """Every layer's cache specification, as its module would give it."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        get_kv_quant_mode,
    )

    model, cache = vllm_config.model_config, vllm_config.cache_config
    found = {}
    for index, kinds in enumerate(layer_kinds(model.hf_text_config, model.is_hybrid)):
        for kind in kinds:
            if kind == "state":
                spec = MambaSpec(
                    shapes=state_shapes(vllm_config, model_class),
                    dtypes=model_class.get_mamba_state_dtype_from_config(vllm_config),
                    block_size=cache.mamba_block_size,
                    page_size_padded=cache.mamba_page_size_padded,
                    num_speculative_blocks=vllm_config.num_speculative_tokens,
                )
            else:
                spec = (MLAAttentionSpec if model.use_mla else FullAttentionSpec)(
                    block_size=cache.block_size,
                    num_kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
                    head_size=model.get_head_size(),
                    dtype=kv_cache_dtype_str_to_dtype(cache.cache_dtype, model),
                    kv_quant_mode=get_kv_quant_mode(cache.cache_dtype),
                )
            found[f"layers.{index}.{kind}"] = spec
    return found


def plan(model, case):
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import MambaSpec

    vllm_config = vllm_config_of(model, case)
    model_class, architecture = ModelRegistry.resolve_model_cls(
        model.architecture, model_config=model
    )
    own_updates(vllm_config, architecture)
    platform_with(case["engine"]["alignment_tokens"]).update_block_size_for_backend(vllm_config)
    specs = specs_of(vllm_config, model_class)
    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, specs)
    made = kv_cache_utils.get_kv_cache_config_from_groups(vllm_config, groups, MEMORY_BYTES)
    states = [spec for spec in specs.values() if isinstance(spec, MambaSpec)]
    return {
        "block_tokens": vllm_config.cache_config.block_size,
        "state": [
            [list(shape), str(dtype).removeprefix("torch.")]
            for shape, dtype in zip(states[0].shapes, states[0].dtypes, strict=True)
        ]
        if states
        else [],
        "groups": [group.layer_names for group in groups],
        "page_bytes": sorted({group.kv_cache_spec.page_size_bytes for group in groups}),
        "num_blocks": made.num_blocks,
        "text_config": model.hf_text_config.to_dict(),
        "tensors": [
            [tensor.size, list(tensor.layers), tensor.layer_stride, tensor.block_stride]
            for tensor in made.kv_cache_tensors
        ],
    }


def main():
    without_torchvision()
    inspect_in_this_process()
    from vllm.config import ModelConfig

    models, answers = {}, []
    for case in json.load(sys.stdin):
        text = json.dumps(case["config"])
        if text not in models:
            folder = Path(tempfile.mkdtemp(dir=sys.argv[1]))
            (folder / "config.json").write_text(text)
            models[text] = ModelConfig(
                model=str(folder), skip_tokenizer_init=True, max_model_len=1024
            )
        answers.append(plan(models[text], case))
    print("ANSWER" + json.dumps(answers, default=str))


if __name__ == "__main__":
    main()
