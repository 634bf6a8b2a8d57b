"""From a Hugging Face `config.json` to ModelFacts.

One reader per model type, registered in `READERS`.  Field names and defaults are those of the
`transformers` config classes, and of the vLLM model that turns them into cache shapes
(`get_mamba_state_shape_from_config`).  A type without a reader is an UnknownModelError, never a
guess: a wrong guess is a wrong page.  A model that is known and not moved (`refused`) is an
UnsupportedModelError.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from hybridpd_geometry.config_fields import MAX_LAYERS, Config
from hybridpd_geometry.dtypes import AUTO, canonical_dtype
from hybridpd_geometry.errors import GeometryError, UnknownModelError
from hybridpd_geometry.facts import AttentionFacts, ModelFacts, StateFacts
from hybridpd_geometry.quantized_cache import kv_dtype_of
from hybridpd_geometry.refused import NO_ATTENTION, REFUSED, WINDOW, refuse

DENSE_MODEL_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "granite",
    "granitemoe",
    "olmo2",
    "phi3",
)


def facts_from_config(config: Mapping[str, object]) -> ModelFacts:
    """The model's facts; UnknownModelError when its type has no reader here.

    UnsupportedModelError when the type or its layers are known not to be moved.
    A multimodal config is read through its `text_config`.
    """
    if not isinstance(config, Mapping):
        raise GeometryError("config", "an object", type(config).__name__)
    reader = _reader_of(config)
    nested = config.get("text_config")
    if reader is None and isinstance(nested, Mapping):
        outer = config.get("dtype") or config.get("torch_dtype")
        config = {
            **nested,
            "dtype": nested.get("dtype") or nested.get("torch_dtype") or outer,
            "quantization_config": config.get("quantization_config"),
        }
        reader = _reader_of(config)
    if reader is None:
        model_type = config.get("model_type")
        raise UnknownModelError(
            "config.model_type",
            f"one of {', '.join(sorted(READERS))}",
            repr(model_type)[:80],
            "Give the geometry facts of this model explicitly, or leave it unchecked.",
        )
    return reader(Config(config))


def _reader_of(config: Mapping[str, object]) -> Callable[[Config], ModelFacts] | None:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return None
    if model_type in REFUSED:
        raise refuse("config.model_type", model_type, REFUSED[model_type])
    return READERS.get(model_type)


def _nemotron_h(config: Config) -> ModelFacts:
    kinds = _nemotron_layers(config)
    heads = config.number("mamba_num_heads", 128)
    head_dim = config.number("mamba_head_dim", 64)
    state = StateFacts(
        family="mamba2",
        inner=heads * head_dim,
        heads=heads,
        head_dim=head_dim,
        state_size=config.number("ssm_state_size", 128),
        groups=config.number("n_groups", 8),
        conv_kernel=config.number("conv_kernel", 4),
        ssm_dtype=config.text("mamba_ssm_cache_dtype", "float32"),
    )
    attention = _attention(config, head_dim=config.number("head_dim", 128), kv_default=8)
    return _model(config, _where(kinds, "attention"), _where(kinds, "mamba"), attention, state)


def _nemotron_layers(config: Config) -> tuple[str, ...]:
    """Layer kinds from the letter pattern (M mamba, * attention, - MLP, E MoE) or the list."""
    listed = config.names("layers_block_type") or config.names("layer_types")
    if listed is not None:
        words = {"linear_attention": "mamba", "full_attention": "attention"}
        return tuple(words.get(kind, kind) for kind in listed)
    pattern = config.text("hybrid_override_pattern", "")
    letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    unknown = sorted(set(pattern) - set(letters))
    if not pattern or unknown or len(pattern) > MAX_LAYERS:
        raise GeometryError("config.hybrid_override_pattern", "letters M * - E", pattern[:80])
    return tuple(letters[letter] for letter in pattern)


def _falcon_h1(config: Config) -> ModelFacts:
    layers = tuple(range(config.number("num_hidden_layers")))
    hidden = config.number("hidden_size")
    inner = config.number("mamba_d_ssm", config.number("mamba_expand", 2) * hidden)
    return _model(config, layers, layers, _attention(config), _mamba2(config, inner))


def _granite_hybrid(config: Config) -> ModelFacts:
    kinds = config.names("layer_types") or config.names("layers_block_type")
    if kinds is None:
        raise GeometryError("config.layer_types", "a list of layer kinds", "nothing")
    inner = config.number("mamba_expand", 2) * config.number("hidden_size")
    return _model(
        config,
        _where(kinds, "attention", "full_attention"),
        _where(kinds, "mamba", "linear_attention"),
        _attention(config),
        _mamba2(config, inner),
    )


def _bamba(config: Config) -> ModelFacts:
    layers = config.number("num_hidden_layers")
    attention = config.indices("attn_layer_indices", layers)
    states = tuple(layer for layer in range(layers) if layer not in set(attention))
    inner = config.number("mamba_expand", 2) * config.number("hidden_size")
    return _model(config, attention, states, _attention(config), _mamba2(config, inner))


def _mamba2(config: Config, inner: int) -> StateFacts:
    """The `mamba_*` field names that Falcon-H1, Granite-4-H and Bamba share."""
    heads = config.number("mamba_n_heads", 128)
    head_dim = config.get("mamba_d_head")
    return StateFacts(
        family="mamba2",
        inner=inner,
        heads=heads,
        head_dim=inner // heads if head_dim in (None, AUTO) else config.number("mamba_d_head"),
        state_size=config.number("mamba_d_state", 256),
        groups=config.number("mamba_n_groups", 1),
        conv_kernel=config.number("mamba_d_conv", 4),
    )


def _jamba(config: Config) -> ModelFacts:
    layers = config.number("num_hidden_layers")
    period = config.number("attn_layer_period", 8)
    offset = config.number("attn_layer_offset", 4, low=0)
    attention = tuple(layer for layer in range(layers) if layer % period == offset)
    states = tuple(layer for layer in range(layers) if layer % period != offset)
    state = StateFacts(
        family="mamba1",
        inner=config.number("mamba_expand", 2) * config.number("hidden_size"),
        state_size=config.number("mamba_d_state", 16),
        conv_kernel=config.number("mamba_d_conv", 4),
    )
    return _model(config, attention, states, _attention(config), state)


def _lfm2(config: Config) -> ModelFacts:
    return _short_conv(config, config.number("conv_dim", config.number("hidden_size")))


def _lfm2_moe(config: Config) -> ModelFacts:
    return _short_conv(config, config.number("hidden_size"))


def _short_conv(config: Config, channels: int) -> ModelFacts:
    layers = config.number("num_hidden_layers")
    kinds = config.names("layer_types")
    if kinds is None:
        attention_at = set(config.indices("full_attn_idxs", layers))
        kinds = tuple("full_attention" if n in attention_at else "conv" for n in range(layers))
    state = StateFacts(
        family="short_conv",
        inner=channels,
        conv_kernel=config.number("conv_L_cache", 3),
    )
    attention = _attention(config)
    return _model(config, _where(kinds, "full_attention"), _where(kinds, "conv"), attention, state)


def _qwen3_next(config: Config) -> ModelFacts:
    return _qwen_gdn(config, AUTO)


def _qwen3_5(config: Config) -> ModelFacts:
    return _qwen_gdn(config, config.text("mamba_ssm_dtype", AUTO))


def _qwen_gdn(config: Config, ssm_dtype: str) -> ModelFacts:
    layers = config.number("num_hidden_layers")
    kinds = config.names("layer_types")
    if kinds is None:
        every = config.number("full_attention_interval", 4)
        kinds = tuple(
            "linear_attention" if (layer + 1) % every else "full_attention"
            for layer in range(layers)
        )
    state = StateFacts(
        family="gdn",
        heads=config.number("linear_num_value_heads", 32),
        head_dim=config.number("linear_value_head_dim", 128),
        key_heads=config.number("linear_num_key_heads", 16),
        key_head_dim=config.number("linear_key_head_dim", 128),
        conv_kernel=config.number("linear_conv_kernel_dim", 4),
        ssm_dtype=ssm_dtype,
    )
    attention = _attention(config, head_dim=config.number("head_dim", 256))
    return _model(
        config, _where(kinds, "full_attention"), _where(kinds, "linear_attention"), attention, state
    )


def _kimi_linear(config: Config) -> ModelFacts:
    layers = config.number("num_hidden_layers")
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping):
        dims = Config(linear, "config.linear_attn_config")
        states = dims.indices("kda_layers", layers, first=1)
        attention_layers = dims.indices("full_attn_layers", layers, first=1)
        heads, head_dim = dims.number("num_heads"), dims.number("head_dim")
        conv_kernel = dims.number("short_conv_kernel_size", 4)
    else:  # as newer transformers write it
        kinds = config.names("layer_types")
        if kinds is None:
            raise GeometryError("config.linear_attn_config", "an object", type(linear).__name__)
        states, attention_layers = (
            _where(kinds, kind) for kind in ("linear_attention", "full_attention")
        )
        heads, head_dim = config.number("linear_num_heads"), config.number("linear_head_dim")
        conv_kernel = config.number("linear_conv_kernel_dim", 4)
    state = StateFacts(
        family="kda",
        heads=heads,
        head_dim=head_dim,
        key_heads=heads,
        key_head_dim=head_dim,
        conv_kernel=conv_kernel,
    )
    return _model(config, attention_layers, states, _latent_attention(config), state)


def _deepseek(config: Config) -> ModelFacts:
    layers = tuple(range(config.number("num_hidden_layers")))
    return _model(config, layers, (), _latent_attention(config), None)


def _dense(config: Config) -> ModelFacts:
    if config.get("use_sliding_window") is True or _is_window(config):
        raise refuse("config.sliding_window", "layers with a sliding window", WINDOW)
    layers = tuple(range(config.number("num_hidden_layers")))
    return _model(config, layers, (), _attention(config), None)


def _is_window(config: Config) -> bool:
    kinds = config.names("layer_types")
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    # Qwen configs carry a window size that is off unless use_sliding_window says otherwise.
    # Zero switches it off.
    return bool(config.get("sliding_window")) and config.get("use_sliding_window") is None


def _attention(
    config: Config, head_dim: int | None = None, kv_default: int | None = None
) -> AttentionFacts:
    query_heads = config.number("num_attention_heads", 32)
    width = head_dim
    if width is None:
        given = config.get("head_dim")
        hidden = config.number("hidden_size")
        width = hidden // query_heads if given is None else config.number("head_dim")
    kv_heads = config.number("num_key_value_heads", kv_default or query_heads)
    return AttentionFacts(query_heads, kv_heads, width, width)


def _latent_attention(config: Config) -> AttentionFacts:
    rank = config.number("kv_lora_rank")
    rope = config.number("qk_rope_head_dim", low=0)
    return AttentionFacts(
        query_heads=config.number("num_attention_heads"),
        kv_heads=1,
        head_dim=rank + rope,
        v_head_dim=rank,
        latent_dim=rank + rope,
    )


def _where(kinds: tuple[str, ...], *wanted: str) -> tuple[int, ...]:
    return tuple(index for index, kind in enumerate(kinds) if kind in wanted)


def _model(
    config: Config,
    attention_layers: tuple[int, ...],
    state_layers: tuple[int, ...],
    attention: AttentionFacts,
    state: StateFacts | None,
) -> ModelFacts:
    if not attention_layers:
        raise refuse("config", "no attention layer", NO_ATTENTION)
    dtype = config.text("dtype", config.text("torch_dtype", "bfloat16"))
    return ModelFacts(
        name=config.text("model_type", "unknown"),
        attention_layers=attention_layers,
        state_layers=state_layers,
        attention=attention,
        state=state if state_layers else None,
        dtype=canonical_dtype(dtype, "config.dtype"),
        kv_dtype=kv_dtype_of(config.get("quantization_config")),
        max_len=_optional(config, "max_position_embeddings", "model_max_length"),
        vocab=_optional(config, "vocab_size"),
    )


def _optional(config: Config, *names: str) -> int | None:
    """The first of `names` that is there."""
    return next((config.number(name) for name in names if config.get(name) is not None), None)


READERS: Mapping[str, Callable[[Config], ModelFacts]] = MappingProxyType(
    {
        "nemotron_h": _nemotron_h,
        "falcon_h1": _falcon_h1,
        "granitemoehybrid": _granite_hybrid,
        "bamba": _bamba,
        "jamba": _jamba,
        "lfm2": _lfm2,
        "lfm2_moe": _lfm2_moe,
        "qwen3_next": _qwen3_next,
        "qwen3_5_text": _qwen3_5,
        "qwen3_5_moe_text": _qwen3_5,
        "kimi_linear": _kimi_linear,
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        **dict.fromkeys(DENSE_MODEL_TYPES, _dense),
    }
)
