"""Peers: the table state x event, pauses, eviction, bounds; then the manager with real threads.

Left out: what a handshake does (``test_connector_handshake``).
"""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector.errors import RefusedError, SideChannelError, StateError, VersionError
from hybridpd_connector.peer_state import TRANSITIONS, PeerEvent, PeerState
from hybridpd_connector.peers import (
    MAX_ADDRESSES,
    MAX_TRIED,
    Address,
    PeerBook,
    PeerLimits,
    PeerManager,
    _Peer,
)

HERE = Address("10.0.0.1", 5600)
THERE = Address("10.0.0.2", 5600)
LIMITS = PeerLimits(
    max_peers=3,
    first_pause_seconds=1.0,
    longest_pause_seconds=5.0,
    refused_pause_seconds=30.0,
    idle_seconds=100.0,
)


@pytest.fixture
def book():
    return PeerBook(LIMITS)


def start(book, engine_id="e", address=HERE, now=0.0):
    verdict = book.want(engine_id, address, now)
    assert verdict.state is PeerState.HANDSHAKING
    assert verdict.attempt is not None
    return verdict.attempt


@pytest.mark.parametrize("state", PeerState)
@pytest.mark.parametrize("event", PeerEvent)
def test_the_table_is_the_only_way_to_move(state, event):
    peer = _Peer("e", HERE, state)
    following = TRANSITIONS[state].get(event)
    if following is None:
        with pytest.raises(StateError):
            peer.move(event)
        assert peer.state is state
    else:
        peer.move(event)
        assert peer.state is following


def test_a_wanted_peer_is_asked_once(book):
    attempt = start(book)
    assert book.want("e", HERE, 0.1).attempt is None
    assert book.succeeded("e", attempt, "value")
    verdict = book.want("e", HERE, 0.2)
    assert (verdict.state, verdict.value, verdict.attempt) == (PeerState.READY, "value", None)
    assert book.ready() == {"e": "value"}


def test_pauses_double_up_to_a_limit_and_end_with_success(book):
    now, pauses = 0.0, []
    for _ in range(5):
        book.failed("e", start(book, now=now), "no route", now)
        verdict = book.want("e", HERE, now)
        assert (verdict.state, verdict.reason) == (PeerState.BACKING_OFF, "no route")
        assert book.want("e", HERE, verdict.retry_at - 0.01).attempt is None
        pauses.append(verdict.retry_at - now)
        now = verdict.retry_at
    assert pauses == [1, 2, 4, 5, 5]
    assert book.succeeded("e", start(book, now=now), "value")


def test_a_refused_peer_is_asked_again_much_later(book):
    book.refused("e", start(book), "other layout", 0.0)
    verdict = book.want("e", HERE, 29.0)
    assert (verdict.state, verdict.reason, verdict.attempt) == (
        PeerState.REFUSED,
        "other layout",
        None,
    )
    assert book.want("e", HERE, 30.0).state is PeerState.HANDSHAKING


def test_another_engine_at_the_address_replaces_the_first(book):
    book.succeeded("old", start(book, "old"), "old value")
    attempt = start(book, "new")
    assert book.ready() == {"old": "old value"}, "a name in a request replaces nobody"
    book.succeeded("new", attempt, "new value")
    assert book.ready() == {"new": "new value"}
    assert book.take_discarded() == ["old value"]
    assert book.take_discarded() == []
    assert book.counts()["evicted"] == 1


def test_an_engine_that_does_not_live_there_replaces_nobody(book):
    book.succeeded("e", start(book), "value")
    book.refused("made up", start(book, "made up"), "engine e lives here", 0.0)
    assert book.ready() == {"e": "value"}


def test_an_engine_under_two_addresses_is_asked_once(book):
    """Routers and meshes may rewrite the host; a client may name any."""
    attempt = start(book)
    for _ in range(3):
        verdict = book.want("e", THERE, 0.1)
        assert (verdict.state, verdict.attempt) == (PeerState.HANDSHAKING, None)
    assert book.succeeded("e", attempt, "value")
    assert book.want("e", THERE, 0.2).value == "value"
    assert book.want("e", HERE, 0.2).value == "value"
    assert book.take_discarded() == []


@pytest.mark.parametrize("end", ["failed", "refused"])
def test_another_address_is_tried_at_once_when_the_first_was_wrong(book, end):
    getattr(book, end)("e", start(book), "nobody there", 0.0)
    attempt = start(book, "e", THERE, 0.1)
    getattr(book, end)("e", attempt, "nobody there either", 0.1)
    for address in (HERE, THERE):
        assert book.want("e", address, 0.2).attempt is None, "both were tried: pause"
    assert book.succeeded("e", start(book, "e", THERE, 60.0), "value")
    assert book.take_discarded() == []


def test_made_up_addresses_are_not_tried_without_end(book):
    attempts = 0
    for number in range(MAX_ADDRESSES + 5):
        verdict = book.want("e", Address(f"10.9.0.{number}", 1), 0.0)
        if verdict.attempt is not None:
            attempts += 1
            book.failed("e", verdict.attempt, "nobody there", 0.0)
    assert attempts == MAX_ADDRESSES


def test_the_right_address_is_tried_though_made_up_ones_are_asked_for_first(book):
    """Loads of made-up addresses are older and ask first in every step; each attempt takes 2 s."""
    made_up = [Address(f"10.9.0.{number}", 1) for number in range(MAX_ADDRESSES)]
    tried, busy, now = [], None, 0.0
    while HERE not in tried:
        assert now < 20.0
        for address in (*made_up, HERE):
            attempt = book.want("e", address, now).attempt
            if attempt is not None:
                tried.append(address)
                busy = attempt
        now += 2.0
        book.failed("e", busy, "nobody there", now)
    assert len(tried) == len(set(tried)) == MAX_ADDRESSES + 1


def test_addresses_that_were_tried_are_remembered_up_to_a_bound(book):
    for number in range(3 * MAX_TRIED):
        attempt = book.want("e", Address(f"10.9.0.{number}", 1), 2.0 * number).attempt
        book.failed("e", attempt, "nobody there", 2.0 * number)
    assert len(book._peers["e"].tried) <= MAX_TRIED


def test_another_engine_at_another_address_does_not_refuse_for_this_one(book):
    book.refused("e", start(book), "another engine lives here", 0.0)
    assert book.want("e", HERE, 0.1).state is PeerState.REFUSED
    book.failed("e", start(book, "e", THERE, 0.1), "nobody there", 0.1)
    book.refused("e", start(book, "e", HERE, 60.0), "another engine lives here", 60.0)
    assert book.want("e", THERE, 60.1).state is PeerState.BACKING_OFF


def test_an_engine_that_was_lost_is_asked_where_it_is_now(book):
    book.succeeded("e", start(book), "value")
    book.lost("e")
    start(book, "e", THERE)
    assert book.take_discarded() == ["value"]


def test_a_result_that_comes_too_late_is_discarded(book):
    first = start(book)
    book.lost("e")
    second = start(book)
    assert not book.succeeded("e", first, "late")
    book.failed("e", first, "late", 0.0)
    book.refused("e", first, "late", 0.0)
    assert book.take_discarded() == ["late"]
    assert book.succeeded("e", second, "value")


def test_a_lost_peer_starts_over(book):
    book.succeeded("e", start(book), "value")
    assert book.lost("e")
    assert not book.lost("e")
    assert book.take_discarded() == ["value"]
    start(book)


def test_idle_peers_go_and_used_ones_stay(book):
    book.succeeded("idle", start(book, "idle", HERE), "a")
    book.succeeded("used", start(book, "used", THERE), "b")
    book.touch("used", 60.0)
    book.touch("nobody", 60.0)
    assert book.expire(99.0) == ()
    assert book.expire(100.0) == ("idle",)
    assert book.take_discarded() == ["a"]


def test_a_peer_that_is_hastened_goes_earlier_and_not_while_it_is_used(book):
    book.succeeded("e", start(book), "value")
    book.hasten("e", 20.0)
    book.hasten("nobody", 20.0)
    book.touch("e", 19.0)
    assert book.expire(38.0) == ()
    assert book.state("e", HERE) is PeerState.READY
    assert book.expire(39.0) == ("e",)
    assert book.state("e", HERE) is PeerState.UNKNOWN
    book.succeeded("e", start(book), "value")
    assert book.expire(99.0) == (), "one that comes back is like any other"


def test_the_book_is_bounded_and_drops_the_longest_unused(book):
    for number in range(10):
        address = Address(f"10.0.1.{number}", 5600)
        book.succeeded(f"e{number}", start(book, f"e{number}", address, float(number)), number)
    assert book.take_discarded() == list(range(7))
    assert repr(book) == "PeerBook(ready=3, evicted=7)"


EVENTS = st.one_of(
    st.tuples(st.just("want"), st.integers(0, 4), st.integers(0, 3)),
    st.tuples(st.just("end"), st.integers(0, 2)),
    st.tuples(st.just("lost"), st.integers(0, 4)),
    st.tuples(st.just("wait"), st.integers(0, 120)),
)


@given(st.lists(EVENTS, max_size=80))
def test_every_value_is_discarded_once_and_nothing_leaks(events):
    book = PeerBook(LIMITS)
    now, running, made, discarded = 0.0, [], 0, []
    for kind, *rest in events:
        if kind == "want":
            engine_id = f"e{rest[0]}"
            verdict = book.want(engine_id, Address(f"h{rest[1]}", 1), now)
            if verdict.attempt is not None:
                running.append((engine_id, verdict.attempt))
        elif kind == "end" and running:
            engine_id, attempt = running.pop(0)
            if rest[0] == 0:
                made += 1
                book.succeeded(engine_id, attempt, made)
            elif rest[0] == 1:
                book.failed(engine_id, attempt, "x", now)
            else:
                book.refused(engine_id, attempt, "x", now)
        elif kind == "lost":
            book.lost(f"e{rest[0]}")
        elif kind == "wait":
            now += rest[0]
            book.expire(now)
        discarded += book.take_discarded()
        counts = book.counts()
        assert sum(counts.values()) - counts["evicted"] <= LIMITS.max_peers
    kept = list(book.ready().values())
    assert sorted(kept + discarded) == list(range(1, made + 1))


class Handshakes:
    """Handshakes that end when the test says so."""

    def __init__(self):
        self.gates = {}
        self.discarded = []
        self.busy = set()

    def __call__(self, engine_id, address):
        gate, result = self.gates[engine_id]
        assert gate.wait(10)
        if isinstance(result, Exception):
            raise result
        return result

    def plan(self, engine_id, result):
        self.gates[engine_id] = (threading.Event(), result)

    def end(self, engine_id):
        self.gates[engine_id][0].set()

    def discard(self, value):
        if value in self.busy:
            return False
        self.discarded.append(value)
        return True


@pytest.fixture
def handshakes():
    return Handshakes()


@pytest.fixture
def manager(handshakes):
    manager = PeerManager(handshakes, handshakes.discard, LIMITS, workers=2)
    yield manager
    for gate, _ in handshakes.gates.values():
        gate.set()
    manager.close()


def collect(manager, engine_id, now=0.0):
    pause = threading.Event()
    for _ in range(1000):
        if engine_id in manager.collect(now):
            return
        pause.wait(0.01)
    raise AssertionError(f"the handshake with {engine_id} did not end")


def test_one_dead_peer_does_not_delay_another(manager, handshakes):
    handshakes.plan("dead", "never")
    handshakes.plan("alive", "value")
    manager.want("dead", HERE, 0.0)
    manager.want("alive", THERE, 0.0)
    handshakes.end("alive")
    collect(manager, "alive")
    assert manager.want("alive", THERE, 0.0).value == "value"
    assert manager.want("dead", HERE, 0.0).state is PeerState.HANDSHAKING
    assert "handshakes_running=1" in repr(manager)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (RefusedError("layout", "a", "b"), PeerState.REFUSED),
        (RefusedError("engine", "ready", "starting", retryable=True), PeerState.BACKING_OFF),
        (VersionError("version", "1", 2), PeerState.REFUSED),
        (SideChannelError("side channel", "an answer", "none"), PeerState.BACKING_OFF),
        (ZeroDivisionError("a bug"), PeerState.BACKING_OFF),
    ],
    ids=["refused", "starting", "version", "unreachable", "bug"],
)
def test_errors_decide_between_refused_and_backing_off(manager, handshakes, error, state):
    handshakes.plan("e", error)
    handshakes.end("e")
    manager.want("e", HERE, 0.0)
    collect(manager, "e")
    verdict = manager.want("e", HERE, 0.0)
    assert verdict.state is state
    assert verdict.reason
    assert manager.counts()[state.value] == 1


def test_what_is_in_use_is_given_back_later(manager, handshakes):
    handshakes.plan("e", "value")
    handshakes.end("e")
    manager.want("e", HERE, 0.0)
    collect(manager, "e")
    handshakes.busy.add("value")
    manager.lost("e", "a read failed")
    manager.collect(0.0)
    assert handshakes.discarded == []
    handshakes.busy.clear()
    manager.collect(0.0)
    manager.collect(0.0)
    assert handshakes.discarded == ["value"]


def test_closing_gives_everything_back(handshakes):
    manager = PeerManager(handshakes, handshakes.discard, LIMITS, workers=2)
    for engine_id, address in (("ready", HERE), ("running", THERE)):
        handshakes.plan(engine_id, engine_id)
        manager.want(engine_id, address, 0.0)
    handshakes.end("ready")
    collect(manager, "ready")
    handshakes.end("running")
    manager.close()
    assert sorted(handshakes.discarded) == ["ready", "running"]
    manager.close()
