"""The geometry says what a real engine allocates: groups, blocks, pages and their strides."""

import json
import math

import pytest

from hybridpd_geometry import EngineFacts, facts_from_config, plan_engine
from hybridpd_testkit.checkpoint_families import FAMILIES

CPU_ALIGNMENT_TOKENS = 128


@pytest.mark.parametrize("kind", ["p1", "e2"])
@pytest.mark.parametrize("family", [name.replace("-", "_") for name in FAMILIES])
def test_vllm_cache_sizes(pool, family, kind):
    name = next(name for name in FAMILIES if name.replace("-", "_") == family)
    dtype = FAMILIES[name].dtype
    (engine,) = pool.engines(name, kind)
    config = json.loads((pool.checkpoint(name) / "config.json").read_text())
    planned = plan_engine(
        facts_from_config(config),
        EngineFacts(
            tp_size=engine.spec.tp_size,
            kv_dtype=dtype,
            conv_dtype=dtype,
            ssm_dtype="float32",
            alignment_tokens=CPU_ALIGNMENT_TOKENS,
            packing="cpu_vec",
        ),
    )
    reports = engine.worker_reports()
    assert [report["rank"] for report in reports] == list(range(planned.tp_size))
    for report in reports:
        check_rank(report, planned)


def check_rank(report, planned):
    assert report["block_tokens"] == planned.block_tokens
    seen = [(group["kind"], len(group["layers"])) for group in report["groups"]]
    assert sorted(seen) == sorted((group.kind, len(group.layers)) for group in planned.groups)
    for group in report["groups"]:
        assert group["page_bytes"] == planned.page_bytes
        if group["kind"] == "state":
            parts = [
                math.prod(shape) * item
                for shape, item in zip(group["shapes"], group["item_bytes"], strict=True)
            ]
            assert parts == [size for size in (planned.conv_bytes, planned.ssm_bytes) if size]
            assert group["page_bytes"] - sum(parts) == planned.padding_bytes
        else:
            assert group["block_tokens"] == planned.block_tokens
    for tensor in report["tensors"]:
        assert tensor["block_stride"] == planned.page_bytes
        memory = report["num_blocks"] * planned.region_count * planned.page_bytes
        assert tensor["size"] == memory
        assert planned.blocks_for_memory(memory) == report["num_blocks"]
