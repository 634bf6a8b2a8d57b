"""When P hears that a prefill is not needed any more: in D's next step, and not never."""

import pytest
from connector_engines import World
from test_connector_two_engines import all_free, loaded, prefilled


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def test_the_step_that_reports_a_load_tells_p_nothing_and_the_next_one_does(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    for _ in range(3):
        p.step()
    assert not all_free(p)
    d.step()
    p.step()
    assert all_free(p)


def test_without_a_next_step_the_ticker_tells_it(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    world.network.fail_reads(1)
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    p.step()
    assert not all_free(p)
    # The failed read took the link with it: hands are shaken again for the release alone.
    world.until(lambda: d.ranks[0].renew() or all_free(p), p)


def test_a_second_request_that_comes_before_p_was_told_is_loaded_too(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, made = prefilled(p, 40)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    d.add("d2", tokens, answer)
    loaded(world, d, "d2")
    assert d.pages_equal("d2", made, 39)
    for request_id in ("d1", "d2"):
        d.end(request_id)
    world.until(lambda: all_free(p) and all_free(d))
