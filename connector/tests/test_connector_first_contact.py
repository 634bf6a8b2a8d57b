"""Engines with both halves that meet before the first request: it makes no handshake any more.

Left out: when whom is asked (``test_connector_named_peers``, ``test_connector_meetings``).
"""

import pytest
from connector_engines import HYBRID, ONE_GROUP, World
from test_connector_two_engines import all_free, loaded, prefilled

from hybridpd_connector.notifications import Renew, decode_all


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def decode(world, ports="5600", **more):
    """A decode engine that knows where prefill engines of this world live."""
    d = world.engine("d", "consumer", meets=[f"10.0.0.1:{ports}"], **more)
    for rank in d.ranks:
        rank.warmed_up()
    return d


def met(engine, count=1):
    return all(rank.peers().get("ready") == count for rank in engine.ranks)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (1, 2), (2, 1)])
def test_the_first_request_finds_its_prefill_engine_ready(world, p_tp, d_tp):
    p = world.engine("p", "producer", tp_size=p_tp)
    d = decode(world, tp_size=d_tp)
    world.until(lambda: met(d), d)
    asked = len(world.asked)
    tokens, answer, made = prefilled(p, 33)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    assert d.pages_equal("d1", made, 32)
    wanted = [engine_id for engine_id in world.asked[asked:] if engine_id]
    assert wanted == [], "no handshake for a request"
    d.end("d1")
    world.until(lambda: all_free(p) and all_free(d))


def test_engines_without_the_setting_ask_nobody(world):
    world.engine("p", "producer")
    d = world.engine("d", "consumer")
    for _ in range(20):
        world.now += 1
        d.step()
    assert world.asked == []


def test_an_engine_is_met_again_after_its_restart(world):
    p = world.engine("p", "producer")
    d = decode(world)
    world.until(lambda: met(d), d)
    again = world.engine("p again", "producer", port=p.identity.port)
    world.now += 11
    world.until(lambda: d.ranks[0].peers()["evicted"] == 1 and met(d), d)
    tokens, answer, made = prefilled(again, 20)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    assert d.pages_equal("d1", made, 19)


def test_an_engine_of_another_shape_is_refused_and_the_others_serve(world, caplog):
    p = world.engine("p", "producer")
    world.engine("other", "producer", model=ONE_GROUP)
    d = decode(world, "5600-5601")
    world.until(lambda: met(d) and d.ranks[0].peers()["refused"] == 1, d)
    for _ in range(100):
        world.now += 5
        d.step()
    assert caplog.text.count("handshake with engine other failed") == 1
    assert met(d)
    tokens, answer, made = prefilled(p, 20)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    assert d.pages_equal("d1", made, 19)


def test_engines_that_do_both_meet_each_other_and_not_themselves(world):
    both = [
        world.engine(f"both-{number}", "both", model=HYBRID, meets=["10.0.0.1:5600-5603"])
        for number in range(2)
    ]
    for engine in both:
        engine.ranks[0].warmed_up()
    world.until(lambda: all(met(engine) for engine in both))
    for _ in range(30):
        world.now += 1
        for engine in both:
            engine.step()
    assert all(met(engine) for engine in both)


def test_a_first_request_is_a_sign_that_the_engine_has_warmed_up(world):
    """Another connector beside this one may have answered when vLLM asked for its hello."""
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer", meets=["10.0.0.1:5600"])
    for _ in range(10):
        for rank in d.ranks:
            rank.renew()
    assert world.asked == []
    tokens, answer, _ = prefilled(p, 20)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    world.until(lambda: "" in world.asked, d)


def test_a_handshake_speaks_to_every_rank_of_p_before_the_engine_has_to(world):
    """The first message connects; later it would do so on D's engine thread."""
    p = world.engine("p", "producer", model=ONE_GROUP, tp_size=4)
    d = decode(world, model=ONE_GROUP, tp_size=2)
    world.until(lambda: met(d), d)
    for rank in p.ranks:
        received = decode_all(rank._agent.take_notifications())
        assert received.messages == (Renew("d", ()),) * 2
        assert received.errors == ()
