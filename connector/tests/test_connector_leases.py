"""Leases: the producer's table state x event, and the consumer's users and renewals.

The clock is an argument, so every test says what time it is. The lease board is a recorder here;
its memory is tested in ``hybridpd_testkit.agent_contract``.
"""

import pytest
from connector_boards import RecordedBoard
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector import leases as leases_module
from hybridpd_connector.errors import StateError
from hybridpd_connector.leases import (
    AFTER_END,
    FORGOTTEN,
    OTHER_ENGINE,
    PINNED_TWICE,
    RENEWALS_PER_LEASE,
    STALE_SEQUENCE,
    TP_SIZE_CHANGED,
    ConsumerLeases,
    LeaseKey,
    ProducerLeases,
)
from hybridpd_connector.notifications import Release, Renew

LEASE = 30.0


@pytest.fixture
def board():
    return RecordedBoard()


@pytest.fixture
def held(board):
    leases = ProducerLeases(LEASE, board)
    leases.pin("p1", 1, now=0.0)
    return leases


def release(p_request="p1", sequence=1, engine="d", d_request="r", rank=0, tp_size=1):
    return Release(p_request, sequence, engine, d_request, rank, tp_size)


def test_a_release_ends_the_lease_once_and_on_the_board_first(held, board):
    ended = held.tick([release()], now=1.0)
    assert (ended.released, ended.expired, ended.problems) == (("p1",), (), {})
    assert board.ended == [1]
    assert held.held == 0
    again = held.tick([release(), release()], now=100.0)
    assert (again.released, again.expired, again.problems) == ((), (), {})
    assert board.ended == [1]


def test_every_rank_of_the_engine_must_release(held):
    assert held.tick([release(rank=1, tp_size=3)], now=1.0).released == ()
    assert held.tick([release(rank=1, tp_size=3)], now=1.0).released == ()
    assert held.tick([release(rank=0, tp_size=3)], now=1.0).released == ()
    assert held.tick([release(rank=2, tp_size=3)], now=1.0).released == ("p1",)


def test_ranks_of_different_engines_do_not_add_up(held):
    ended = held.tick(
        [release(engine="a", rank=0, tp_size=2), release(engine="b", rank=1, tp_size=2)], now=1.0
    )
    assert ended.released == ()
    assert ended.problems == {OTHER_ENGINE: 1}
    ended = held.tick([release(engine="b", rank=0, tp_size=2)], now=1.0)
    assert ended.released == ("p1",)
    late = held.tick([release(engine="a", rank=1, tp_size=2)], now=1.0)
    assert late.problems == {AFTER_END: 1}


def test_a_changed_tp_size_is_counted_and_ignored(held):
    ended = held.tick([release(rank=0, tp_size=2), release(rank=0, tp_size=1)], now=1.0)
    assert ended.released == ()
    assert ended.problems == {TP_SIZE_CHANGED: 1}


def test_a_lease_expires_at_its_deadline_and_not_before(held, board):
    assert held.tick([], now=LEASE - 0.001).expired == ()
    assert held.tick([], now=LEASE).expired == ("p1",)
    assert board.ended == [1]
    assert held.tick([], now=LEASE * 9).expired == ()


def test_what_has_arrived_counts_before_anything_expires(held):
    # A step that took far longer than the lease: the renewal waited all the time.
    late = LEASE * 10
    assert held.tick([Renew("d", ("p1",))], now=late).expired == ()
    assert held.tick([], now=late + LEASE - 0.001).expired == ()
    assert held.tick([release()], now=late + LEASE * 5).released == ("p1",)


def test_a_release_after_expiry_is_counted(held):
    held.tick([], now=LEASE)
    ended = held.tick([release(), Renew("d", ("p1",))], now=LEASE + 1)
    assert (ended.released, ended.expired) == ((), ())
    assert ended.problems == {AFTER_END: 2}


def test_a_release_that_beats_the_pin_is_remembered(board):
    leases = ProducerLeases(LEASE, board)
    early = [release(rank=rank, tp_size=2) for rank in (0, 1, 0)]
    assert leases.tick(early, now=0.0).released == ()
    leases.pin("p1", 1, now=1.0)
    assert leases.tick([], now=1.0).released == ("p1",)
    assert board.ended == [1]


def test_an_early_release_of_an_earlier_lease_does_not_end_the_next(board):
    leases = ProducerLeases(LEASE, board)
    leases.tick([release(sequence=1)], now=0.0)
    leases.pin("p1", 2, now=1.0)
    ended = leases.tick([], now=1.0)
    assert ended.released == ()
    assert ended.problems == {STALE_SEQUENCE: 1}


def test_a_request_id_may_come_again(held, board):
    held.tick([release()], now=1.0)
    held.pin("p1", 2, now=2.0)
    assert held.tick([release(sequence=1)], now=2.0).problems == {STALE_SEQUENCE: 1}
    assert held.tick([release(sequence=2)], now=2.0).released == ("p1",)
    assert board.ended == [1, 2]


def test_pinning_a_held_request_replaces_its_lease(held, board):
    held.pin("p1", 2, now=20.0)
    assert board.ended == [1]
    assert held.tick([], now=LEASE + 1).expired == ()
    ended = held.tick([], now=20.0 + LEASE)
    assert ended.expired == ("p1",)
    assert board.ended == [1, 2]


def test_the_replaced_pin_is_counted(held):
    held.pin("p1", 2, now=1.0)
    assert held.tick([], now=1.0).problems == {PINNED_TWICE: 1}


def test_unknown_requests_cost_bounded_memory(board, monkeypatch):
    monkeypatch.setattr(leases_module, "MAX_REMEMBERED", 10)
    leases = ProducerLeases(LEASE, board)
    ended = leases.tick([release(p_request=f"x{n}") for n in range(100)], now=0.0)
    assert ended.problems == {FORGOTTEN: 90}
    for number in range(100):
        leases.pin(f"p{number}", number + 1, now=0.0)
    assert len(leases.tick([], now=LEASE).expired) == 100
    assert repr(leases) == "ProducerLeases(held=0, early=10, ends_remembered=10)"


def test_renewing_the_unknown_is_harmless(held):
    ended = held.tick([Renew("d", ("nobody", "p1"))], now=1.0)
    assert ended.problems == {}
    assert held.is_held("p1")
    assert not held.is_held("nobody")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("pin"), st.integers(0, 3)),
            st.tuples(st.just("renew"), st.integers(0, 3)),
            st.tuples(st.just("release"), st.integers(0, 3), st.integers(0, 1), st.booleans()),
            st.tuples(st.just("wait"), st.integers(0, 40)),
        ),
        max_size=60,
    )
)
def test_every_pin_ends_exactly_once_whatever_arrives(events):
    board = RecordedBoard()
    leases = ProducerLeases(LEASE, board)
    now, sequence = 0.0, 0
    latest, pinned, reported = {}, [], []
    for kind, *rest in events:
        messages = []
        if kind == "pin":
            sequence += 1
            name = f"p{rest[0]}"
            if not leases.is_held(name):
                pinned.append(name)
            latest[name] = sequence
            leases.pin(name, sequence, now)
        elif kind == "renew":
            messages = [Renew("d", (f"p{rest[0]}",))]
        elif kind == "release":
            name, engine = f"p{rest[0]}", "d" if rest[2] else "e"
            messages = [release(name, latest.get(name, 1), engine, "r", rest[1], 2)]
        else:
            now += rest[0]
        quiet = not messages and leases.quiet(now)
        ended = leases.tick(messages, now)
        assert not (quiet and any(ended)), "a tick that may be left out has something to say"
        reported += ended.released + ended.expired
    assert leases.quiet(now + LEASE) == (not leases.held)
    reported += leases.tick([], now + LEASE).expired
    assert sorted(reported) == sorted(pinned)
    assert sorted(board.ended) == list(range(1, sequence + 1))
    assert leases.held == 0


KEY = LeaseKey("p", "p1", 1)
OTHER = LeaseKey("q", "q1", 1)


@pytest.fixture
def wanted():
    leases = ConsumerLeases()
    assert leases.acquire(KEY, "d1", LEASE, now=0.0)
    return leases


def test_the_first_renewal_is_due_at_arrival_and_then_regularly(wanted):
    assert wanted.renewals(0.0) == {"p": ("p1",)}
    assert wanted.renewals(LEASE / RENEWALS_PER_LEASE - 0.001) == {}
    assert wanted.renewals(LEASE / RENEWALS_PER_LEASE) == {"p": ("p1",)}


def test_renewals_are_grouped_by_engine(wanted):
    wanted.acquire(OTHER, "d2", LEASE, now=0.0)
    wanted.acquire(LeaseKey("p", "p2", 2), "d3", LEASE, now=0.0)
    assert wanted.renewals(0.0) == {"p": ("p1", "p2"), "q": ("q1",)}


def test_the_last_user_releases_and_only_once(wanted):
    assert wanted.acquire(KEY, "d2", LEASE, now=1.0)
    assert not wanted.drop(KEY, "d1")
    assert not wanted.drop(KEY, "d1")
    assert wanted.is_wanted(KEY)
    assert wanted.drop(KEY, "d2")
    assert not wanted.drop(KEY, "d2")
    assert wanted.renewals(1000.0) == {}


def test_a_reader_after_the_release_is_turned_away(wanted):
    assert wanted.drop(KEY, "d1")
    assert not wanted.acquire(KEY, "d2", LEASE, now=1.0)
    # The same request id with another lease is another prefill.
    assert wanted.acquire(KEY._replace(sequence=2), "d2", LEASE, now=1.0)


def test_acquiring_again_changes_nothing(wanted):
    assert wanted.acquire(KEY, "d1", LEASE, now=5.0)
    assert wanted.drop(KEY, "d1")


def test_dropping_what_was_never_wanted_changes_nothing(wanted):
    assert not wanted.drop(OTHER, "d1")
    assert not wanted.drop(KEY, "stranger")
    assert wanted.wanted == 1


def test_forgetting_an_engine_names_every_user_of_it(wanted):
    wanted.acquire(KEY, "d2", LEASE, now=0.0)
    wanted.acquire(OTHER, "d3", LEASE, now=0.0)
    assert wanted.forget("p") == ((KEY, "d1"), (KEY, "d2"))
    assert wanted.forget("p") == ()
    assert not wanted.acquire(KEY, "d4", LEASE, now=0.0)
    assert wanted.wanted == 1


def test_released_prefills_cost_bounded_memory(monkeypatch):
    monkeypatch.setattr(leases_module, "MAX_REMEMBERED", 5)
    leases = ConsumerLeases()
    for number in range(20):
        key = LeaseKey("p", f"p{number}", number + 1)
        assert leases.acquire(key, "d", LEASE, now=0.0)
        assert leases.drop(key, "d")
    assert repr(leases) == "ConsumerLeases(wanted=0, released=5)"


def test_our_own_mistakes_are_named():
    leases = ConsumerLeases()
    with pytest.raises(StateError, match="lease_seconds"):
        leases.acquire(KEY, "d1", 0, now=0.0)
