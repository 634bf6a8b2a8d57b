"""What a stranger sends is read field by field; nothing of it is believed, nothing hangs."""

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_geometry_numbers import NANO

from hybridpd_geometry import (
    CacheLayout,
    EngineFacts,
    GeometryError,
    RankPlacement,
    ReadRequest,
    RequestBlocks,
    build_table,
    layout_of,
    plan_pair,
)

LAYOUT = layout_of(NANO, EngineFacts(2), "org/nano", revision="abc", vllm_version="0.32.0")
PLACEMENT = RankPlacement(1, 100, (1 << 40, 1 << 41), (4096, 4096), {"a": 0, "b": 1}, 3)


def test_both_survive_json() -> None:
    assert CacheLayout.from_dict(json.loads(json.dumps(LAYOUT.to_dict()))) == LAYOUT
    assert RankPlacement.from_dict(json.loads(json.dumps(PLACEMENT.to_dict()))) == PLACEMENT


def changed(data: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A deep copy of `data` with one value replaced; `path` is dotted, numbers index lists."""
    copy = json.loads(json.dumps(data))
    target = copy
    *parents, last = path.split(".")
    for name in parents:
        target = target[int(name)] if isinstance(target, list) else target[name]
    target[last] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("tp_size", "2", "layout.tp_size: expected a whole number, got '2'"),
        ("tp_size", True, "layout.tp_size: expected a whole number, got True"),
        ("tp_size", 2.0, "layout.tp_size: expected a whole number, got 2.0"),
        ("tp_size", 0, "layout.tp_size: expected 1..1024, got 0"),
        ("tp_size", 3, "tp_size: expected a divisor of"),
        ("page_bytes", 10**40, "a number of 133 bits"),
        ("page_bytes", 1000, "at most a page of 1000 bytes"),
        ("block_tokens", -1, "layout.block_tokens"),
        ("kernel_block_tokens", 60, "a multiple of the kernel block 60"),
        ("model_id", "", "layout.model_id: expected text"),
        ("model_id", "x" * 5000, "layout.model_id: expected text"),
        ("model_id", None, "layout.model_id"),
        ("revision", 7, "layout.revision"),
        ("conv_layout", "XY", "conv_layout: expected DS or SD"),
        ("layers", [], "layers: expected at least one"),
        ("layers", {}, "layout.layers: expected a list"),
        ("layers", [None], r"layout.layers\[0\]: expected an object"),
        ("layers", [{}] * 5000, "at most 4096 entries"),
        ("layers.0.kind", "other", "attention or state"),
        ("layers.0.group", 1, "expected one layer per slot of a group"),
        ("layers.0.group", 99, "groups numbered from 0"),
        ("layers.0.name", "layers.4.state", "unique layer names"),
        ("layers.0.slot", -1, "slot"),
        ("layers.0.sections", [], "sections: expected at least one"),
        ("layers.0.sections.0.unit_bytes", 1 << 60, "unit_bytes"),
        ("layers.0.sections.0.replicates", 1, "true or false"),
        ("layers.0.sections.1.page_offset", 5, "an offset of at least"),
        (
            "layers.0.planes",
            [{"name": "kv", "lanes": 1, "token_bytes": 1, "tile_tokens": 1}],
            "none on a state layer",
        ),
        ("layers.28.planes.0.lanes", 1 << 20, "bytes per head and token"),
        ("layers.28.planes", [], "bytes per head and token"),
        ("layers.28.planes.0.tile_tokens", 5, "a tile that divides the kernel block"),
        ("layers.28.group", 0, "layers"),
        ("surprise", 1, "no unknown fields"),
        ("layers.0.surprise", 1, "no unknown fields"),
    ],
)
def test_hostile_layouts(path: str, value: object, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        CacheLayout.from_dict(changed(LAYOUT.to_dict(), path, value))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("rank", -1, "placement.rank"),
        ("num_blocks", 0, "placement.num_blocks"),
        ("num_blocks", 1 << 40, "placement.num_blocks"),
        ("region_bases", [], "at least one region"),
        ("region_bases", [1], "1 strides, got 2"),
        ("region_bases", [1, (1 << 63) - 10], r"a region below 2\*\*63"),
        ("region_bases", ["1", 2], "a whole number"),
        ("block_strides", [0, 1], "block_strides"),
        ("layer_region", {"a": 2}, "a region below 2"),
        ("layer_region", {"a": -1}, "layer_region"),
        ("layer_region", [], "an object"),
        ("layer_region", {"x" * 1000: 0}, "text"),
        ("device_id", None, "device_id"),
    ],
)
def test_hostile_placements(path: str, value: object, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        RankPlacement.from_dict(changed(PLACEMENT.to_dict(), path, value))


def test_missing_fields_are_named() -> None:
    for name in LAYOUT.to_dict():
        data = LAYOUT.to_dict()
        del data[name]
        with pytest.raises(GeometryError, match=f"layout.{name}: expected a value, got nothing"):
            CacheLayout.from_dict(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
PATHS = [
    "tp_size",
    "layers",
    "layers.0",
    "layers.3.sections",
    "layers.28.planes",
    "page_bytes",
    "layers.0.sections.0",
    "packing",
    "conv_layout",
    "kv_dtype",
    "spec_tokens",
]


@settings(max_examples=80, deadline=None)
@given(path=st.sampled_from(PATHS), value=JSON)
def test_any_json_is_read_or_refused(path: str, value: object) -> None:
    data = json.loads(json.dumps(LAYOUT.to_dict()))
    target: Any = data
    *parents, last = path.split(".")
    for name in parents:
        target = target[int(name)] if isinstance(target, list) else target[name]
    target[int(last) if isinstance(target, list) else last] = value
    try:
        layout = CacheLayout.from_dict(data)
    except GeometryError as error:
        shown = str(error)
    else:
        shown = ""
        assert CacheLayout.from_dict(layout.to_dict()) == layout
    assert len(shown) < 600


NUMBERS = ["kernel_block_tokens", "tp_size", "block_tokens", "page_bytes", "spec_tokens",
           "layers.0.slot", "layers.28.group", "layers.0.sections.0.extent",
           "layers.0.sections.1.page_offset", "layers.28.sections.0.extent",
           "layers.28.planes.0.lanes", "layers.28.planes.0.token_bytes",
           "layers.28.planes.0.tile_tokens"]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    changes=st.dictionaries(
        st.sampled_from(NUMBERS),
        st.sampled_from([0, 1, 2, 4, 8, 16, 131, 512, 1048, 2096, 1 << 20, 1 << 30]),
        max_size=2,
    ),
    stride=st.sampled_from([512, LAYOUT.page_bytes, 1 << 21, (1 << 21) + 16, (1 << 21) + 1]),
    block=st.integers(-1, 12),
)
def test_a_strange_peer_is_refused_or_read_inside_its_memory(
    changes: dict[str, int], stride: int, block: int
) -> None:
    data = LAYOUT.to_dict()
    for path, value in changes.items():
        data = changed(data, path, value)
    regions, blocks, tokens = LAYOUT.region_count, 12, 5000
    try:
        theirs = CacheLayout.from_dict(data)
        plan = plan_pair(theirs, LAYOUT, 1)
        own, other = (
            RankPlacement(
                rank, blocks, (1 << 40,) * regions, (size,) * regions,
                {layer.name: layer.slot for layer in LAYOUT.layers},
            )
            for rank, size in ((1, LAYOUT.page_bytes), (plan.sources[0], stride))
        )  # fmt: skip
        table = build_table(plan, plan.sources[0], own, other)
        ids = tuple(range(-(-tokens // LAYOUT.block_tokens)))
        needed = -(-tokens // theirs.block_tokens)
        source = RequestBlocks(tuple((block,) * needed for _ in theirs.group_kinds))
        request = ReadRequest(tokens, source, RequestBlocks(tuple(ids for _ in LAYOUT.group_kinds)))
        runs = table.id_runs(request)
    except GeometryError as error:
        shown = str(error)
    else:
        shown = ""
        last = max(run.remote_first + run.units - 1 for run in runs)
        assert table.locate_remote(last).block < blocks
        assert min(run.remote_first for run in runs) >= 0
    assert len(shown) < 2000


def test_errors_keep_their_parts_between_processes() -> None:
    error = GeometryError("tp_size", "a divisor of 8", 3, "Use 2 or 4.")
    assert str(error) == "tp_size: expected a divisor of 8, got 3. Use 2 or 4."
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.field, copy.expected, copy.got, copy.hint) == (
        "tp_size",
        "a divisor of 8",
        3,
        "Use 2 or 4.",
    )
    assert str(copy) == str(error)
