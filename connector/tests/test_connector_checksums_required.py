"""Mode "all" of a decode engine: no load is used that was not compared. The cells of a check are in
``test_connector_every_check``."""

import pytest
from connector_engines import World
from test_connector_checksums import load, results, until_read
from test_connector_two_engines import all_free, loaded, prefilled

from hybridpd_connector import peer_link
from hybridpd_connector.verifier import CHECK_SECONDS, PROOF_SECONDS
from hybridpd_geometry import GeometryError


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def pair_of(world, p_every=1, **settings):
    p = world.engine("p", "producer", checksum_every=p_every, **settings.pop("p", {}))
    d = world.engine("d", "consumer", checksum_every=1, checksum_required=True, **settings)
    return p, d


def told(caplog):
    (line,) = [r.getMessage() for r in caplog.records if "was not loaded" in r.getMessage()]
    return line


@pytest.mark.parametrize(("p_every", "mode"), [(0, "off"), (128, "sample"), (2, "1 of 2")])
def test_an_engine_that_does_not_state_all_is_refused(world, caplog, p_every, mode):
    p, d = pair_of(world, p_every)
    load(world, p, d, 1)
    assert d.reasons == {"d1": "peer_refused"}
    assert d.ranks[0].peers()["refused"] == 1
    assert f"expected all on the prefill engine, as here, got {mode}" in told(caplog)
    assert "set checksum to all on the prefill engine" in told(caplog)
    assert results(d) == {}
    assert all_free(d)


def test_one_rank_that_states_less_is_enough_to_refuse(world):
    p, d = pair_of(world, p={"tp_size": 2})
    hello = world.responders["10.0.0.1", p.identity.port]
    p.ranks[1]._producer.sums = None
    p._publish("producer", p.identity.port)
    assert world.responders["10.0.0.1", p.identity.port] is not hello
    load(world, p, d, 1)
    assert d.reasons == {"d1": "peer_refused"}


def test_tp_sizes_whose_sums_cannot_be_compared_are_refused(world, caplog, monkeypatch):
    def cut_elsewhere(plan):
        raise GeometryError("tp_size", "one that cuts on the borders of pieces", 5)

    monkeypatch.setattr(peer_link, "SumPair", cut_elsewhere)
    p, d = pair_of(world)
    load(world, p, d, 1)
    assert d.reasons == {"d1": "peer_refused"}
    assert "borders of pieces" in told(caplog)


def read_before_its_sums(world):
    """(P, D, what P has made): D has read a prompt of 40 tokens, P states no sums of it yet."""
    p, d = pair_of(world)
    p.summers[0].held = True
    tokens, answer, made = prefilled(p, 40)
    p.step()
    d.add("d1", tokens, answer)
    d.schedule("d1")
    until_read(world, d)
    return p, d, made


def test_sums_are_waited_for_longer_and_then_the_load_fails(world):
    _, d, _ = read_before_its_sums(world)
    world.now += CHECK_SECONDS + 1.0
    for _ in range(5):
        d.step()
    assert d.requests["d1"].status == "loading"
    world.now += PROOF_SECONDS
    world.until(lambda: all_free(d), d)
    assert d.reasons == {"d1": "checksum_missing"}
    assert results(d) == {"unchecked": 1}


def test_late_sums_are_compared(world):
    p, d, made = read_before_its_sums(world)
    world.now += PROOF_SECONDS - 1.0
    d.step()
    p.summers[0].let_go()
    world.until(lambda: d.requests["d1"].status == "running")
    assert d.pages_equal("d1", made, 39)
    assert results(d) == {"ok": 1}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_rank_that_cannot_sum_its_own_pages_uses_none(world, policy):
    p, d = pair_of(world, policy=policy, tp_size=2)
    d.summers[1].broken = True
    tokens, answer, _ = prefilled(p, 40)
    p.step()
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    assert d.reasons == {"d1": "checksum_missing"}
    assert d.half.take_stats()["failures"] == {"checksum_missing": 1}
    assert results(d) == {"ok": 1, "unchecked": 1}
    if policy == "recompute":
        assert d.requests["d1"].computed == 0
        d.end("d1")
    world.until(lambda: all_free(d) and all_free(p))
