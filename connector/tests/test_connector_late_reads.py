"""Reads that outlast their deadline: the request goes on without, its blocks wait for the read."""

import itertools

import pytest
from connector_engines import LEASE_SECONDS, Pool, World
from geometry_reference import make_state
from test_connector_two_engines import all_free, loaded, prefilled

from hybridpd_connector.held_blocks import HeldBlocks

READ_SECONDS = 60.0  # of the engines of these tests
POLICIES = ("fail", "recompute")


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


class Late:
    """A load of two ranks, of which the second one's source is frozen."""

    def __init__(self, world, policy):
        self.world, self.policy = world, policy
        self.p = world.engine("p", "producer", tp_size=2)
        self.d = world.engine("d", "consumer", tp_size=2, policy=policy)
        self.tokens, self.answer, self.made = prefilled(self.p, 40)
        self.d.add("d1", self.tokens, self.answer)
        world.until(lambda: all(rank.peers()["ready"] for rank in self.d.ranks))
        world.network.hang_reads("p/1")
        self.d.schedule("d1")
        self.blocks = {block for group in self.d.requests["d1"].blocks for block in group}
        world.until(lambda: self.d.ranks[1].reading and not self.d.ranks[0].reading, self.d)

    @property
    def held(self):
        return self.d.half.decode.held.count

    @property
    def status(self):
        request = self.d.requests.get("d1")
        return request.status if request else "gone"

    def reach(self, state):
        if state != "reading":
            self.world.now += READ_SECONDS
            self.d.step()
            assert (self.status, self.held) == ("loading", len(self.blocks))
        if state in ("abandoned", "landed"):
            self.d.step()
            assert self.status == self.given_up
        if state == "landed":
            self.play("arrives")

    @property
    def given_up(self):
        """What the request is when its load was abandoned."""
        return "gone" if self.policy == "fail" else "running"

    def play(self, event):
        if event == "arrives":
            self.world.network.resume("p/1")
        elif event == "breaks":
            self.world.network.kill("p/1")
        elif event == "abort" and self.status in ("loading", "running"):
            self.d.end("d1")
        for _ in range(3):
            self.d.step()

    def require_clean(self):
        self.world.network.resume("p/1")
        self.world.until(lambda: self.status != "loading", self.d)
        if self.status == "running":
            self.d.end("d1")
        self.world.until(lambda: all_free(self.d), self.d)
        assert (self.held, self.d.ranks[0].reading, self.d.ranks[1].reading) == (0, False, False)


STATES = ("reading", "late", "abandoned", "landed")
EVENTS = ("nothing", "arrives", "breaks", "abort")
GIVEN_UP = "given up"
# (the request, are its first blocks held). GIVEN_UP: an error, or computed here, by the policy.
CELLS = {
    ("reading", "nothing"): ("loading", False),
    ("reading", "arrives"): ("running", False),
    ("reading", "breaks"): (GIVEN_UP, False),
    ("reading", "abort"): ("finished", False),  # vLLM itself keeps the blocks
    ("late", "nothing"): (GIVEN_UP, True),
    ("late", "arrives"): (GIVEN_UP, False),
    ("late", "breaks"): (GIVEN_UP, False),
    ("late", "abort"): ("gone", True),
    ("abandoned", "nothing"): (GIVEN_UP, True),
    ("abandoned", "arrives"): (GIVEN_UP, False),
    ("abandoned", "breaks"): (GIVEN_UP, False),
    ("abandoned", "abort"): ("gone", True),
    ("landed", "nothing"): (GIVEN_UP, False),
    ("landed", "arrives"): (GIVEN_UP, False),
    ("landed", "breaks"): (GIVEN_UP, False),
    ("landed", "abort"): ("gone", False),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("state", "event"), list(itertools.product(STATES, EVENTS)))
def test_late_read(world, state, event, policy):
    late = Late(world, policy)
    late.reach(state)
    late.play(event)
    status, held = CELLS[state, event]
    assert late.status == (late.given_up if status is GIVEN_UP else status)
    assert late.held == (len(late.blocks) if held else 0)
    if held:
        assert late.blocks.isdisjoint(late.d.free)
    late.require_clean()


def test_no_cell_of_a_late_read_is_left_out():
    assert set(CELLS) == set(itertools.product(STATES, EVENTS))


@pytest.mark.parametrize("policy", POLICIES)
def test_late_bytes_hit_nobody(world, policy):
    """Every free block is another request's when the frozen engine goes on."""
    late = Late(world, policy)
    late.reach("abandoned")
    d = late.d
    others, made = [], make_state(d.layout, 16, seed=5)
    while len(d.free) >= len(d.layout.group_kinds):
        name = f"local{len(others)}"
        d.add(name, list(range(16)), None)
        d.schedule(name)
        d.fill(d.requests[name], made)
        others.append(name)
    assert others
    if policy == "recompute":
        d.fill(d.requests["d1"], late.made)
    before = [memory.bytes.copy() for memory in d.memories]
    world.network.resume("p/1")
    world.until(lambda: not late.held, d)
    changed = [
        (before_here != memory.bytes).any()
        for before_here, memory in zip(before, d.memories, strict=True)
    ]
    assert changed == [False, True]  # the bytes did come, on the rank that waited for them
    assert all(d.pages_equal(name, made, 16) for name in others)
    if policy == "recompute":
        assert d.pages_equal("d1", late.made, 39)
    for name in others:
        d.end(name)
    late.require_clean()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_late_read_is_counted_once_and_tells_why(world, policy):
    late = Late(world, policy)
    late.reach("abandoned")
    stats = late.d.half.take_stats()
    assert stats["failures"] == {"deadline": 1}
    assert stats["gauges"] == {"blocks_held": len(late.blocks)}
    assert late.d.reasons == {"d1": "deadline"}
    late.play("arrives")
    late.require_clean()
    stats = late.d.half.take_stats()
    assert (stats["failures"], stats["gauges"]) == ({}, {"blocks_held": 0})


def test_prefill_is_told_at_once_and_the_next_load_is_right(world):
    """The release is on its way before the read has ended; an engine that thaws acts on it."""
    late = Late(world, "fail")
    late.reach("abandoned")
    world.network.resume("p/1")
    world.now += 1.0
    world.until(lambda: all_free(late.p) and all_free(late.d))
    tokens, answer, made = prefilled(late.p, 50, "p2", seed=3)
    world.now += LEASE_SECONDS
    late.d.add("d2", tokens, answer)
    loaded(world, late.d, "d2")
    assert late.d.pages_equal("d2", made, 49)
    assert all(rank.peers()["ready"] == 1 for rank in late.d.ranks)


def test_a_rank_that_still_waits_for_its_peer_abandons_the_load_too(world):
    p, d = world.engine("p", "producer"), world.engine("d", "consumer", tp_size=2)
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    world.until(lambda: all(rank.peers()["ready"] for rank in d.ranks))
    world.network.hang_reads("p/0")
    del world.responders["10.0.0.1", p.identity.port]
    d.ranks[1]._consumer._peers.lost("p", "its connection broke")
    d.schedule("d1")
    d.step()
    assert [rank.reading for rank in d.ranks] == [True, False]
    d.half.on_late({"d1"}, {})
    d.step()
    assert d.requests == {}
    assert d.half.decode.held.count > 0
    world.network.resume("p/0")
    world.until(lambda: all_free(d), d)


def test_an_id_that_comes_again_during_its_late_read_is_not_loaded(world):
    late = Late(world, "fail")
    late.reach("abandoned")
    tokens, answer, _ = prefilled(late.p, 40, "p2")
    late.d.add("d1", tokens, answer)
    late.d.schedule("d1")
    for _ in range(3):
        late.d.step()
    assert late.status == "gone"
    assert late.held == len(late.blocks)
    late.require_clean()


def test_without_a_pool_the_request_waits():
    held = HeldBlocks(1)
    assert not held.hold("r", [[1]])
    assert held.count == 0


def test_blocks_are_held_once_and_until_every_rank_has_landed(caplog):
    pool, held = Pool(8), HeldBlocks(2)
    held.bind(pool)
    blocks = [pool.take() for _ in range(3)]
    assert held.hold("r", [[0, blocks[0], blocks[1]], [blocks[2]]])
    assert not held.hold("r", [[blocks[0]]])
    pool.free_blocks(blocks)
    held.landed({"r": 1})
    assert (held.count, len(pool.free)) == (3, 4)
    held.landed({"r": 1})
    assert (held.count, len(pool.free)) == (0, 7)
    held.landed({"r": 1})
    assert "no block of it was held" in caplog.text
