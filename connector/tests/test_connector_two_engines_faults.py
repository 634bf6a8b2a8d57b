"""Two engines when things go wrong: aborts, lost peers, late reads, leases, several readers."""

import pytest
from connector_engines import HYBRID, LEASE_SECONDS, TO_PREFILL, World
from geometry_reference import make_state
from test_connector_two_engines import all_free, loaded, prefilled, prompt


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


@pytest.fixture
def pair(world):
    return world.engine("p", "producer", tp_size=2), world.engine("d", "consumer", tp_size=2)


def test_abort_before_allocation_releases(world, pair):
    p, d = pair
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    d.end("d1")
    world.until(lambda: all_free(p) and all_free(d))


def test_abort_before_the_first_step_releases(world, pair):
    """The request dies in the step that it arrives in: nobody has shaken hands yet."""
    p, d = pair
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    d.end("d1")
    orders = d.half.build_orders()
    assert [item.request_id for item in orders.interests] == ["d1"]
    assert orders.leaves == ("d1",)


def test_abort_while_the_handshake_is_pending_ends_at_once(world, pair):
    p, d = pair
    tokens, answer, _ = prefilled(p, 40)
    channel = world.responders.pop(("10.0.0.1", p.identity.port))
    d.add("d1", tokens, answer)
    d.schedule("d1")
    d.step()
    assert d.requests["d1"].status == "loading"
    d.end("d1")
    d.step()
    assert all_free(d)
    world.responders["10.0.0.1", p.identity.port] = channel
    world.now += 2.0
    world.until(lambda: all_free(p))


def test_abort_while_reading_keeps_the_blocks_until_the_read_ends(world, pair):
    p, d = pair
    tokens, answer, _ = prefilled(p, 40)
    world.network.hang_reads("p/1")
    d.add("d1", tokens, answer)
    d.schedule("d1")
    world.until(lambda: d.ranks[1].reading, d)
    d.end("d1")
    for _ in range(10):
        d.step()
    assert not all_free(d)
    world.network.resume("p/1")
    world.until(lambda: all_free(p) and all_free(d))


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_failed_read_is_a_failed_load(world, policy):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer", tp_size=2, policy=policy)
    tokens, answer, _ = prefilled(p, 40)
    world.network.fail_reads(1)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    assert d.reasons["d1"] == "read_failed"
    stats = d.half.take_stats()
    assert stats["failures"] == {"read_failed": 1}
    if policy == "recompute":
        assert stats["counts"] == {"recomputed_requests": 1}
        assert d.half.external_tokens("d1", 0) == 0
        d.end("d1")
    assert all_free(d)
    p.step()  # a renewal that has arrived counts from when it is seen
    world.now += LEASE_SECONDS + 1
    world.until(lambda: all_free(p))


def test_a_peer_that_never_answers_fails_the_load_at_its_deadline(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    del world.responders["10.0.0.1", p.identity.port]
    d.add("d1", tokens, answer)
    d.schedule("d1")
    for _ in range(50):
        d.step()
    assert d.requests["d1"].status == "loading"
    world.now += 21.0
    world.until(lambda: all_free(d), d)
    assert d.reasons["d1"] == "peer_unreachable"


def test_a_peer_that_comes_late_is_waited_for(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, made = prefilled(p, 40)
    channel = world.responders.pop(("10.0.0.1", p.identity.port))
    d.add("d1", tokens, answer)
    d.schedule("d1")
    for _ in range(20):
        d.step()
    world.responders["10.0.0.1", p.identity.port] = channel
    world.now += 5.0
    world.until(lambda: d.requests["d1"].status == "running")
    assert d.pages_equal("d1", made, 39)


def test_a_restarted_prefill_engine_is_noticed(world):
    p = world.engine("p", "producer", port=7000)
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    world.engine("p-again", "producer", port=7000)
    d.add("d1", tokens, answer)
    d.schedule("d1")
    world.until(lambda: all_free(d), d)
    assert d.reasons["d1"] == "peer_refused"


def test_who_waits_for_a_replaced_engine_does_not_disturb_its_successor(world):
    old = world.engine("p", "producer", port=7000)
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(old, 40)
    d.add("queued", tokens, answer)
    world.until(lambda: d.ranks[0].peers()["ready"])
    new = world.engine("p-again", "producer", port=7000)
    world.network.kill("p/0")
    world.now += LEASE_SECONDS / 2
    world.until(lambda: not d.ranks[0].peers()["ready"], d)
    for index in range(3):
        tokens, answer, made = prefilled(new, 40, f"p{index}", seed=index)
        d.add(f"d{index}", tokens, answer)
        loaded(world, d, f"d{index}")
        assert d.pages_equal(f"d{index}", made, 39)
        world.now += LEASE_SECONDS / 2
        world.until(lambda: not new.requests)
    assert d.ranks[0].peers()["evicted"] <= 4
    loaded(world, d, "queued")
    assert d.reasons == {"queued": "peer_refused"}


def test_a_link_that_breaks_under_many_reads_is_dropped_once(world):
    """Later failures of the same link do not start the handshake over, again and again."""
    p = world.engine("p", "producer", blocks=64)
    d = world.engine("d", "consumer", blocks=64)
    offers = [prefilled(p, 40, f"p{index}", seed=index)[:2] for index in range(8)]
    d.add("d0", *offers[0])
    world.until(lambda: d.ranks[0].peers()["ready"])
    world.network.hang_reads("p/0")
    for index, offer in enumerate(offers):
        if index:
            d.add(f"d{index}", *offer)
        d.schedule(f"d{index}")
    world.until(lambda: "reading=8" in repr(d.ranks[0]._consumer._transfers), d)
    del world.responders["10.0.0.1", p.identity.port]
    world.network.kill("p/0")
    world.until(lambda: len(d.reasons) == 8, d)
    assert set(d.reasons.values()) == {"read_failed"}
    assert d.ranks[0].peers()["evicted"] == 1


def test_another_model_is_refused(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer", kv_dtype="float32")
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    d.schedule("d1")
    world.until(lambda: all_free(d), d)
    assert d.reasons["d1"] == "peer_refused"


def test_a_queueing_request_keeps_its_lease_for_as_long_as_it_queues(world, pair):
    p, d = pair
    tokens, answer, made = prefilled(p, 40)
    d.add("d1", tokens, answer)
    world.until(lambda: d.ranks[0].peers()["ready"] and d.ranks[1].peers()["ready"])
    for _ in range(12):
        world.now += LEASE_SECONDS / 4
        d.step()  # of other requests: it renews, and begins no load
        p.step()
    assert "p1" in p.requests
    loaded(world, d, "d1")
    assert d.pages_equal("d1", made, 39)


def test_a_long_step_of_the_prefill_engine_expires_nothing_that_was_renewed(world, pair):
    p, d = pair
    tokens, answer, made = prefilled(p, 40)
    d.add("d1", tokens, answer)
    world.until(lambda: d.ranks[0].peers()["ready"] and d.ranks[1].peers()["ready"])
    for _ in range(5):
        world.now += LEASE_SECONDS / 4
        for rank in d.ranks:
            rank.renew()
    p.step()
    assert "p1" in p.requests
    loaded(world, d, "d1")
    assert d.pages_equal("d1", made, 39)


def test_without_a_reader_the_lease_ends(world, pair):
    p, _ = pair
    prefilled(p, 40)
    p.step()
    assert not all_free(p)
    world.now += LEASE_SECONDS + 1
    p.step()
    assert all_free(p)


def test_a_read_that_ends_after_its_lease_is_not_a_success(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    world.until(lambda: d.ranks[0].peers()["ready"])
    world.network.hang_reads("p/0")
    d.schedule("d1")
    world.until(lambda: d.ranks[0].reading, d)
    p.step()
    world.now += LEASE_SECONDS + 1
    p.step()
    assert all_free(p)
    world.network.resume("p/0")
    world.until(lambda: all_free(d))
    assert d.reasons["d1"] == "lease_ended"


def test_a_second_load_after_the_release_fails(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    for request_id in ("d1", "d2"):
        d.add(request_id, tokens, answer)
        loaded(world, d, request_id)
        world.until(lambda: all_free(p))
    assert d.reasons == {"d2": "already_released"}


def test_a_reader_from_another_engine_after_the_release_fails(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    e = world.engine("e", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    world.until(lambda: all_free(p))
    e.add("e1", tokens, answer)
    loaded(world, e, "e1")
    assert e.reasons == {"e1": "lease_ended"}


def test_two_samples_share_one_prefill(world, pair):
    """n = 2: the second child may arrive when the first one has been read."""
    p, d = pair
    tokens, answer, made = prefilled(p, 40)
    for request_id in ("0_d1", "1_d1"):
        d.add(request_id, tokens, answer)
        loaded(world, d, request_id)
        assert d.pages_equal(request_id, made, 39)
    assert "p1" in p.requests
    world.now += 3.0
    world.until(lambda: all_free(p))


def test_a_prefill_with_two_samples_pins_one(world, pair):
    p, d = pair
    tokens, first, made = prefilled(p, 40, "0_p1")
    _, second, _ = prefilled(p, 40, "1_p1")
    assert second == first
    assert list(p.requests) == ["0_p1"]
    d.add("d1", tokens, second)
    loaded(world, d, "d1")
    assert d.pages_equal("d1", made, 39)
    world.until(lambda: all_free(p))
    prefilled(p, 40, "2_p1")
    assert list(p.requests) == ["2_p1"]


def test_preemption_after_the_load_computes_here(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    d.give_back(d.requests["d1"])
    d.schedule("d1")
    assert d.requests["d1"].computed == 0
    d.end("d1")
    world.until(lambda: all_free(d) and all_free(p))


def test_an_aborted_prefill_pins_nothing(world, pair):
    p, _ = pair
    p.add("p1", prompt(40), dict(TO_PREFILL))
    p.schedule("p1")
    p.end("p1")
    assert all_free(p)


def test_a_prefill_that_computed_too_much_is_not_handed_over(world):
    p = world.engine("p", "producer", model=HYBRID)
    p.add("p1", prompt(40), dict(TO_PREFILL))
    p.schedule("p1")
    p.requests["p1"].computed = 40
    p.fill(p.requests["p1"], make_state(p.layout, 39, seed=3))
    p.end("p1", completed=True)
    assert all_free(p)


def test_what_is_counted(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    assert p.half.take_stats()["gauges"] == {"leases_held": 1}
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    world.until(lambda: all_free(p))
    counts = d.ranks[0].take_stats()["counts"]
    assert counts["read_bytes"] == counts["predicted_bytes"] > 0
    assert counts["read_descriptors"] == counts["predicted_descriptors"] > 0
    assert d.half.take_stats()["counts"] == {"loads": 1}
    leases = p.half.take_stats()
    assert leases["counts"] == {"leases_released": 1}
    assert leases["gauges"] == {"leases_held": 0}
