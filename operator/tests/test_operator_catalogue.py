"""The bundled catalogue. Its numbers against transformers: connector/tests_vllm."""

from __future__ import annotations

from collections import Counter

import pytest

from hybridpd_geometry import EngineFacts, facts_from_config, legal_tp_sizes, plan_engine
from hybridpd_operator.catalogue import Entry, config_of, entries
from hybridpd_operator.validate import assess

WITHOUT_STATE = ("DeepSeek-V3", "Llama-3.1-8B")
BY_NAME = {entry.name: entry for entry in entries()}


def test_the_families_that_are_promised() -> None:
    assert set(BY_NAME) >= {
        "Nemotron-3-Nano-30B-A3B",
        "Nemotron-3-Super-120B-A12B",
        "Nemotron-H-8B",
        "Falcon-H1-7B",
        "Granite-4.0-H-Small",
        "Qwen3-Next-80B-A3B",
        "Qwen3.5-35B-A3B",
        "LFM2-1.2B",
        "Jamba-Mini",
        "Kimi-Linear-48B-A3B",
        *WITHOUT_STATE,
    }


def test_every_id_is_of_one_model_and_found_in_any_case() -> None:
    every = [model_id.lower() for entry in entries() for model_id in entry.ids]
    assert [model_id for model_id, count in Counter(every).items() if count > 1] == []
    assert config_of("NVIDIA/nemotron-h-8b-base-8k") == BY_NAME["Nemotron-H-8B"].config
    assert config_of("org/unheard-of") is None


@pytest.mark.parametrize("entry", entries(), ids=[entry.name for entry in entries()])
def test_every_entry_has_a_source_and_makes_sense(entry: Entry) -> None:
    assert len(entry.source) > 20
    assert set(entry.defaults) < set(entry.config)
    model = facts_from_config(entry.config)
    assert (model.state is None) == (entry.name in WITHOUT_STATE)
    assert model.max_len is not None
    assert {1, 2} <= set(legal_tp_sizes(model))
    for tp_size in legal_tp_sizes(model, 8):
        geometry = plan_engine(model, EngineFacts(tp_size=tp_size))
        assert geometry.state_bytes <= geometry.page_bytes


@pytest.mark.parametrize(
    ("name", "tp_size", "block_tokens", "page_bytes", "states", "attention"),
    [
        ("Nemotron-3-Nano-30B-A3B", 1, 2096, 2146304, 23, 6),
        ("Nemotron-3-Nano-30B-A3B", 8, 528, 270336, 23, 6),
        ("Nemotron-3-Super-120B-A12B", 4, 2080, 1064960, 40, 8),
        ("Nemotron-H-8B", 1, 1040, 4259840, 24, 4),
        ("Falcon-H1-7B", 2, 1568, 802816, 44, 44),
        ("Qwen3-Next-80B-A3B", 4, 272, 278528, 36, 12),
        ("Granite-4.0-H-Small", 2, 528, 1081344, 36, 4),
        ("Qwen3.5-35B-A3B", 1, 1056, 2162688, 30, 10),
        ("LFM2-1.2B", 1, 16, 32768, 10, 6),
        ("Jamba-Mini", 1, 80, 327680, 28, 4),
        ("Kimi-Linear-48B-A3B", 2, 1024, 1179648, 20, 7),
    ],
)
def test_sizes_that_vllm_computes_for_a_gpu(
    name: str, tp_size: int, block_tokens: int, page_bytes: int, states: int, attention: int
) -> None:
    model = facts_from_config(BY_NAME[name].config)
    geometry = plan_engine(model, EngineFacts(tp_size=tp_size))
    assert (geometry.block_tokens, geometry.page_bytes) == (block_tokens, page_bytes)
    assert (len(model.state_layers), len(model.attention_layers)) == (states, attention)


@pytest.mark.parametrize("entry", entries(), ids=[entry.name for entry in entries()])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_every_entry_can_be_planned_at_unequal_sizes(
    entry: Entry, prefill: int, decode: int
) -> None:
    """What `hybridpd plan` says of a service that only names the model and the sizes."""
    for model_id in entry.ids:
        verdict = assess(
            {
                "apiVersion": "hybridpd.dev/v1alpha1",
                "kind": "HybridPDService",
                "metadata": {"name": "demo"},
                "spec": {
                    "model": {"id": model_id},
                    "prefill": {"tensorParallelSize": prefill},
                    "decode": {"tensorParallelSize": decode},
                },
            }
        )
        assert verdict.problems == ()
        assert verdict.compatible is True
        assert verdict.geometry is not None
        assert {"prefill", "decode", "requestTokenBytes"} <= set(verdict.geometry)
