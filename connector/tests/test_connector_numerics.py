"""What two engines were told that changes numbers: equal texts for equal engines, else others."""

import dataclasses
from types import SimpleNamespace

import pytest

from hybridpd_connector.vllm_numerics import MAX_SHOWN_CHARS, numerics_of


class Dtype:
    def __str__(self):
        return "torch.bfloat16"


class Opaque:
    __slots__ = ()


@dataclasses.dataclass
class Quantized:
    linear: object
    ignore: list


def shorten(config):
    return config


def model(**more):
    told = {"dtype": Dtype(), "quantization": None, "hf_overrides": {}, "hf_config_path": None}
    return SimpleNamespace(**{**told, **more})


def test_an_engine_that_was_told_nothing():
    assert numerics_of(model()) == "dtype bfloat16"
    assert numerics_of(SimpleNamespace(dtype="torch.float16")) == "dtype float16"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"quantization": "fp8"}, "quantization fp8"),
        ({"hf_overrides": {"b": 1, "a": {"c": 2}}}, 'hf_overrides {"a":{"c":2},"b":1}'),
        (
            {"hf_overrides": {2: "x", "b": ({1: 0, "a": 1},)}},
            'hf_overrides {"2":"x","b":[{"1":0,"a":1}]}',
        ),
        ({"hf_overrides": shorten}, 'hf_overrides "shorten"'),
        (
            {"multimodal_config": SimpleNamespace(mm_processor_kwargs={"max_pixels": 4})},
            'mm_processor_kwargs {"max_pixels":4}',
        ),
        (
            {"multimodal_config": SimpleNamespace(video_pruning_rate=0.5)},
            "video_pruning_rate 0.5",
        ),
        (
            {"multimodal_config": SimpleNamespace(mm_encoder_fp8_scale_path="/scales")},
            "mm_encoder_fp8_scale_path /scales",
        ),
        ({"hf_config_path": "/other"}, "hf_config_path /other"),
        (
            {"model_class_overrides": {"Tiny": "mine:Tiny"}},
            'model_class_overrides {"Tiny":"mine:Tiny"}',
        ),
        (
            {"quantization_config": Quantized(Quantized(None, []), ["head"])},
            'quantization_config {"ignore":["head"],"linear":{"ignore":[],"linear":null}}',
        ),
        ({"quantization_config": Opaque()}, 'quantization_config "Opaque"'),
    ],
)
def test_what_an_engine_was_told_is_named(more, told):
    assert numerics_of(model(**more)) == f"dtype bfloat16, {told}"


@pytest.mark.parametrize(
    ("adapters", "told"),
    [
        ({"target_modules": None, "enable_tower_connector_lora": False}, ""),
        ({"target_modules": ["v", "o"]}, ', target_modules ["o","v"]'),
        ({"enable_tower_connector_lora": True}, ", enable_tower_connector_lora true"),
    ],
)
def test_where_adapters_are_used_is_named(adapters, told):
    lora = SimpleNamespace(max_loras=4, **adapters)
    assert numerics_of(model(), {}, lora) == f"dtype bfloat16{told}"


def test_what_the_environment_quantises_is_named():
    told = {"VLLM_MARLIN_INPUT_DTYPE": "int8", "VLLM_HUMMING_ONLINE_QUANT_CONFIG": ""}
    named = numerics_of(model(), {**told, "VLLM_LOGGING_LEVEL": "DEBUG"})
    assert named == "dtype bfloat16, VLLM_MARLIN_INPUT_DTYPE int8"
    assert numerics_of(model(), {}) == "dtype bfloat16"


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 9}}, 9),
        (
            {
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "longrope",
                        "original_max_position_embeddings": 9,
                    },
                    "other": {"rope_type": "default"},
                }
            },
            9,
        ),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 9}, 9),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 9}}, None),
        ({"rope_parameters": None}, None),
        ({}, None),
    ],
)
def test_rope_factors_that_follow_from_the_longest_prompt(text, bound):
    """The same weights, another --max-model-len: other keys, in bytes of one size."""
    texts = [
        numerics_of(model(hf_text_config=SimpleNamespace(**text), max_model_len=longest))
        for longest in (8, 9, 10, 100)
    ]
    if bound is None:
        assert set(texts) == {"dtype bfloat16"}
    else:
        assert texts[0] == texts[1] != texts[2] == texts[3]
        assert "short rope factors" in texts[0]
        assert "long rope factors" in texts[3]


def test_long_texts_are_cut_and_still_told_apart():
    one, other = ({"rope": [0] * 1000 + [last]} for last in (1, 2))
    texts = {numerics_of(model(hf_overrides=item)) for item in (one, other)}
    assert len(texts) == 2
    assert max(map(len, texts)) < MAX_SHOWN_CHARS + 80
