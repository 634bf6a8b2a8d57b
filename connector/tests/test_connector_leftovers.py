"""What is left behind, or let go too early, when a peer or an id does not behave as usual."""

import dataclasses
import threading

import pytest
from connector_engines import LEASE_SECONDS, World
from test_connector_two_engines import all_free, loaded, prefilled
from test_connector_worker_side import Linking

from hybridpd_connector.agent_fake import FakeAgent
from hybridpd_connector.consumer import Timeouts
from hybridpd_connector.errors import AgentError
from hybridpd_connector.wants import LINGER_SECONDS
from hybridpd_connector.worker_side import RankSettings, WorkerHalf


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def test_a_sample_that_comes_again_keeps_the_prefill_of_the_one_that_ended(world):
    """The release of the first one lingers for its siblings; it must not end the second's lease."""
    p, d = world.engine("p", "producer"), world.engine("d", "consumer")
    tokens, answer, made = prefilled(p, 40)
    for _ in range(2):
        d.add("0_same", tokens, answer)
        d.step()
        loaded(world, d, "0_same")
        assert d.pages_equal("0_same", made, 39)
        d.end("0_same")
        d.add("0_same", tokens, answer)
        d.step()
        world.now += LINGER_SECONDS + 0.1
        for _ in range(4):
            world.until(lambda: True)
        assert not all_free(p), "the second request still waits"
        loaded(world, d, "0_same")
        assert d.reasons == {}
        assert d.pages_equal("0_same", made, 39)
        d.end("0_same")
    world.now += LINGER_SECONDS + 0.1
    world.until(lambda: all_free(p) and all_free(d))


def test_engines_that_never_answer_leave_nothing_behind(world):
    """A router may name engines that are gone; each has a name of its own."""
    d = world.engine("d", "consumer")
    wants = d.ranks[0]._consumer._wants
    for number in range(5):
        p = world.engine(f"p{number}", "producer", port=7000 + number)
        tokens, answer, _ = prefilled(p, 40, seed=number)
        del world.responders["10.0.0.1", 7000 + number]
        d.add(f"d{number}", tokens, answer)
        world.until(lambda: True)
        d.end(f"d{number}")
    d.step()
    world.now += LEASE_SECONDS + 1
    d.step()
    assert wants.idle(world.now)
    assert not wants._unsent


@pytest.mark.parametrize("call", ["release_list", "remove_peer"])
def test_what_cannot_be_given_back_does_not_keep_the_rest(world, call, monkeypatch):
    linking = Linking(world)
    link = linking.build()
    good, refused = getattr(linking.agent, call), []

    def refuse_once(handle):
        if not refused:
            refused.append(handle)
            raise AgentError("agent d/0", f"to {call}", "the library refuses")
        good(handle)

    monkeypatch.setattr(linking.agent, call, refuse_once)
    with pytest.raises(AgentError, match="the library refuses"):
        linking.builder.take_apart(link)
    good(refused[0])
    assert linking.nothing_left()


def test_a_read_that_never_ends_costs_one_handshake_and_not_one_per_step(world, monkeypatch):
    p, d = world.engine("p", "producer"), world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40, "p1")
    d.add("stuck", tokens, answer)
    world.network.hang_reads("p/0")
    d.schedule("stuck")
    transfers = d.ranks[0]._consumer._transfers
    world.until(lambda: transfers.in_flight)
    agent = world.network.agents["d/0"]
    agent._reads[0].polls = -(10**9)
    world.network.resume("p/0")
    world.now += 61.0
    asked, ask = [], world.ask
    monkeypatch.setattr(world, "ask", lambda *question: asked.append(question) or ask(*question))
    for number in range(4):
        tokens, answer, made = prefilled(p, 40, f"q{number}", seed=number)
        d.add(f"d{number}", tokens, answer)
        loaded(world, d, f"d{number}")
        assert d.pages_equal(f"d{number}", made, 39)
        d.end(f"d{number}")
    assert len(asked) == 1
    agent._reads[0].polls = 0
    world.until(lambda: not transfers.in_flight and len(agent.peers) == 1)
    assert d.reasons == {"stuck": "deadline"}


def test_a_measurement_that_breaks_waits_for_its_next_turn(world, monkeypatch):
    """Also when it is not the transfer library that complains: a device may be lost."""
    p, d = world.engine("p", "producer"), world.engine("d", "consumer", links={})
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    tries, watch = [], d.ranks[0]._links

    def broken(*_):
        tries.append(1)
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(watch._prober, "measure", broken)
    world.now += 600
    for _ in range(3):
        watch.tick()
        watch._refresh.join()
    assert len(tries) == 1


def test_the_ticker_moves_reads_along_on_a_thread_that_is_prepared(world, monkeypatch):
    """On a GPU a thread without a device cannot post what a read still has to send."""
    d = world.engine("d", "consumer")
    agent = FakeAgent("d2/0", world.network)
    prepared, seen, ticked = set(), set(), threading.Event()

    def renew(_):
        seen.add(threading.get_ident())
        ticked.set()

    monkeypatch.setattr(WorkerHalf, "renew", renew)
    cache = dataclasses.replace(d.ranks[0]._cache, summer=None)
    half = WorkerHalf(
        cache,
        agent,
        world,
        RankSettings("d2", "consumer", LEASE_SECONDS, 1.0, 0.001, Timeouts()),
        prepare_thread=lambda: prepared.add(threading.get_ident()),
    )
    assert ticked.wait(30)
    assert seen == prepared
    half.close()
    # Whoever closes gives memory back to that device.
    assert prepared == {*seen, threading.get_ident()}
