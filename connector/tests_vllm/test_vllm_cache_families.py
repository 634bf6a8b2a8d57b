"""The cache of every family, as vLLM itself shapes and allocates it, becomes the planned layout.

Shapes come from vLLM's calculators and views from its allocator, so that families without a CPU
kernel are read too. What is not shown to be right is refused before anything is read.
"""

import dataclasses
import types

import pytest
import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kinds
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from hybridpd_connector.vllm_cache import group_facts, read_cache
from hybridpd_connector.vllm_compat import UnsupportedEngineError
from hybridpd_connector.vllm_layers import kind_of
from hybridpd_geometry import EngineFacts, facts_from_config, layout_of, plan_engine, resolve_engine

BLOCKS = 3
COMMON = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "dtype": "bfloat16",
}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8}
CONFIGS = {
    "jamba": {**COMMON, "model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 2},
    "kimi-linear": {
        **COMMON,
        **LATENT,
        "model_type": "kimi_linear",
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3],
        },
    },
    "deepseek": {**COMMON, **LATENT, "model_type": "deepseek_v3"},
    "qwen3-next": {
        **COMMON,
        "model_type": "qwen3_next",
        "head_dim": 16,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_value_head_dim": 16,
        "linear_key_head_dim": 16,
    },
    "lfm2": {
        **COMMON,
        "model_type": "lfm2",
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    "granite-4-h": {
        **COMMON,
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    },
}
TYPES = {
    "mamba1": Kinds.MAMBA1,
    "mamba2": Kinds.MAMBA2,
    "gdn": Kinds.GDN_ATTN,
    "kda": Kinds.GDN_ATTN,
    "short_conv": Kinds.SHORT_CONV,
}


def state_shapes(facts, tp):
    shapes, kernel = mamba_utils.MambaStateShapeCalculator, facts.conv_kernel
    if facts.family == "mamba1":
        return shapes.mamba1_state_shape(tp, facts.inner, facts.state_size, kernel)
    if facts.family == "mamba2":
        return shapes.mamba2_state_shape(
            tp, facts.inner, facts.groups, facts.heads, facts.head_dim, facts.state_size, kernel
        )
    if facts.family == "gdn":
        return shapes.gated_delta_net_state_shape(
            tp, facts.key_heads, facts.heads, facts.key_head_dim, facts.head_dim, kernel
        )
    if facts.family == "kda":
        return shapes.kda_state_shape(tp, facts.heads, facts.head_dim, conv_kernel_size=kernel)
    return shapes.short_conv_state_shape(tp, facts.inner, kernel)


@pytest.fixture(autouse=True)
def dim_first(monkeypatch):
    monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: True)


class Rank:
    """The cache of one rank, allocated by vLLM's own function."""

    def __init__(self, name, tp):
        self.model = facts_from_config(CONFIGS[name])
        self.engine = EngineFacts(tp, packing="cpu_amx")
        self.plan = plan_engine(self.model, self.engine)
        groups, tensors, self.tensors = [], [], {}
        region = BLOCKS * self.plan.page_bytes
        self.storage = torch.zeros(self.plan.region_count * region, dtype=torch.int8)
        for group in self.plan.groups:
            spec = self.state_spec() if group.kind == "state" else self.attention_spec()
            names = [f"layers.{index}.{group.kind}" for index in group.layers]
            tensor = KVCacheTensor(len(self.storage), names, region, self.plan.page_bytes)
            layout = KVCacheLayout.LBHNC
            views = create_kv_cache_views(self.storage, spec, BLOCKS, layout, tensor)
            self.tensors.update(zip(names, views, strict=True))
            groups.append(KVCacheGroupSpec(names, spec))
            tensors.append(tensor)
        self.config = KVCacheConfig(BLOCKS, tensors, groups, kv_cache_layout="LBHNC")
        layer = types.SimpleNamespace(isa="amx")
        self.vllm = types.SimpleNamespace(
            parallel_config=types.SimpleNamespace(tensor_parallel_size=tp),
            cache_config=types.SimpleNamespace(kv_cache_layout="LBHNC", cache_dtype="auto"),
            compilation_config=types.SimpleNamespace(
                static_forward_context=dict.fromkeys(self.tensors, layer)
            ),
            model_config=types.SimpleNamespace(
                model=name,
                revision=None,
                dtype=torch.bfloat16,
                hf_text_config=types.SimpleNamespace(to_dict=lambda: CONFIGS[name]),
                get_total_num_kv_heads=lambda: COMMON["num_key_value_heads"],
            ),
        )

    def state_spec(self):
        resolved = resolve_engine(self.model, self.engine)
        shapes = state_shapes(self.model.state, self.engine.tp_size)
        dtypes = (getattr(torch, resolved.conv_dtype), getattr(torch, resolved.ssm_dtype))
        return MambaSpec(
            block_size=2048,
            shapes=shapes,
            dtypes=dtypes[: len(shapes)],
            page_size_padded=self.plan.page_bytes,
            mamba_type=TYPES[self.model.state.family],
        )

    def attention_spec(self):
        facts = self.model.attention
        if facts.latent_dim is not None:
            heads, width = 1, facts.latent_dim
            kind = MLAAttentionSpec
        else:
            heads, width = max(1, facts.kv_heads // self.engine.tp_size), facts.head_dim
            kind = FullAttentionSpec
        return kind(
            block_size=self.plan.block_tokens,
            num_kv_heads=heads,
            head_size=width,
            dtype=torch.bfloat16,
        )

    def read(self):
        return read_cache(self.vllm, self.config, self.tensors, 0, ("0.32.0", "DS"))


CASES = [(name, tp) for name in CONFIGS for tp in (1, 2, 4)]


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_vllms_cache_is_the_planned_one(name, tp):
    rank = Rank(name, tp)
    layout = rank.read().layout
    planned = layout_of(rank.model, rank.engine, name, vllm_version="0.32.0")
    # What an engine was told beside sizes is not planned.
    assert layout.numerics == "dtype bfloat16"
    assert layout.to_dict() == {**planned.to_dict(), "numerics": layout.numerics}
    assert [fact.kind for fact in group_facts(rank.config)] == list(planned.group_kinds)


def test_latent_pages_may_lack_the_axis_of_heads():
    rank = Rank("kimi-linear", 2)
    whole = rank.read().layout
    name = next(name for name in rank.tensors if name.endswith("attention"))
    rank.tensors[name] = rank.tensors[name].squeeze(1)
    assert rank.read().layout == whole


def test_a_latent_of_another_size_is_refused():
    rank = Rank("deepseek", 1)
    wide = dataclasses.replace(rank.attention_spec(), head_size=48)
    rank.config.kv_cache_groups[0].kv_cache_spec = wide
    with pytest.raises(UnsupportedEngineError, match="one latent vector of a token"):
        rank.read()


def full(kind=FullAttentionSpec, **more):
    settings = {"block_size": 16, "num_kv_heads": 1, "head_size": 40, "dtype": torch.bfloat16}
    return kind(**{**settings, **more})


def state(kind=Kinds.MAMBA2, shapes=((64, 3), (4, 16, 16)), **more):
    return MambaSpec(2048, shapes, (torch.float32,) * len(shapes), mamba_type=kind, **more)


REFUSED = {
    "linear attention": (state(Kinds.LINEAR, ((4, 16, 16),)), "kind of state: .* got LINEAR"),
    "rings beside the state": (
        state(shapes=((64, 3), (4, 16, 16), (4, 8, 16), (4, 8), (1, 8, 16))),
        "at most one temporal state",
    ),
    "a state on every rank": (state(tp_replicated=True), "sharded over ranks"),
    "a sliding window": (full(SlidingWindowSpec, sliding_window=64), "got SlidingWindowSpec"),
    "a window kept whole": (full(sliding_window=64), "sliding_window: expected None, got 64"),
    "a window of answers": (full(RSWASpec, rswa_window=64), "got RSWASpec"),
    "tokens that look ahead": (full(non_causal=True), "non_causal: expected False, got True"),
    "chunks": (full(ChunkedLocalAttentionSpec, attention_chunk_size=64), "got ChunkedLocal"),
    "a ring buffer": (full(CircularBufferSpec), "got CircularBufferSpec"),
    "an index": (full(MLAAttentionSpec, cache_role=SparseCacheRole.INDEXER), "cache_role"),
    "states of several tokens": (full(MLAAttentionSpec, tokens_per_state=4), "tokens_per_state"),
    "an opaque entry": (full(MLAAttentionSpec, state_content_bytes=656), "state_content_bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_shown_right_is_refused_in_one_sentence(name):
    spec, words = REFUSED[name]
    with pytest.raises(UnsupportedEngineError, match=words) as caught:
        kind_of(spec)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("this model cannot be handed over between engines yet")


def test_the_allocated_state_must_be_the_configs():
    rank = Rank("lfm2", 1)
    for group in rank.config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, MambaSpec):
            group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, mamba_type=Kinds.MAMBA1)
    with pytest.raises(UnsupportedEngineError, match="MAMBA1, as the engine allocated it"):
        rank.read()
