"""vLLM's own cache objects become a layout; what does not fit the transfer is refused.

The cache is allocated here the way vLLM's runner does it, without an engine, so that a wrong
address, stride or shape can be made.
"""

import dataclasses
import types

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
)

from hybridpd_connector.tail_zeros import TailZeros
from hybridpd_connector.vllm_cache import group_facts, read_cache, thread_setup
from hybridpd_connector.vllm_compat import UnsupportedEngineError
from hybridpd_geometry import GeometryError, Plane
from hybridpd_testkit.checkpoint_families import FAMILIES, config_of

BLOCKS = 4
BLOCK_TOKENS = 128
PAGE_BYTES = 65536
STATE = ("model.layers.0.mixer", "model.layers.1.mixer")
ATTENTION = ("model.layers.2.mixer.attn", "model.layers.5.mixer.attn")
CONV, SSM = (256, 3), (8, 16, 32)
STATE_BYTES = (256 * 3 + 8 * 16 * 32) * 4


def state_spec(**changes):
    settings = {
        "block_size": 2048,
        "shapes": (CONV, SSM),
        "dtypes": (torch.float32, torch.float32),
        "page_size_padded": PAGE_BYTES,
        "mamba_type": MambaAttentionBackendEnum.MAMBA2,
    }
    return MambaSpec(**{**settings, **changes})


def attention_spec(kind=FullAttentionSpec, **changes):
    settings = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": torch.float32,
    }
    return kind(**{**settings, **changes})


class Rank:
    """A cache of two regions, as vLLM allocates it for the tiny Nemotron-H on one CPU rank."""

    def __init__(self, state=None, attention=None):
        region = BLOCKS * PAGE_BYTES
        self.storage = torch.zeros(2 * region, dtype=torch.int8)
        self.config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[
                KVCacheTensor(2 * region, list(names), region, PAGE_BYTES)
                for names in (STATE, ATTENTION)
            ],
            kv_cache_groups=[
                KVCacheGroupSpec(list(STATE), state or state_spec()),
                KVCacheGroupSpec(list(ATTENTION), attention or attention_spec()),
            ],
            kv_cache_layout="LBHNC",
        )
        self.tensors = {}
        for slot in range(2):
            raw = self.storage[slot * region : (slot + 1) * region]
            state_view = raw.view(BLOCKS, 1, 1, PAGE_BYTES)[..., :STATE_BYTES]
            self.tensors[STATE[slot]] = state_view
            floats = raw.view(torch.float32)
            self.tensors[ATTENTION[slot]] = floats.view(BLOCKS, 2, BLOCK_TOKENS, 64)
        layers = {name: types.SimpleNamespace(isa="vec") for name in ATTENTION}
        family = config_of(FAMILIES["nemotron-h"])
        self.vllm = types.SimpleNamespace(
            parallel_config=types.SimpleNamespace(tensor_parallel_size=1),
            cache_config=types.SimpleNamespace(kv_cache_layout="LBHNC", cache_dtype="auto"),
            compilation_config=types.SimpleNamespace(static_forward_context=layers),
            model_config=types.SimpleNamespace(
                model="tiny",
                revision=None,
                dtype=torch.float32,
                hf_text_config=types.SimpleNamespace(to_dict=lambda: family),
                get_total_num_kv_heads=lambda: 2,
            ),
        )

    def read(self, conv_layout="DS"):
        return read_cache(self.vllm, self.config, self.tensors, 0, ("0.32.0", conv_layout))


def test_the_layout_of_a_hybrid_cache():
    cache = Rank().read()
    layout = cache.layout
    assert (layout.block_tokens, layout.kernel_block_tokens) == (BLOCK_TOKENS, BLOCK_TOKENS)
    assert (layout.page_bytes, layout.packing, layout.spec_tokens) == (PAGE_BYTES, "cpu_vec", 0)
    assert layout.group_kinds == ("state", "attention")
    assert [layer.slot for layer in layout.layers] == [0, 1, 0, 1]
    sections = layout.by_name[STATE[0]].sections
    assert [item.section.name for item in sections] == ["x", "B", "C", "ssm"]
    assert [item.page_offset for item in sections] == [0, 128 * 12, 192 * 12, 256 * 12]
    assert type(layout).from_dict(layout.to_dict()) == layout


def test_a_model_has_the_name_that_it_has_on_other_hosts():
    """vLLM replaces the name of one in an object store by the folder that it was copied to."""
    rank = Rank()
    assert rank.read().layout.model_id == "tiny"
    rank.vllm.model_config.model_weights = ""
    assert rank.read().layout.model_id == "tiny"
    rank.vllm.model_config.model_weights = "s3://models/tiny"
    assert rank.read().layout.model_id == "s3://models/tiny"


def test_the_placement_of_a_hybrid_cache():
    rank = Rank()
    cache = rank.read()
    base = rank.storage.data_ptr()
    assert cache.placement.region_bases == (base, base + BLOCKS * PAGE_BYTES)
    assert cache.placement.block_strides == (PAGE_BYTES, PAGE_BYTES)
    assert dict(cache.placement.layer_region) == {
        STATE[0]: 0, STATE[1]: 1, ATTENTION[0]: 0, ATTENTION[1]: 1,
    }  # fmt: skip
    assert [(r.address, r.length_bytes) for r in cache.regions] == [(base, 2 * BLOCKS * PAGE_BYTES)]


def test_groups_as_the_scheduler_sees_them():
    facts = group_facts(Rank(state=state_spec(num_speculative_blocks=2)).config)
    assert [(item.kind, item.scratch_blocks) for item in facts] == [("state", 2), ("attention", 0)]
    assert facts[1].block_tokens == BLOCK_TOKENS


def test_the_tails_of_a_hybrid_cache_are_one_grid():
    """A launch each costs more than the zeroing: Nano's layers and heads take one together."""
    rank = Rank()
    cache = rank.read()
    packed = dataclasses.replace(
        cache.layout,
        layers=tuple(
            dataclasses.replace(layer, planes=(Plane("kv", 1, 256, 1),)) if layer.planes else layer
            for layer in cache.layout.layers
        ),
    )
    (tail,) = TailZeros(packed, cache.placement).of(BLOCK_TOKENS - 3, ((0,), (1,)))
    assert (tail.layers, tail.runs, tail.length) == (2, 2, 3 * 256)


def test_kernel_blocks_are_parts_of_blocks():
    rank = Rank()
    for name in ATTENTION:
        rank.tensors[name] = rank.tensors[name].reshape(BLOCKS * 2, 2, BLOCK_TOKENS // 2, 64)
    layout = rank.read().layout
    assert (layout.block_tokens, layout.kernel_block_tokens) == (BLOCK_TOKENS, BLOCK_TOKENS // 2)


def test_no_device_is_chosen_on_a_cpu():
    assert thread_setup(Rank().tensors)() is None


def wrong_address(rank):
    rank.tensors[STATE[1]] = rank.tensors[STATE[0]]


def wrong_stride(rank):
    rank.tensors[STATE[0]] = rank.storage.view(2 * BLOCKS, 1, 1, PAGE_BYTES)[:BLOCKS:2]


def wrong_heads(rank):
    rank.tensors[ATTENTION[0]] = rank.tensors[ATTENTION[0]].reshape(BLOCKS, 4, BLOCK_TOKENS, 32)


def more_heads_than_the_model_says(rank):
    rank.vllm.model_config.get_total_num_kv_heads = lambda: 1


def fewer_heads_than_the_model_says(rank):
    rank.vllm.model_config.get_total_num_kv_heads = lambda: 4


def no_tensor(rank):
    del rank.tensors[ATTENTION[1]]


def other_kernel(rank):
    rank.vllm.compilation_config.static_forward_context[ATTENTION[0]].isa = "neon"


def other_layout(rank):
    rank.config.kv_cache_layout = "LBNHC"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (wrong_address, f"cache of {STATE[1]}"),
        (wrong_stride, f"cache of {STATE[0]}"),
        (more_heads_than_the_model_says, r"KV heads of .*: expected 1, as the model says, got 2"),
        (fewer_heads_than_the_model_says, r"KV heads of .*: expected 4, as the model says, got 2"),
        (wrong_heads, f"cache of {ATTENTION[0]}"),
        (no_tensor, ATTENTION[1]),
        (other_kernel, "neon"),
        (other_layout, "LBNHC"),
    ],
)
def test_a_cache_that_is_not_where_it_should_be_is_refused(damage, words):
    rank = Rank()
    damage(rank)
    with pytest.raises(UnsupportedEngineError, match=words):
        rank.read()


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ({"state": state_spec(mamba_type=MambaAttentionBackendEnum.LINEAR)}, "LINEAR"),
        ({"state": state_spec(shapes=((512, 3), SSM))}, "bytes"),
        ({"state": state_spec(shapes=(CONV, (4, 32, 32)))}, "config.json"),
        ({"attention": attention_spec(SlidingWindowSpec, sliding_window=64)}, "full attention"),
        ({"attention": attention_spec(block_size=64)}, "page_bytes"),
    ],
)
def test_specifications_that_are_refused(specs, words):
    with pytest.raises((UnsupportedEngineError, GeometryError), match=words):
        Rank(**specs).read()


def eight_bits(rank):
    pages = rank.storage.view(torch.uint8).view(2, BLOCKS, PAGE_BYTES)[..., : PAGE_BYTES // 4]
    for slot, name in enumerate(ATTENTION):
        rank.tensors[name] = pages[slot].unflatten(1, (2, BLOCK_TOKENS, 64))


@pytest.mark.parametrize(
    ("setting", "name"),
    [("fp8", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2")],
)
def test_eight_bits_are_told_apart_by_their_setting(setting, name):
    rank = Rank(attention=attention_spec(dtype=torch.uint8, page_size_padded=PAGE_BYTES))
    rank.vllm.cache_config.cache_dtype = setting
    eight_bits(rank)
    layout = rank.read().layout
    assert (layout.kv_dtype, layout.packing) == (name, "cpu_vec")
    (heads,) = layout.by_name[ATTENTION[0]].sections
    assert heads.section.unit_bytes == 64  # a token of one head, keys and values


def test_scales_beside_the_values_are_refused():
    spec = attention_spec(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD)
    rank = Rank(attention=spec)
    eight_bits(rank)
    with pytest.raises(UnsupportedEngineError, match="scales made at run time"):
        rank.read()


def test_the_dtype_of_the_cache():
    rank = Rank()
    assert rank.read().layout.kv_dtype == "float32"
    rank.vllm.cache_config.cache_dtype = "float"
    assert rank.read().layout.kv_dtype == "float32"
    rank.vllm.cache_config.cache_dtype = "nvfp4"
    with pytest.raises(GeometryError, match="kv_cache_dtype"):
        rank.read()


def test_the_state_first_layout_is_one_rank_only():
    rank = Rank(state=state_spec(shapes=((3, 256), SSM)))
    assert rank.read("SD").layout.conv_layout == "SD"
    rank.vllm.parallel_config.tensor_parallel_size = 2
    with pytest.raises((UnsupportedEngineError, GeometryError)):
        rank.read("SD")
