"""Every family's bytes between two engines' ranks, over the in-memory agent.

The same class runs on the real agent in ``connector/tests_vllm/test_vllm_family_bytes.py``.
"""

import pytest
from family_bytes import EIGHT_BITS, PACKINGS, FamilyBytes, Rank, layout, layout_with, load
from geometry_cases import dealt_blocks
from geometry_reads import wrong_sections
from geometry_reference import make_state

from hybridpd_connector.agent_api import Agent
from hybridpd_connector.agent_fake import FakeAgent, FakeNetwork
from hybridpd_geometry import EngineFacts, ReadRequest, plan_pair, predict


class TestFakeFamilyBytes(FamilyBytes):
    network = FakeNetwork()

    def make_agent(self, name: str) -> Agent:
        return FakeAgent(name, self.network)


@pytest.mark.parametrize("section", ["q", "k", "v", "ssm", "kv"])
def test_a_wrong_byte_is_named_by_its_section(section: str) -> None:
    """The comparison above sees one wrong byte in any section of any layer."""
    network = FakeNetwork()
    source = layout("gdn", 1, 1, 1)
    tokens = source.block_tokens + 9
    made = make_state(source, tokens, seed=1)
    blocks = dealt_blocks(source, tokens, 0)
    p, d = (Rank(source, 0, tokens, FakeAgent(name, network)) for name in "pd")
    p.memory.write_request(made, blocks)
    load(d, [p.told()], ReadRequest(tokens, blocks, blocks), p.agent.take_notifications)
    assert wrong_sections(d.memory, made, blocks) == []
    layer = next(
        layer
        for layer in source.layers
        if section in {item.section.name for item in layer.sections}
    )
    offset = next(i.page_offset for i in layer.sections if i.section.name == section)
    d.memory.bytes[d.memory.page_at(layer, blocks.groups[layer.group][-1]) + offset] ^= 1
    (wrong,) = wrong_sections(d.memory, made, blocks)
    assert wrong.startswith(f"{layer.name}.{section},")


@pytest.mark.parametrize("packing", PACKINGS)
def test_fp8_halves_what_attention_moves(packing: str) -> None:
    """In every packing; that the right bytes move is shown above, for the same layouts."""
    moved = []
    for dtype in ("bfloat16", "fp8_e5m2"):
        engine = EngineFacts(1, kv_dtype=dtype, block_size=64, packing=packing)
        side = layout_with(EIGHT_BITS, engine, 1, "fp8")
        moved.append(predict(plan_pair(side, side, 0), 40).by_section)
    wide, narrow = moved
    halved = {name for name in wide if wide[name] == 2 * narrow[name]}
    assert halved == ({"kv"} if packing == "token" else {"k", "v"})
    assert {name for name in wide if wide[name] == narrow[name]} == {"x", "B", "C", "ssm"}
