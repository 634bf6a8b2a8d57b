"""Facts from `config.json`: field names and values as the models publish them."""

import pytest
from test_geometry_numbers import FALCON, GRANITE, JAMBA, KIMI, LFM2, NANO, NEMOTRON_H, QWEN_NEXT

from hybridpd_geometry import (
    READERS,
    REFUSED,
    EngineFacts,
    GeometryError,
    ModelFacts,
    UnknownModelError,
    UnsupportedModelError,
    facts_from_config,
    plan_engine,
)

NANO_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
NEMOTRON_H_PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"

CONFIGS: dict[str, tuple[ModelFacts, dict[str, object]]] = {
    "nemotron-3-nano": (
        NANO,
        {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": NANO_PATTERN,
            "num_hidden_layers": 52,
            "hidden_size": 2688,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "torch_dtype": "bfloat16",
            "max_position_embeddings": 262144,
            "vocab_size": 131072,
        },
    ),
    "nemotron-h-8b": (
        NEMOTRON_H,
        {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": NEMOTRON_H_PATTERN,
            "num_hidden_layers": 52,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "torch_dtype": "bfloat16",
        },
    ),
    "falcon-h1-7b": (
        FALCON,
        {
            "model_type": "falcon_h1",
            "num_hidden_layers": 44,
            "hidden_size": 3072,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "torch_dtype": "bfloat16",
        },
    ),
    "granite-4-h-small": (
        GRANITE,
        {
            "model_type": "granitemoehybrid",
            "num_hidden_layers": 40,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_expand": 2,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "torch_dtype": "bfloat16",
            "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
        },
    ),
    "qwen3-next": (
        QWEN_NEXT,
        {
            "model_type": "qwen3_next",
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "torch_dtype": "bfloat16",
        },
    ),
    "jamba-mini": (
        JAMBA,
        {
            "model_type": "jamba",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_expand": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "torch_dtype": "bfloat16",
        },
    ),
    "lfm2-1.2b": (
        LFM2,
        {
            "model_type": "lfm2",
            "num_hidden_layers": 16,
            "hidden_size": 2048,
            "conv_dim": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "conv_L_cache": 3,
            "torch_dtype": "bfloat16",
            "layer_types": ["conv", "conv", "full_attention"] * 5 + ["full_attention"],
        },
    ),
    "kimi-linear": (
        KIMI,
        {
            "model_type": "kimi_linear",
            "num_hidden_layers": 27,
            "hidden_size": 2304,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "torch_dtype": "bfloat16",
            "linear_attn_config": {
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [n for n in range(1, 28) if n not in (4, 8, 12, 16, 20, 24, 27)],
            },
        },
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tp", [1, 2])
def test_sizes_equal_those_of_the_published_dimensions(name: str, tp: int) -> None:
    expected, config = CONFIGS[name]
    found = plan_engine(facts_from_config(config), EngineFacts(tp))
    wanted = plan_engine(expected, EngineFacts(tp))
    assert found.block_tokens == wanted.block_tokens
    assert found.page_bytes == wanted.page_bytes
    assert (found.conv_bytes, found.ssm_bytes) == (wanted.conv_bytes, wanted.ssm_bytes)
    assert found.padding_slots == wanted.padding_slots
    assert sorted(len(g.layers) for g in found.groups) == sorted(
        len(g.layers) for g in wanted.groups
    )


def test_layer_indices_of_a_pattern() -> None:
    facts = facts_from_config(CONFIGS["nemotron-3-nano"][1])
    assert facts.attention_layers == (5, 12, 19, 26, 33, 42)
    assert len(facts.state_layers) == 23
    assert facts.state_layers[:3] == (0, 2, 4)
    assert (facts.max_len, facts.vocab, facts.dtype) == (262144, 131072, "bfloat16")
    # The state of Nemotron is float32 unless the engine says otherwise.
    assert plan_engine(facts, EngineFacts(1, ssm_dtype="bfloat16")).ssm_bytes == 1048576


def test_a_list_of_layers_says_the_same_as_the_pattern() -> None:
    _, config = CONFIGS["nemotron-3-nano"]
    words = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
    listed = dict(config, layers_block_type=[words[letter] for letter in NANO_PATTERN])
    del listed["hybrid_override_pattern"]
    assert facts_from_config(listed) == facts_from_config(config)


def test_falcon_has_both_kinds_in_every_layer_attention_first() -> None:
    facts = facts_from_config(CONFIGS["falcon-h1-7b"][1])
    assert facts.attention_layers == facts.state_layers == tuple(range(44))
    assert plan_engine(facts, EngineFacts(1)).groups[0].kind == "attention"


def test_qwen_layer_types_win_over_the_interval() -> None:
    _, config = CONFIGS["qwen3-next"]
    assert facts_from_config(config).attention_layers[:2] == (3, 7)
    kinds = ["full_attention"] + ["linear_attention"] * 47
    assert facts_from_config(dict(config, layer_types=kinds)).attention_layers == (0,)


def test_text_config_of_a_multimodal_model() -> None:
    _, config = CONFIGS["qwen3-next"]
    inner = dict(config, model_type="qwen3_5_text", mamba_ssm_dtype="float32")
    facts = facts_from_config({"model_type": "qwen3_5", "text_config": inner})
    assert plan_engine(facts, EngineFacts(1)).ssm_bytes == 2097152


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_outer_dtype_is_that_of_a_text_config_without_one(name: str) -> None:
    _, config = CONFIGS["qwen3-next"]
    inner = {**config, "model_type": "qwen3_5_text", "torch_dtype": None}
    outer = {"model_type": "qwen3_5", name: "float16"}
    assert facts_from_config({**outer, "text_config": inner}).dtype == "float16"
    own = {**inner, "dtype": "float32"}
    assert facts_from_config({**outer, "text_config": own}).dtype == "float32"


def test_kimi_reads_the_same_from_what_newer_transformers_write() -> None:
    _, config = CONFIGS["kimi-linear"]
    full = config["linear_attn_config"]["full_attn_layers"]  # type: ignore[index]
    listed: dict[str, object] = {
        **config,
        "linear_attn_config": None,
        "layer_types": [
            "full_attention" if number in full else "linear_attention" for number in range(1, 28)
        ],
        "linear_num_heads": 32,
        "linear_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    assert facts_from_config(listed) == facts_from_config(config)
    del listed["layer_types"]
    with pytest.raises(GeometryError, match=r"config\.linear_attn_config: expected an object"):
        facts_from_config(listed)


def test_lfm2_may_list_its_attention_layers_by_number() -> None:
    _, config = CONFIGS["lfm2-1.2b"]
    numbered = dict(config, full_attn_idxs=[2, 5, 8, 11, 14, 15])
    del numbered["layer_types"]
    assert facts_from_config(numbered) == facts_from_config(config)


def test_bamba_lists_its_attention_layers() -> None:
    facts = facts_from_config(
        {
            "model_type": "bamba",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attn_layer_indices": [9, 18, 27],
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_d_state": 128,
        }
    )
    assert facts.attention_layers == (9, 18, 27)
    assert plan_engine(facts, EngineFacts(1)).page_bytes == 2162688


def test_dense_llama() -> None:
    facts = facts_from_config(
        {
            "model_type": "llama",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "dtype": "float16",
        }
    )
    assert (facts.state, facts.state_layers, facts.dtype) == (None, (), "float16")
    assert facts.attention.head_dim == 128
    assert plan_engine(facts, EngineFacts(2)).token_bytes == 4 * 256 * 2


def test_dense_mla() -> None:
    facts = facts_from_config(
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
        }
    )
    assert plan_engine(facts, EngineFacts(8, block_size=64)).page_bytes == 64 * 576 * 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "rwkv7"}, "config.model_type"),
        ({}, "config.model_type: expected one of .*, got None"),
        ({"model_type": ["llama"]}, "config.model_type"),
    ],
)
def test_unknown_models(config: dict[str, object], message: str) -> None:
    with pytest.raises(UnknownModelError, match=message):
        facts_from_config(config)


SMALL = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("config", "field", "got", "reason"),
    [
        ({"model_type": "minimax_m1"}, "config.model_type", "minimax_m1", "linear-attention"),
        ({"model_type": "bailing_hybrid"}, "config.model_type", "bailing_hybrid", "linear-att"),
        ({"model_type": "qwen4_exp"}, "config.model_type", "qwen4_exp", "ring buffer"),
        ({"model_type": "deepseek_v32"}, "config.model_type", "deepseek_v32", "index"),
        ({"model_type": "gpt_oss"}, "config.model_type", "gpt_oss", "sliding-window"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
            "config.model_type",
            "gemma3",
            "sliding-window",
        ),
        (
            {"model_type": "wrapper", "text_config": {"model_type": "llama4_text"}},
            "config.model_type",
            "llama4_text",
            "sliding-window",
        ),
        (
            {"model_type": "mistral", **SMALL, "sliding_window": 4096},
            "config.sliding_window",
            "layers with a sliding window",
            "sliding-window",
        ),
        (
            {"model_type": "qwen3", **SMALL, "use_sliding_window": True},
            "config.sliding_window",
            "layers with a sliding window",
            "sliding-window",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M-"},
            "config",
            "no attention layer",
            "state layers only",
        ),
    ],
)
def test_refused_models(config: dict[str, object], field: str, got: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        facts_from_config(config)
    error = caught.value
    assert (error.field, error.got) == (field, got)
    assert "attention" in str(error.expected)
    assert reason in error.hint


@pytest.mark.parametrize("fields", [{"sliding_window": 0}, {"sliding_window": None}])
def test_a_window_that_is_switched_off(fields: dict[str, object]) -> None:
    assert facts_from_config({"model_type": "mistral", **SMALL, **fields}).state is None


def test_a_reason_to_refuse_is_one_sentence_and_no_model_is_both() -> None:
    assert not set(REFUSED) & set(READERS)
    for reason in REFUSED.values():
        assert reason.endswith(".")
        assert ". " not in reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "M*Z"}, r"letters M \* - E, got M\*Z"),
        ({"hybrid_override_pattern": 7}, "config.hybrid_override_pattern: expected text"),
        ({"mamba_num_heads": "64"}, "config.mamba_num_heads: expected a whole number, got '64'"),
        ({"mamba_num_heads": 0}, "config.mamba_num_heads: expected 1.."),
        ({"torch_dtype": "int4"}, "config.dtype"),
        ({"layers_block_type": "mamba"}, "config.layers_block_type: expected a list of names"),
    ],
)
def test_configs_that_say_nonsense(changes: dict[str, object], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        facts_from_config({**CONFIGS["nemotron-3-nano"][1], **changes})


def test_fields_that_the_cache_needs_have_no_guess() -> None:
    with pytest.raises(GeometryError, match=r"config\.hidden_size: expected a number, got nothing"):
        facts_from_config({"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2})
