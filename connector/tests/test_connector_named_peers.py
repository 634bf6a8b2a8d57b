"""Names of prefill engines: what is accepted, and when whom is looked up and asked, on a clock that
the tests own."""

import dataclasses
from unittest import mock

import pytest
from connector_paces import PACE as SLOW_PACE
from connector_paces import A, B
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector.named_peers import (
    MAX_ADDRESSES,
    MAX_NAMES,
    MAX_PORTS,
    Errands,
    PeerName,
    Rounds,
    parse_names,
)
from hybridpd_connector.peers import Address
from hybridpd_connector.vllm_compat import UnsupportedEngineError

PACE = dataclasses.replace(SLOW_PACE, max_asked=3)
NOTHING = Errands((), ())


@pytest.mark.parametrize(
    ("text", "host", "ports"),
    [
        ("p:5600", "p", [5600]),
        ("tiny-prefill-0a1b2c3d.default.svc:5600", "tiny-prefill-0a1b2c3d.default.svc", [5600]),
        ("p.svc.cluster.local.:1", "p.svc.cluster.local.", [1]),
        ("10.0.0.1:65535", "10.0.0.1", [65535]),
        ("[fd00::1]:5600-5602", "fd00::1", [5600, 5601, 5602]),
        ("p:5600-5600", "p", [5600]),
    ],
)
def test_names_that_are_accepted(text, host, ports):
    (name,) = parse_names([text])
    assert (name.host, list(name.ports)) == (host, ports)


@pytest.mark.parametrize(
    "value",
    [
        None, "p:5600", {"p": 5600}, 5600, [None], [5600], [["p", 5600]], [""], ["p"], ["p:"],
        [":5600"], ["p:0"], ["p:65536"], ["p:5601-5600"], ["p:5600-"], ["p:5600-5600-5601"],
        [f"p:1-{MAX_PORTS + 1}"], ["p:65535-65536"], ["p :5600"], ["p:5600\n"], ["fd00::1:5600"],
        ["http://p:5600"], ["p/x:5600"], ["-p:5600"], ["p:٥٦٠٠"], ["p" * 254 + ":1"], ["[]:5600"],
        ["p:5600", "p"], ["p:1"] * (MAX_NAMES + 1),
    ],
    ids=lambda value: str(value)[:24],
)  # fmt: skip
def test_other_names_are_refused_at_start(value):
    with pytest.raises(UnsupportedEngineError, match="prefill_peers"):
        parse_names(value)


def rounds(*texts):
    return Rounds(parse_names(texts or ["p:5600"]), PACE)


def known(rounds, *addresses, now=0.0, host="p"):
    """A host that was looked up and whose addresses have answered, each with its own engine."""
    assert rounds.due(now).hosts == (host,)
    rounds.looked_up(host, [a.host for a in addresses], now)
    rounds.due(now)
    for address in addresses:
        rounds.answered(address, f"engine at {address.host}", now)
    assert set(rounds.known()) == set(addresses)
    return rounds


def test_a_name_is_looked_up_at_once_and_its_addresses_are_asked_at_once():
    it = rounds("p:5600-5601")
    assert it.due(0.0) == Errands(("p",), ())
    assert it.due(0.0) == NOTHING, "it is on its way"
    it.looked_up("p", ["10.0.0.2", "10.0.0.1"], 0.0)
    assert it.due(0.0).addresses == (A, Address("10.0.0.1", 5601), B), "three at a time"
    assert it.due(100.0).addresses == ()
    it.answered(A, "a", 0.2)
    assert it.known() == {A: "a"}
    assert it.due(0.2).addresses == (Address("10.0.0.2", 5601),)


def test_lookups_slow_down_while_nothing_is_new_and_hurry_again_with_news():
    it, now, pauses = rounds(), 0.0, []
    for number in range(7):
        assert it.due(now).hosts == ("p",)
        if number == 5:
            it.looked_up("p", [A.host], now)
        elif number % 2:
            it.not_looked_up("p", now)
        else:
            it.looked_up("p", [A.host] if number > 5 else [], now)
        due_at = it._hosts["p"].due_at
        assert it.due(due_at - 0.01).hosts == ()
        pauses.append(due_at - now)
        now = due_at
    assert pauses == [5, 10, 20, 30, 30, 5, 5]


def test_a_silent_address_is_asked_again_and_again_but_rarely():
    it, now, pauses = rounds(), 0.0, []
    it.due(now)
    it.looked_up("p", [A.host], now)
    for _ in range(6):
        assert it.due(now).addresses == (A,)
        assert A not in it.due(now + 100).addresses, "one question at a time"
        it.silent(A, now)
        due_at = it._doors[A].due_at
        assert it.due(due_at - 0.01).addresses == ()
        pauses.append(due_at - now)
        now = due_at
    assert pauses == [1, 2, 4, 8, 8, 8]
    assert it.due(now).addresses == (A,)
    it.answered(A, "a", now)
    assert it.known() == {A: "a"}
    assert it.due(now + 9.9).addresses == ()
    assert it.due(now + 10).addresses == (A,)


def test_an_address_that_said_no_is_asked_again_much_later():
    it = rounds()
    it.due(0.0)
    it.looked_up("p", [A.host], 0.0)
    it.due(0.0)
    it.silent(A, 1.0, refused=True)
    assert it.due(30.9).addresses == ()
    assert it.due(31.0).addresses == (A,)


def test_a_known_engine_survives_one_lost_question():
    it = known(rounds(), A)
    assert it.due(10.0).addresses == (A,)
    it.silent(A, 15.0)
    assert it.known() == {A: "engine at 10.0.0.1"}
    assert not it.answers(A)
    assert it.due(16.0).addresses == (A,)
    it.answered(A, "engine at 10.0.0.1", 16.0)
    assert it.answers(A)
    assert it.take_left() == []


def test_another_engine_at_the_address_replaces_the_first():
    it = known(rounds(), A)
    it.due(10.0)
    it.answered(A, "new", 10.0)
    assert it.known() == {A: "new"}
    assert it.take_left() == ["engine at 10.0.0.1"]
    assert it.take_left() == []


def test_an_engine_whose_link_was_dropped_is_asked_for_soon():
    it = known(rounds(), A)
    it.dropped(A, 3.0)
    assert it.known() == {}
    assert it.take_left() == [], "its address is still there"
    assert it.due(3.9).addresses == ()
    assert it.due(4.0).addresses == (A,)
    it.dropped(A, 4.0)
    it.dropped(B, 4.0)
    it.answered(A, "a", 4.0)
    assert it.known() == {A: "a"}


def test_an_address_that_leaves_the_name_takes_its_engine_along():
    it = known(rounds(), A, B)
    it.due(5.0)
    it.looked_up("p", [B.host], 5.0)
    assert it.known() == {B: "engine at 10.0.0.2"}
    assert it.take_left() == ["engine at 10.0.0.1"]
    for late in (lambda: it.answered(A, "a", 6.0), lambda: it.silent(A, 6.0)):
        late()
        assert set(it.known()) == {B}, "what is told of a forgotten address changes nothing"
    it.due(10.0)
    it.looked_up("p", [], 10.0)
    assert it.take_left() == ["engine at 10.0.0.2"]


def test_a_lookup_that_fails_takes_nothing_away():
    it = known(rounds(), A)
    it.due(5.0)
    it.not_looked_up("p", 5.0)
    assert set(it.known()) == {A}
    assert it.take_left() == []


def test_an_engine_under_two_addresses_or_names_leaves_with_the_last():
    it = rounds("p:5600", "q:5600")
    assert set(it.due(0.0).hosts) == {"p", "q"}
    it.looked_up("p", [A.host, B.host], 0.0)
    it.looked_up("q", [A.host], 0.0)
    it.due(0.0)
    it.answered(A, "e", 0.0)
    it.answered(B, "e", 0.0)
    it.due(5.0)
    it.looked_up("p", [], 5.0)
    assert it.known() == {A: "e"}, "the other name still has it"
    assert it.take_left() == []
    it.looked_up("q", [], 5.0)
    assert it.take_left() == ["e"]
    assert it.addresses() == {}


def test_nobody_that_counts_is_asked_again_as_rarely_as_a_known_one():
    it = rounds()
    it.due(0.0)
    it.looked_up("p", [A.host], 0.0)
    it.due(0.0)
    it.answered(A, "", 0.0)
    assert it.known() == {}
    assert it.due(9.9).addresses == ()
    assert it.due(10.0).addresses == (A,)


def test_addresses_are_bounded_over_all_names():
    it = rounds("p:5600", "q:5600-5601")
    it.due(0.0)
    many = [f"10.{i // 256}.{i % 256}.1" for i in range(MAX_ADDRESSES - 1)]
    it.looked_up("p", many, 0.0)
    assert (len(it.addresses()), it.left_out) == (MAX_ADDRESSES - 1, 0)
    it.looked_up("q", ["10.9.9.9"], 0.0)
    assert (len(it.addresses()), it.left_out) == (MAX_ADDRESSES, 1)
    it.due(100.0)
    it.looked_up("p", many * 2, 100.0)
    assert (len(it.addresses()), it.left_out) == (MAX_ADDRESSES, 0)
    it.looked_up("p", [f"10.77.{i}.1" for i in range(250)] + many, 200.0)
    assert len(it.addresses()) == MAX_ADDRESSES


LOOKUPS = st.lists(
    st.tuples(st.sampled_from("pqr"), st.sets(st.integers(0, 11))), min_size=1, max_size=12
)


@given(LOOKUPS)
def test_addresses_stay_bounded_when_names_share_them(lookups):
    """Whatever the names lead to: never too many in all, and none is exchanged for a newcomer."""
    most = 7
    it = rounds("p:5600", "q:5600", "r:5600")
    now, found = 0.0, {name: set() for name in "pqr"}
    with mock.patch("hybridpd_connector.named_peers.MAX_ADDRESSES", most):
        for name, numbers in lookups:
            now += 100.0
            it.due(now)
            before = {address.host for address in it.addresses()}
            found[name] = {f"10.0.0.{number}" for number in numbers}
            it.looked_up(name, found[name], now)
            held = {address.host for address in it.addresses()}
            assert len(held) <= most
            assert held <= set().union(*found.values())
            assert before & found[name] <= held
            assert it.left_out == len(found[name] - held)


def test_silent_addresses_do_not_keep_the_others_waiting():
    """Three at a time; whoever has waited longest is first."""
    it, now = rounds(), 0.0
    hosts = [f"10.0.1.{i}" for i in range(9)]
    it.due(now)
    it.looked_up("p", hosts, now)
    asked = []
    for _ in range(3):
        batch = it.due(now).addresses
        asked += [address.host for address in batch]
        now += 5.0
        for address in batch:
            it.silent(address, now)
    assert asked == hosts


HOSTS = [f"10.0.0.{i}" for i in range(4)]
EVENTS = st.one_of(
    st.tuples(st.just("wait"), st.integers(0, 12)),
    st.tuples(st.just("found"), st.sets(st.sampled_from(HOSTS))),
    st.tuples(st.just("no lookup"), st.none()),
    st.tuples(st.just("answer"), st.integers(0, 3)),
    st.tuples(st.just("silence"), st.none()),
    st.tuples(st.just("dropped"), st.sampled_from(HOSTS)),
)


@given(st.lists(EVENTS, max_size=60))
def test_laws_of_any_order(events):
    it = Rounds((PeerName("p", range(1, 3)),), PACE)
    now, looking, asked, ever, left = 0.0, [], [], set(), []
    for kind, value in events:
        if kind == "wait":
            now += value
        elif kind == "found" and looking:
            it.looked_up(looking.pop(), value, now)
        elif kind == "no lookup" and looking:
            it.not_looked_up(looking.pop(), now)
        elif kind == "answer" and asked:
            address = asked.pop(0)
            if address in it.addresses():
                ever.add(f"e{value}")
            it.answered(address, f"e{value}", now)
        elif kind == "silence" and asked:
            it.silent(asked.pop(0), now)
        elif kind == "dropped":
            it.dropped(Address(value, 1), now)
        errands = it.due(now)
        assert len(errands.hosts) + len(looking) <= 1, "one lookup of a host at a time"
        assert sum(it.addresses().values()) <= PACE.max_asked
        looking += errands.hosts
        asked += errands.addresses
        left += it.take_left()
        assert set(it.known()) <= set(it.addresses())
        assert set(left) <= ever
        assert repr(it)
    # Whatever has happened: once all is told, everybody is asked again within the longest pauses.
    for host in looking:
        it.looked_up(host, HOSTS, now)
    for address in asked:
        it.silent(address, now)
    due = it.due(now + 30).addresses
    assert len(due) == min(PACE.max_asked, len(it.addresses()))
