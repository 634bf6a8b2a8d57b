"""The board of checksums by itself: slots, seals, what a hello may say, and the reader's pages."""

import ctypes
import dataclasses

import pytest
from connector_engines import HYBRID, World

from hybridpd_connector.agent_api import MemoryRegion, ReadState
from hybridpd_connector.agent_fake import FakeAgent, FakeNetwork
from hybridpd_connector.errors import WireError
from hybridpd_connector.handshake import decode_answer, encode_hello, encode_question
from hybridpd_connector.sum_board import MODES, SumReader, mode_of, seal_of, slot_of, slot_pages
from hybridpd_geometry import EngineFacts, RankSums, layout_of


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def test_the_modes():
    assert dict(MODES) == {"off": 0, "sample": 128, "all": 1}
    assert [mode_of(every) for every in (0, 1, 7, 128)] == ["off", "all", "1 of 7", "sample"]


@pytest.mark.parametrize("field", ["sums_every", "sums_slots"])
def test_a_hello_with_impossible_boards_is_refused(world, field):
    p = world.engine("p", "producer")
    responder = world.responders["10.0.0.1", p.identity.port]
    hello = decode_answer(responder.answer(encode_question("p", "d")))
    rank = dataclasses.replace(hello.ranks[0], **{field: -1})
    with pytest.raises(WireError):
        encode_hello(dataclasses.replace(hello, ranks=(rank,)))


def test_the_reader_takes_no_more_pages_than_it_has():
    network = FakeNetwork()
    p, d = FakeAgent("p", network), FakeAgent("d", network)
    layout = layout_of(HYBRID, EngineFacts(1), "model")
    sums = RankSums(layout, 1)
    pages = slot_pages(sums)
    memory = (ctypes.c_uint64 * (4 * pages * 512))()
    address = ctypes.addressof(memory)
    p.register([MemoryRegion(address, 4 * pages * 4096)])
    reader = SumReader(d, pages=3)
    view = reader.attach(d.add_peer(p.metadata()), address, 4, 1, sums)
    memory[2 * pages * 512] = 77
    first = reader.start(view, 6, 600)
    assert reader.start(view, 6, 600) is None
    assert reader.pages_used == 2
    while reader.poll(first) is ReadState.PENDING:
        pass
    header, words = reader.take(first)
    assert (header.mark, len(words)) == (77, 600)
    assert reader.finish(first)
    assert reader.pages_used == 0
    reader.detach(view)
    d.close()
    p.close()


def test_slots_go_round_and_seals_differ():
    assert [slot_of(n, 2, 3) for n in (2, 4, 6, 8)] == [1, 2, 0, 1]
    seals = {seal_of(1, [5, 6]), seal_of(2, [5, 6]), seal_of(1, [6, 5]), seal_of(1, [5, 6, 0])}
    assert len(seals) == 4
