"""Engines that take no step, or get nowhere: what they want must not be held for them for ever.

A thread renews leases whatever the engine does, so a long step loses none. An engine that hangs, or
that was paused, would keep the blocks of its prefill engines without end: a pause of those, which
waits for their blocks, would never end either. And engines of both roles may wait for each other.
"""

import logging

import pytest
from connector_engines import LEASE_SECONDS, TO_PREFILL, World
from geometry_reference import make_state

READ_SECONDS = 60  # of the engines here: twice the lease
TICK = LEASE_SECONDS / 8


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def offered(source, request_id, length=40):
    """(tokens, answer) of a prompt that ``source`` has prefilled, and holds."""
    tokens = [(len(request_id) * 131 + i * 7) % 500 for i in range(length)]
    source.add(request_id, tokens, dict(TO_PREFILL))
    return tokens, source.prefill(request_id, make_state(source.layout, length - 1, seed=1))


def met(world, engine, *others):
    """Step everybody until ``engine`` has met as many others."""
    world.until(lambda: all(rank.peers()["ready"] == len(others) for rank in engine.ranks))


def pass_time(world, seconds, *, stepping, ticking):
    """Time passes; ``stepping`` engines take steps, of the others only the ticker's thread runs."""
    for _ in range(int(seconds / TICK)):
        world.now += TICK
        for engine in ticking:
            for rank in engine.ranks:
                rank.renew()
        for engine in stepping:
            engine.step()


def idle(engine, blocks=24):
    return sorted(engine.free) == list(range(1, blocks))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_engine_that_takes_no_step_for_long_renews_nothing(world, tp_size, caplog):
    p, d = world.engine("p", "producer"), world.engine("d", "consumer", tp_size=tp_size)
    tokens, answer = offered(p, "p1")
    d.add("d1", tokens, answer)
    met(world, d, p)
    pass_time(world, READ_SECONDS - TICK, stepping=[p], ticking=[d])
    assert not idle(p), "a step may take long"
    with caplog.at_level(logging.WARNING):
        pass_time(world, LEASE_SECONDS + 3 * TICK, stepping=[p], ticking=[d])
    assert idle(p)
    assert caplog.text.count("leases are not renewed") == tp_size, "told once"
    # The engine goes on: the request fails, nothing is read that P has given to others.
    d.schedule("d1")
    world.until(lambda: idle(d))
    assert d.reasons["d1"] == "lease_ended"


def test_a_first_request_after_an_idle_time_is_renewed_through_a_long_step(world):
    p, d = world.engine("p", "producer"), world.engine("d", "consumer")
    tokens, answer = offered(p, "p0")
    d.add("d0", tokens, answer)
    met(world, d, p)
    d.end("d0")
    world.until(lambda: idle(p) and idle(d))
    pass_time(world, 3 * READ_SECONDS, stepping=[p], ticking=[d])
    tokens, answer = offered(p, "p1")
    d.add("d1", tokens, answer)
    orders = d.half.build_orders()
    for rank in d.ranks:
        rank.absorb(orders)
    world.until(lambda: all(rank.renew() or rank.peers()["ready"] == 1 for rank in d.ranks), p)
    pass_time(world, READ_SECONDS - TICK, stepping=[p], ticking=[d])
    assert not idle(p)


def test_engines_that_wait_for_each_others_blocks_go_on(world):
    """All blocks of both are held for the other, whose requests get none: nothing would end."""
    a, b = world.engine("a", "both"), world.engine("b", "both")
    for source, target in ((a, b), (b, a)):
        tokens, answer = offered(source, f"from-{source.name}")
        target.add(f"to-{target.name}", tokens, answer)
    met(world, a, b)
    met(world, b, a)
    pass_time(world, READ_SECONDS - TICK, stepping=[a, b], ticking=[])
    assert not idle(a)
    assert not idle(b)
    pass_time(world, LEASE_SECONDS + 3 * TICK, stepping=[a, b], ticking=[])
    assert idle(a)
    assert idle(b)
    for engine in (a, b):
        engine.schedule(f"to-{engine.name}")
    world.until(lambda: idle(a) and idle(b))
    assert a.reasons["to-a"] == b.reasons["to-b"] == "lease_ended"


@pytest.mark.parametrize("by", ["prefills", "requests of its own"])
def test_an_engine_of_both_roles_that_gets_on_keeps_what_its_queue_waits_for(world, by):
    a, b = world.engine("a", "both"), world.engine("b", "both")
    tokens, answer = offered(a, "from-a")
    b.add("to-b", tokens, answer)
    tokens, answer = offered(b, "from-b")
    a.add("to-a", tokens, answer)
    met(world, b, a)
    met(world, a, b)
    for round_ in range(6):
        # Something ends at b now and then; it always holds a prefill for somebody.
        pass_time(world, LEASE_SECONDS, stepping=[a, b], ticking=[])
        if by == "prefills":
            offered(b, f"more-{round_}")
        else:
            b.ranks[0].poll(ended=True)
    assert not idle(a)
    b.schedule("to-b")
    world.until(lambda: b.requests["to-b"].status == "running")
