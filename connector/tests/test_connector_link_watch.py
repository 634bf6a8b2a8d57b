"""Links are woken up and measured at the handshake, never in an engine step, and leave nothing."""

import logging
import threading

import msgspec
import pytest
from connector_engines import World
from test_connector_two_engines import all_free, loaded, prefilled

from hybridpd_connector import link_watch, stats
from hybridpd_connector.errors import AgentError, WireError
from hybridpd_connector.handshake import (
    HEADER_BYTES,
    Hello,
    HostFacts,
    RankHello,
    decode_answer,
    encode_hello,
)
from hybridpd_connector.link_path import OTHER_NAMESPACE, Diagnosis, LinkPath

PROBE = {"host": HostFacts("boot", 7)}
SLOW = Diagnosis(LinkPath.TCP, slow=True, cause=OTHER_NAMESPACE)
UNSURE = Diagnosis(LinkPath.UNKNOWN, unsure=True)
GOOD = Diagnosis(LinkPath.CUDA_IPC)


@pytest.fixture
def world():
    world = World()
    yield world
    for engine in world.engines:
        for rank in engine.ranks:
            rank.close()


@pytest.fixture
def slow(monkeypatch):
    """Every link is found to be slow."""
    monkeypatch.setattr(link_watch, "diagnose", lambda *_: SLOW)


def load(world, p, d, number=1):
    tokens, answer, made = prefilled(p, 40, f"p{number}", seed=number)
    d.add(f"d{number}", tokens, answer)
    loaded(world, d, f"d{number}")
    return made


def watch(d, rank=0):
    return d.ranks[rank]._links


def links(d, rank=0):
    return (d.ranks[rank].take_stats() or stats.empty())["links"]


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 1), (1, 2)])
def test_a_handshake_wakes_its_link_up_and_says_how_fast_it_is(world, p_tp, d_tp):
    p = world.engine("p", "producer", tp_size=p_tp, links=PROBE)
    d = world.engine("d", "consumer", tp_size=d_tp, links=PROBE)
    made = load(world, p, d)
    assert d.pages_equal("d1", made, 39)
    for rank in range(d_tp):
        ((label, (path, rate)),) = links(d, rank).items()
        assert label == f"10.0.0.1:{p.identity.port}"
        assert path in ("shm", "unknown")
        assert rate > 0
        assert links(d, rank) == {}
    assert {len(agent._reads) for agent in world.network.agents.values()} == {0}


def test_the_probe_reads_every_region_and_the_board(world):
    p = world.engine("p", "producer", links=PROBE)
    d = world.engine("d", "consumer", links=PROBE)
    agent, read = world.network.agents["d/0"], []
    post = agent.post_read

    def noted(local, local_ids, remote, remote_ids, notify=b""):
        read.extend(remote.pieces(list(remote_ids))[0].tolist())
        return post(local, local_ids, remote, remote_ids, notify)

    agent.post_read = noted
    load(world, p, d)
    wanted = {*p.memories[0].placement.region_bases, p.ranks[0].hello().board_address}
    assert wanted <= set(read)


def test_a_probe_that_fails_fails_the_handshake_and_the_next_one_is_good(world):
    p = world.engine("p", "producer", links=PROBE)
    d = world.engine("d", "consumer", links=PROBE)
    world.network.fail_reads(1)
    tokens, answer, made = prefilled(p, 40)
    d.add("d1", tokens, answer)
    d.schedule("d1")
    world.until(lambda: d.ranks[0].peers().get("backing_off"))
    assert world.network.agents["d/0"].peers == frozenset()
    world.now += 2
    world.until(lambda: d.requests["d1"].status == "running")
    assert d.pages_equal("d1", made, 39)


def test_a_probe_that_hangs_keeps_what_it_uses_and_no_more(world, monkeypatch):
    p = world.engine("p", "producer", links=PROBE)
    d = world.engine("d", "consumer", links=PROBE)
    agent = world.network.agents["d/0"]
    lists = agent.open_lists
    monkeypatch.setattr(watch(d), "_rules", link_watch.LinkRules(timeout_seconds=0.05))
    world.network.hang_reads("p/0")
    tokens, answer, made = prefilled(p, 40)
    d.add("d1", tokens, answer)
    d.schedule("d1")
    world.until(lambda: d.ranks[0].peers().get("backing_off"))
    assert watch(d)._prober.strays == 1
    assert (agent.open_reads, agent.peers) == (1, {"p/0"})
    world.network.resume("p/0")
    world.now += 2
    world.until(lambda: d.requests["d1"].status == "running")
    assert d.pages_equal("d1", made, 39)
    d.end("d1")
    world.until(lambda: all_free(p) and all_free(d))
    d.ranks[0]._consumer._peers.lost("p", "test")
    assert (agent.open_reads, agent.peers, agent.open_lists) == (0, frozenset(), lists)


def test_a_late_end_of_a_probe_does_not_disturb_other_links(world, monkeypatch, caplog):
    p = world.engine("p", "producer", links=PROBE)
    d = world.engine("d", "consumer", links=PROBE)
    prober, agent = watch(d)._prober, world.network.agents["d/0"]
    monkeypatch.setattr(watch(d), "_rules", link_watch.LinkRules(timeout_seconds=0.05))
    world.network.hang_reads("p/0")
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    d.schedule("d1")
    world.until(lambda: d.ranks[0].peers().get("backing_off"))

    def stuck(name):
        raise AgentError(f"peer {name}", "to be removed", "not now")

    monkeypatch.setattr(agent, "remove_peer", stuck)
    world.network.resume("p/0")
    prober.collect()
    assert prober.strays == 0
    assert "was not given back cleanly: peer p/0" in caplog.text


def test_closing_does_not_wait_for_a_probe_that_hangs(world):
    p = world.engine("p", "producer", links=PROBE)
    d = world.engine("d", "consumer", links=PROBE)
    world.network.hang_reads("p/0")
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    agent = world.network.agents["d/0"]
    world.until(lambda: agent.open_reads == 1)
    closed = threading.Thread(target=d.ranks[0].close)
    closed.start()
    closed.join(15)
    assert not closed.is_alive()


def test_links_are_measured_again_rarely_and_off_the_engine(world, monkeypatch):
    p = world.engine("p", "producer", links=PROBE)
    d = world.engine("d", "consumer", links=PROBE)
    load(world, p, d)
    (met,) = watch(d)._met.values()
    threads = []
    measure = watch(d)._prober.measure

    def noted(*arguments):
        threads.append(threading.current_thread())
        return measure(*arguments)

    monkeypatch.setattr(watch(d)._prober, "measure", noted)
    world.now += 599
    d.step()
    assert threads == []
    world.now += 1
    d.ranks[0]._consumer._peers.touch("p", world.now)
    world.until(lambda: met.measured_at == world.now)
    (thread,) = threads
    assert thread is not threading.main_thread()
    d.step()
    assert len(threads) == 1


def test_a_link_that_is_gone_is_told_once(world):
    p = world.engine("p", "producer", links=PROBE)
    d = world.engine("d", "consumer", links=PROBE)
    load(world, p, d)
    (label,) = links(d)
    d.ranks[0]._consumer._peers.lost("p", "test")
    assert links(d) == {label: ["", 0.0]}
    assert links(d) == {}


def test_a_slow_link_is_a_warning_once(world, slow, caplog):
    p = world.engine("p", "producer", links=PROBE)
    d = world.engine("d", "consumer", links=PROBE)
    caplog.set_level(logging.INFO, "hybridpd_connector.link_watch")
    for number in (1, 2):
        load(world, p, d, number)
        d.ranks[0]._consumer._peers.lost("p", "test")
    told = [record for record in caplog.records if record.name.endswith("link_watch")]
    assert [record.levelname for record in told] == ["WARNING", "INFO"]
    assert "hostPID" in told[0].getMessage()


def test_a_slow_link_is_refused_where_a_fast_one_is_required(world, slow):
    p = world.engine("p", "producer", links=PROBE)
    d = world.engine("d", "consumer", links={**PROBE, "require_fast_link": True})
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    assert d.reasons["d1"] == "peer_refused"
    assert d.ranks[0].peers()["refused"] == 1
    assert world.network.agents["d/0"].peers == frozenset()


def test_a_link_that_could_not_be_measured_is_used_and_soon_measured_again(
    world, monkeypatch, caplog
):
    p = world.engine("p", "producer", links=PROBE)
    d = world.engine("d", "consumer", links=PROBE)
    caplog.set_level(logging.INFO, "hybridpd_connector.link_watch")
    monkeypatch.setattr(link_watch, "diagnose", lambda *_: UNSURE)
    made = load(world, p, d)
    assert d.pages_equal("d1", made, 39)
    ((label, (path, _)),) = links(d).items()
    assert path == "unknown"
    told = [record for record in caplog.records if record.name.endswith("link_watch")]
    assert [record.levelname for record in told] == ["INFO"]
    assert "unknown, at least" in told[0].getMessage()
    assert "too busy" in told[0].getMessage()
    monkeypatch.setattr(link_watch, "diagnose", lambda *_: GOOD)
    (met,) = watch(d)._met.values()
    world.now += 29
    d.step()
    assert met.diagnosis is UNSURE
    world.now += 1
    world.until(lambda: met.diagnosis is GOOD)
    assert links(d)[label][0] == "cuda_ipc"
    measured_at = met.measured_at
    world.now += 60
    d.step()
    assert met.measured_at == measured_at


def test_where_a_fast_link_is_required_one_that_could_not_be_measured_is_tried_again(
    world, monkeypatch
):
    p = world.engine("p", "producer", links=PROBE)
    d = world.engine("d", "consumer", links={**PROBE, "require_fast_link": True})
    monkeypatch.setattr(link_watch, "diagnose", lambda *_: UNSURE)
    tokens, answer, made = prefilled(p, 40)
    d.add("d1", tokens, answer)
    d.schedule("d1")
    for pause in (1, 2, 4):
        world.until(lambda: d.ranks[0].peers().get("backing_off"))
        assert d.requests["d1"].status == "loading"
        assert world.network.agents["d/0"].peers == frozenset()
        world.now += pause
    monkeypatch.setattr(link_watch, "diagnose", lambda *_: GOOD)
    world.now += 8
    world.until(lambda: d.requests["d1"].status == "running")
    assert d.pages_equal("d1", made, 39)


@pytest.mark.parametrize(
    ("found", "worst"),
    [((GOOD, UNSURE), UNSURE), ((UNSURE, SLOW), SLOW), ((SLOW, GOOD), SLOW), ((GOOD, GOOD), GOOD)],
)
def test_of_several_ranks_the_worst_one_stands_for_the_link(world, monkeypatch, found, worst):
    p = world.engine("p", "producer", tp_size=2, links=PROBE)
    d = world.engine("d", "consumer", links=PROBE)
    for number, pair in enumerate((found, found[::-1])):
        left = iter(pair)
        monkeypatch.setattr(link_watch, "diagnose", lambda *_, left=left: next(left))
        load(world, p, d, number)
        (met,) = watch(d)._met.values()
        assert met.diagnosis is worst
        d.ranks[0]._consumer._peers.lost("p", "test")


def test_many_links_are_shown_as_few(world, monkeypatch):
    monkeypatch.setattr(link_watch, "MAX_NAMED", 2)
    d = world.engine("d", "consumer", links=PROBE)
    for number in range(4):
        p = world.engine(f"p{number}", "producer", links=PROBE)
        load(world, p, d, number)
    shown = links(d)
    assert len(shown) == 3
    assert link_watch.OTHERS in shown


def hello_with(host):
    rank = RankHello(0, {}, b"secret", 1, 1, host)
    return Hello("e", "0", "0", "producer", 1, 30, {}, (rank,))


def test_the_facts_of_a_host_travel_and_are_bounded():
    facts = HostFacts("boot", 4026531836, "cuda_ipc,tcp", True)
    assert decode_answer(encode_hello(hello_with(facts))).ranks[0].host == facts
    raw = encode_hello(hello_with(HostFacts("x" * 128)))
    with pytest.raises(WireError):
        decode_answer(raw.replace(b"\xd9\x80" + b"x" * 128, b"\xd9\x81" + b"x" * 129))
    with pytest.raises(WireError):
        encode_hello(hello_with(HostFacts(pid_namespace=-1)))


def test_an_engine_that_says_nothing_of_its_host_is_understood():
    raw = encode_hello(hello_with(HostFacts("boot", 7)))
    body = msgspec.msgpack.decode(raw[HEADER_BYTES:])
    assert body["hello"]["ranks"][0].pop("host")["boot_id"] == "boot"
    hello = decode_answer(raw[:HEADER_BYTES] + msgspec.msgpack.encode(body))
    assert hello.ranks[0].host == HostFacts()
