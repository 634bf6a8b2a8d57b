"""Whose handshake comes first when many addresses are made up: the order, then real threads."""

import itertools
import threading

import pytest

from hybridpd_connector.errors import SideChannelError
from hybridpd_connector.handshake_pool import MAX_SEARCHES
from hybridpd_connector.handshake_queue import MAX_FAILURES, MAX_REMEMBERED, HandshakeQueue
from hybridpd_connector.peers import Address, PeerBook, PeerLimits, PeerManager, PeerState

HOLES = 400
ATTEMPTS = itertools.count(1)


@pytest.fixture
def turns():
    return HandshakeQueue(strangers=2)


def put(turns, *names, requests=1):
    """Engines of these names at addresses of these names."""
    for name in names:
        for _ in range(requests):
            turns.count_request(name)
        turns.put(name, name, next(ATTEMPTS))


def taken(turns):
    turn = turns.take()
    return turn and turn.engine_id


def play(turns, name, *, answered=True, succeeded=True):
    """One handshake from its turn to its end."""
    put(turns, name)
    turn = turns.take()
    assert turn.engine_id == name
    turns.done(turn, answered=answered, succeeded=succeeded)


def test_strangers_come_in_the_order_of_their_arrival(turns):
    put(turns, "a", "b")
    assert [taken(turns), taken(turns)] == ["a", "b"]


def test_strangers_never_run_all_at_once(turns):
    put(turns, "a", "b", "c")
    first = turns.take()
    assert (taken(turns), taken(turns)) == ("b", None)
    turns.done(first, answered=False, succeeded=False)
    assert taken(turns) == "c"


def test_an_address_that_has_answered_comes_first_and_needs_no_strangers_place(turns):
    play(turns, "known")
    put(turns, "a", "b", "c")
    put(turns, "known")
    assert [taken(turns), taken(turns), taken(turns), taken(turns)] == ["known", "a", "b", None]


def test_a_configured_address_comes_first_whatever_it_did(turns):
    turns.configure(["named"])
    for _ in range(MAX_FAILURES + 1):
        play(turns, "named", answered=False, succeeded=False)
    put(turns, "a", requests=50)
    put(turns, "named")
    assert taken(turns) == "named"


def test_an_address_that_stops_answering_is_a_stranger_again(turns):
    play(turns, "gone")
    for _ in range(MAX_FAILURES):
        play(turns, "gone", answered=False, succeeded=False)
    put(turns, "a")
    put(turns, "gone")
    assert taken(turns) == "a"


def test_a_refusal_is_an_answer_and_no_proof(turns):
    play(turns, "refuses", succeeded=False)
    put(turns, "a", requests=2)
    put(turns, "refuses")
    assert taken(turns) == "a"


def test_who_is_asked_for_more_comes_first_and_failures_count_against_it(turns):
    put(turns, "one request")
    put(turns, "three requests", requests=3)
    assert taken(turns) == "three requests"
    turn = turns.take()
    turns.done(turn, answered=False, succeeded=False)
    put(turns, "one request")
    put(turns, "two requests", requests=2)
    assert taken(turns) == "two requests"


def test_one_address_is_asked_once_at_a_time(turns):
    turns.put("a", "here", next(ATTEMPTS))
    turns.put("b", "here", next(ATTEMPTS))
    turn = turns.take()
    assert taken(turns) is None
    turns.done(turn, answered=True, succeeded=True)
    assert taken(turns) == "b"


def test_the_last_in_line_gives_way_to_who_comes_before_it(turns):
    put(turns, "a", "b")
    turns.count_request("c")
    assert turns.give_way("c", "c") is None
    turns.count_request("c")
    assert turns.give_way("c", "c").engine_id == "b"
    assert turns.give_way("a", "a") is None


def test_the_line_is_not_searched_for_every_made_up_engine(manager, monkeypatch):
    """Hundreds of loads ask in every step; a search looks at hundreds."""
    searches = []
    monkeypatch.setattr(
        HandshakeQueue, "give_way", lambda turns, engine_id, address: searches.append(engine_id)
    )
    for requests in (1, 2):
        for index in range(100):
            want(manager, f"more{index}", f"10.8.0.{index}")
        assert len(searches) <= MAX_SEARCHES * (requests - 1)
    manager.collect(0.0)
    want(manager, "more0", "10.8.0.0")
    assert len(searches) == MAX_SEARCHES + 1


def test_what_is_remembered_is_bounded(turns):
    for index in range(MAX_REMEMBERED + 10):
        play(turns, f"e{index}", answered=index % 2, succeeded=index % 3 == 0)
    sizes = [len(kept) for kept in (turns._answered, turns._failures, turns._requests)]
    assert max(sizes) <= MAX_REMEMBERED


class Holes:
    """Addresses of which nothing is heard until the test gives one up; others answer at once."""

    def __init__(self):
        self.given_up = threading.Semaphore(0)
        self.asked = 0

    def __call__(self, engine_id, address):
        if not engine_id.startswith("hole"):
            return engine_id
        self.asked += 1
        self.given_up.acquire()
        raise SideChannelError("side channel", "an answer", "none in time")


@pytest.fixture
def holes():
    return Holes()


@pytest.fixture
def manager(holes):
    manager = PeerManager(holes, lambda value: True, PeerLimits(max_handshakes=HOLES))
    for index in range(HOLES):
        want(manager, f"hole{index}", f"10.9.{index // 250}.{index % 250}")
    until(lambda: holes.asked == 12)
    yield manager
    for _ in range(2 * HOLES):
        holes.given_up.release()
    manager.close()


def want(manager, engine_id, host, requests=1):
    for _ in range(requests):
        manager.count_request(engine_id)
    return manager.want(engine_id, Address(host, 5600), 0.0)


def until(condition):
    pause = threading.Event()
    for _ in range(2000):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("not reached")


def ready(manager, engine_id, host):
    manager.collect(0.0)
    return manager.want(engine_id, Address(host, 5600), 0.0).state is PeerState.READY


def test_an_engine_that_more_requests_ask_for_waits_for_one_hole_at_most(manager, holes):
    want(manager, "good", "10.0.0.1", requests=2)
    assert not ready(manager, "good", "10.0.0.1")  # it stands in line now
    holes.given_up.release()
    until(lambda: ready(manager, "good", "10.0.0.1"))
    assert holes.asked <= 12 + 1


def test_the_place_of_who_gave_way_is_not_for_who_asks_first_in_the_next_step(manager):
    """Loads of made-up engines that found no place ask in every step, and before the good one."""
    crowd = [f"hole of the crowd {index}" for index in range(100)]
    for engine_id in crowd:
        want(manager, engine_id, "10.7.0.0")
    manager.count_request("good")
    for _ in range(3):
        manager.collect(0.0)
        for engine_id in crowd:
            manager.want(engine_id, Address("10.7.0.0", 5600), 0.0)
        verdict = want(manager, "good", "10.0.0.1")
    assert verdict.state is PeerState.HANDSHAKING


def test_however_many_requests_ask_for_an_engine_one_gives_way_to_it(manager):
    for _ in range(30):
        want(manager, "good", "10.0.0.1", requests=2)
    manager.collect(0.0)
    assert manager.counts()["backing_off"] == 1


def test_nobody_gives_way_to_an_engine_in_its_pause():
    book = PeerBook(PeerLimits(max_handshakes=1, first_pause_seconds=5.0))
    here = Address("10.0.0.1", 5600)
    assert book.want("other", here, 0.0, running=1).crowded
    assert not book.want("good", here, 0.0, running=0).crowded
    book.failed("good", 1, "none in time", 0.0)
    assert [book.want("good", here, now, running=1).crowded for now in (4.0, 5.0)] == [False, True]


def test_an_address_that_has_answered_waits_for_no_hole(holes):
    manager = PeerManager(holes, lambda value: True, PeerLimits(max_handshakes=HOLES))
    want(manager, "first life", "10.0.0.1")
    until(lambda: ready(manager, "first life", "10.0.0.1"))
    for index in range(HOLES):
        want(manager, f"hole{index}", f"10.9.{index // 250}.{index % 250}")
    until(lambda: holes.asked == 12)
    want(manager, "second life", "10.0.0.1")
    until(lambda: ready(manager, "second life", "10.0.0.1"))
    for _ in range(2 * HOLES):
        holes.given_up.release()
    manager.close()


def test_who_is_last_in_line_may_be_forgotten(turns):
    """Requests for it no longer count then, and others come before it that did not."""
    put(turns, "last", requests=3)
    turns.count_request("other")
    assert not turns.may_come_first("other", "other")
    for name in range(MAX_REMEMBERED):
        turns.count_request(f"made up {name}")
    turns.count_request("other")
    assert turns.may_come_first("other", "other")
    assert turns.give_way("other", "other").engine_id == "last"
