"""What clients and timing can do to a request must end that request at most, never an engine."""

import pytest
from connector_engines import LEASE_SECONDS, TO_PREFILL, World
from geometry_reference import make_state
from test_connector_two_engines import all_free, loaded, prefilled, prompt

from hybridpd_connector.errors import AgentError
from hybridpd_connector.notifications import MAX_TEXT

LONG = "x" * (MAX_TEXT + 1)


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


@pytest.mark.parametrize("request_id", [LONG, "bell\x07"], ids=["long", "unprintable"])
@pytest.mark.parametrize("length", [1, 40])
def test_a_prefill_whose_id_cannot_be_told_is_not_handed_over(world, request_id, length):
    """Ids come from clients (X-Request-Id). vLLM ends with any error raised here."""
    p = world.engine("p", "producer")
    p.add(request_id, prompt(length), dict(TO_PREFILL))
    assert p.prefill(request_id, make_state(p.layout, max(1, length - 1), seed=1)) is None
    assert all_free(p)
    assert p.half.build_orders().pins == ()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("request_id", [LONG, "", "\ud800", "a\0\n"], ids=range(4))
def test_a_reader_with_an_odd_id_releases_like_any_other(world, fails, request_id):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, made = prefilled(p, 40)
    world.network.fail_reads(int(fails))
    d.add(request_id, tokens, answer)
    loaded(world, d, request_id)
    if not fails:
        assert d.pages_equal(request_id, made, 39)
        d.end(request_id)
        world.until(lambda: all_free(p))
    assert all_free(d)


def test_samples_are_released_also_when_the_decode_engine_has_no_more_steps(world):
    """An idle engine makes no steps; its ticker goes on, and must not renew for ever."""
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer", tp_size=2)
    tokens, answer, _ = prefilled(p, 40)
    for request_id in ("0_d1", "1_d1"):
        d.add(request_id, tokens, answer)
        loaded(world, d, request_id)
        d.end(request_id)
    world.now += 3.0
    for rank in d.ranks:
        rank.renew()
    world.until(lambda: all_free(p), p)


def test_ranks_that_fail_in_different_steps_name_the_reason_once(world):
    """vLLM joins the ranks' results over steps, but shows what a rank said only in its step."""
    p = world.engine("p", "producer", tp_size=2)
    d = world.engine("d", "consumer", tp_size=2)
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    world.until(lambda: all(rank.peers()["ready"] for rank in d.ranks))
    world.network.hang_reads("p/1")
    world.network.fail_reads(1)
    d.schedule("d1")
    for _ in range(3):
        d.step()
    assert d.requests["d1"].status == "loading"
    assert d.reasons == {"d1": "read_failed"}
    world.network.resume("p/1")
    world.until(lambda: all_free(d))
    assert d.half.take_stats()["failures"] == {"read_failed": 1}


def test_a_read_that_cannot_be_counted_is_still_a_good_read(world, monkeypatch):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, made = prefilled(p, 40)

    def telemetry(read):
        raise AgentError("agent", "telemetry", "none")

    monkeypatch.setattr(world.network.agents["d/0"], "telemetry", telemetry)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    assert d.pages_equal("d1", made, 39)


@pytest.mark.parametrize("steps_between", [0, 1])
@pytest.mark.parametrize("same", [True, False])
def test_an_id_that_comes_again_right_after_its_abort(world, same, steps_between):
    """vLLM forgets a waiting request at once: its id may be back before the ranks know."""
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, first, made = prefilled(p, 40, "p1", seed=1)
    second = first
    if not same:
        tokens, second, made = prefilled(p, 40, "p2", seed=2)
    d.add("d1", prompt(40, 1), first)
    for _ in range(steps_between):
        d.step()
    d.end("d1")
    d.add("d1", tokens, second)
    loaded(world, d, "d1")
    assert d.reasons == {}
    assert d.pages_equal("d1", made, 39)
    d.end("d1")
    for _ in range(8):
        world.now += LEASE_SECONDS / 4
        for rank in d.ranks:
            rank.renew()
        p.step()
    world.until(lambda: all_free(p) and all_free(d))


def test_the_last_release_leaves_an_engine_that_is_idle_from_then_on(world):
    """NIXL's first message to a rank leaves only with the sender's progress, and a rank that was
    read by another has heard nothing of us before."""
    p = world.engine("p", "producer", tp_size=2)
    d = world.engine("d", "consumer", tp_size=2)
    world.network.hold_notifications()
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    for _ in range(8):
        world.now += 0.25
        for rank in d.ranks:
            rank.renew()
    world.until(lambda: all_free(p), p)
