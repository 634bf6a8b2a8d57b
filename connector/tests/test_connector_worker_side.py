"""The worker half by itself: nothing blocks, nothing counts twice, nothing stays open."""

import dataclasses
import threading

import pytest
from connector_engines import LEASE_SECONDS, World
from test_connector_two_engines import all_free, loaded, prefilled

from hybridpd_connector.errors import AgentError, RefusedError, SideChannelError
from hybridpd_connector.handshake import decode_answer, encode_hello
from hybridpd_connector.lease_board import BoardReader
from hybridpd_connector.metadata import Load, StepOrders
from hybridpd_connector.peer_link import LinkBuilder, LocalCache
from hybridpd_connector.peers import Address
from hybridpd_connector.worker_side import Ticker


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def test_a_silent_peer_does_not_hold_the_engine_up(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    answering = threading.Event()
    ask, asked = world.ask, threading.Event()

    def silent(*question):
        asked.set()
        answering.wait(30)
        return ask(*question)

    world.ask = silent
    tokens, answer, made = prefilled(p, 40)
    d.add("d1", tokens, answer)
    d.schedule("d1")
    for _ in range(5):
        d.step()
    assert asked.wait(30)
    for _ in range(5):
        d.step()
    assert d.requests["d1"].status == "loading"
    answering.set()
    world.until(lambda: d.requests["d1"].status == "running")
    assert d.pages_equal("d1", made, 39)


def step_of_load(world, polls, wait):
    """Steps of D from the one that posts a warm read to the one that reports it, 0 = the same."""
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer", step_wait_seconds=wait)
    world.network.delay_reads(1)
    tokens, answer, _ = prefilled(p, 40, "p0", seed=1)
    d.add("d0", tokens, answer)
    d.schedule("d0")
    world.until(lambda: d.requests["d0"].status == "running")
    world.network.delay_reads(polls)
    world.tick = 0.0001
    tokens, answer, made = prefilled(p, 40, "p1", seed=2)
    d.add("d1", tokens, answer)
    d.schedule("d1")
    for step in range(100):
        d.step()
        if d.requests["d1"].status == "running":
            assert d.pages_equal("d1", made, 39)
            return step
    raise AssertionError("not loaded")


def test_a_load_that_ends_soon_is_reported_in_the_step_that_posts_it(world):
    """Both the read and the question to the lease board take four looks."""
    assert step_of_load(world, polls=4, wait=0.002) == 0


def test_a_load_that_takes_longer_holds_no_step_up(world):
    begun = world.now
    steps = step_of_load(world, polls=60, wait=0.002)
    assert steps > 0
    # The clock moves only when it is looked at: no step has waited longer than it may.
    assert world.now - begun < 0.01 + (steps + 1) * 0.004


def test_without_a_wait_a_step_looks_once(world):
    assert step_of_load(world, polls=4, wait=0.0) > 0


def test_peers_are_counted_by_the_ticker_and_told_once(world):
    """Not by the engine's thread, in every step."""
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    rank = d.ranks[0]
    rank.renew()
    before = rank.take_stats()["peers"]
    assert not any(before.values())
    tokens, answer, _ = prefilled(p, 40)
    d.add("r", tokens, answer)
    d.schedule("r")
    world.until(lambda: rank.peers()["ready"])
    rank.renew()
    assert rank.take_stats()["peers"] == {**before, "ready": 1}
    rank.renew()
    assert not (rank.take_stats() or {"peers": {}})["peers"]


def test_a_step_that_is_shown_twice_counts_once(world):
    d = world.engine("d", "producer")
    load = Load("r", (), 0, "other_prompt")
    for step in (1, 1):
        d.ranks[0].absorb(StepOrders(step, loads=(load,)))
    assert d.ranks[0].poll()[1] == {"r": "other_prompt"}
    d.ranks[0].absorb(StepOrders(1, loads=(load,)))
    assert d.ranks[0].poll()[1] == {}


def test_a_load_of_a_request_that_never_arrived_is_reported_as_failed(world):
    d = world.engine("d", "consumer")
    d.ranks[0].absorb(StepOrders(1, loads=(Load("r", ((1,),), 0),)))
    results, reasons = d.ranks[0].poll()
    assert results.received == results.failed == {"r"}
    assert reasons == {"r": "unknown_request"}


def test_a_flood_of_garbage_is_one_line_and_hides_no_release(world, caplog):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    d.end("d1")
    agent = world.network.agents["d/0"]
    for number in range(500):
        agent.send_notification("p/0", b"garbage\n%d" % number)
    world.until(lambda: all_free(p))
    lines = [line for line in caplog.messages if "ignored" in line]
    assert lines
    assert len(lines) < 5
    assert all(line.isprintable() for line in lines)


def test_orders_about_unknown_requests_are_ignored(world):
    d = world.engine("d", "consumer")
    d.ranks[0].absorb(StepOrders(1, leaves=("x",), aborts=("y",)))
    assert d.ranks[0].poll() == (type(d.ranks[0].poll()[0])(), {})


def test_a_peer_that_is_lost_is_shaken_hands_with_again(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40, "p1", seed=1)
    world.network.fail_reads(1)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    assert d.reasons == {"d1": "read_failed"}
    tokens, answer, made = prefilled(p, 40, "p2", seed=2)
    d.add("d2", tokens, answer)
    loaded(world, d, "d2")
    assert d.pages_equal("d2", made, 39)


def test_lost_messages_cost_time_and_nothing_else(world):
    """A release that never arrives: the lease ends by itself."""
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, made = prefilled(p, 40)
    d.add("d1", tokens, answer)
    world.network.lose_notifications(1000)
    loaded(world, d, "d1")
    assert d.pages_equal("d1", made, 39)
    for _ in range(5):
        p.step()
    assert not all_free(p)
    world.now += LEASE_SECONDS + 1
    p.step()
    assert all_free(p)


def test_closing_twice_is_harmless_and_leaves_nothing_open(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    for _ in range(2):
        d.close()
    agent = world.network.agents.get("d/0")
    assert agent is None or (agent.open_reads, agent.peers) == (0, frozenset())


@pytest.mark.parametrize(
    "error", [AgentError("agent", "to work", "did not"), RuntimeError("can't start new thread")]
)
def test_a_ticker_outlives_a_failed_tick(error):
    ticks, again = [], threading.Event()

    def tick():
        ticks.append(1)
        if len(ticks) == 1:
            raise error
        again.set()

    ticker = Ticker(tick, 0.001, "test")
    assert again.wait(30)
    ticker.close()
    ticker.close()


class Linking:
    """A D rank's link builder against one P engine, with a hello that can be damaged."""

    def __init__(self, world):
        self.p = world.engine("p", "producer", tp_size=2)
        self.d = world.engine("d", "consumer")
        self.world = world
        rank = self.d.ranks[0]
        self.agent = world.network.agents["d/0"]
        boards = BoardReader(self.agent)
        local = LocalCache(
            "d", rank.layout, self.d.memories[0].placement, self._memory(), lambda ranges: None
        )
        self.builder = LinkBuilder(local, self.agent, boards, self, 1.0)
        self.damage = lambda hello: hello
        self.lists = self.agent.open_lists

    def _memory(self):
        from hybridpd_connector.agent_api import Memory

        return Memory.DRAM

    def ask(self, host, port, question, timeout_seconds):
        hello = decode_answer(self.world.ask(host, port, question, timeout_seconds))
        return encode_hello(self.damage(hello))

    def build(self):
        return self.builder.build("p", Address("10.0.0.1", self.p.identity.port))

    def nothing_left(self):
        return self.agent.open_lists == self.lists and not self.agent.peers


def change_rank(hello, **changes):
    first = dataclasses.replace(hello.ranks[0], **changes)
    return dataclasses.replace(hello, ranks=(first, *hello.ranks[1:]))


def placement_of(hello, **changes):
    return change_rank(hello, placement={**hello.ranks[0].placement, **changes})


DAMAGES = {
    "role": lambda hello: dataclasses.replace(hello, role="consumer"),
    "layout": lambda hello: dataclasses.replace(hello, layout={**hello.layout, "page_bytes": -1}),
    "other dtype": lambda hello: dataclasses.replace(
        hello, layout={**hello.layout, "conv_dtype": "float16"}
    ),
    "addresses": lambda hello: placement_of(hello, region_bases=[1, 2]),
    "missing layer": lambda hello: placement_of(hello, layer_region={}),
    "metadata": lambda hello: change_rank(hello, agent_metadata=b"nonsense"),
    "board": lambda hello: change_rank(hello, board_address=8),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_handshake_that_fails_leaves_nothing_behind(world, damage):
    linking = Linking(world)
    linking.damage = damage
    with pytest.raises((RefusedError, AgentError)):
        linking.build()
    assert linking.nothing_left()


def test_a_link_that_is_taken_apart_leaves_nothing_behind(world):
    linking = Linking(world)
    first, second = linking.build(), linking.build()
    linking.builder.take_apart(first)
    assert linking.agent.peers == {"p/0", "p/1"}
    linking.builder.take_apart(second)
    assert linking.nothing_left()


def test_a_refusal_names_every_difference(world):
    linking = Linking(world)
    linking.damage = lambda hello: dataclasses.replace(
        hello, layout={**hello.layout, "vllm_version": "0.31.0", "model_id": "another"}
    )
    with pytest.raises(RefusedError) as refusal:
        linking.build()
    for words in ("vllm_version", "0.31.0", "0.32.0", "model_id", "another"):
        assert words in str(refusal.value)


def test_nobody_at_the_address(world):
    linking = Linking(world)
    with pytest.raises(SideChannelError):
        linking.builder.build("p", Address("10.0.0.9", 1))
    assert linking.nothing_left()
