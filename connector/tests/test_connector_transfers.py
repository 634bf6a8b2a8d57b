"""Loads in flight: one verdict per load, given once, and never while a byte can still arrive.

The in-memory agent moves bytes at the last moment the contract allows, so freeing too early shows.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector import lease_board
from hybridpd_connector.agent_api import Memory
from hybridpd_connector.agent_fake import FakeAgent, FakeNetwork
from hybridpd_connector.errors import AgentError, StateError
from hybridpd_connector.lease_board import BoardCheck, BoardReader, LeaseBoard
from hybridpd_connector.transfers import (
    ABORTED,
    DEADLINE,
    LEASE_CHECK_FAILED,
    LEASE_ENDED,
    POST_FAILED,
    READ_FAILED,
    SourceRead,
    Transfers,
)
from hybridpd_testkit.agent_contract import PAGE_BYTES, Side

LATER = 1000.0
SEQUENCE = 7


class Fleet:
    """One D rank and several P ranks, with a lease board each."""

    def __init__(self, sources=2):
        self.network = FakeNetwork()
        self.consumer = Side(FakeAgent("d", self.network))
        self.boards_reader = BoardReader(self.consumer.agent, cells=8)
        self.transfers = Transfers(self.consumer.agent, self.boards_reader)
        self.local = self.consumer.agent.prepare(None, self.consumer.dense(), Memory.DRAM)
        self.producers, self.boards, self.remotes, self.views = [], [], [], []
        for index in range(sources):
            self.add(index)

    def add(self, index):
        side = Side(FakeAgent(f"p{index}", self.network))
        side.fill()
        board = LeaseBoard(slots=16)
        side.agent.register([board.region()])
        peer = self.consumer.agent.add_peer(side.agent.metadata())
        self.producers.append(side)
        self.boards.append(board)
        self.remotes.append(self.consumer.agent.prepare(peer, side.dense(), Memory.DRAM))
        self.views.append(self.boards_reader.attach(peer, board.address, board.slots))

    def source(self, index, page, check=True):
        return SourceRead(
            peer=f"p{index}",
            local=self.local,
            remote=self.remotes[index],
            ranges=[self.range_of(index, page)],
            check=BoardCheck(self.views[index], SEQUENCE) if check else None,
        )

    def range_of(self, index, page):
        here = self.consumer.address + page * PAGE_BYTES
        there = self.producers[index].address + (page + 1) * PAGE_BYTES
        return here, there, PAGE_BYTES

    def submit(self, request="r", deadline=LATER, **options):
        sources = [self.source(i, i, **options) for i in range(len(self.producers))]
        self.transfers.submit(request, sources, deadline)

    def drain(self, now=0.0, polls=50):
        outcomes = []
        for _ in range(polls):
            outcomes += self.transfers.poll(now)
        return outcomes

    def only_outcome(self, now=0.0):
        outcomes = self.drain(now)
        assert len(outcomes) == 1
        return outcomes[0]

    def assert_idle(self):
        assert self.transfers.in_flight == 0
        assert self.consumer.agent.open_reads == 0
        assert self.boards_reader.cells_used == 0
        assert not any(self.transfers.busy(f"p{i}") for i in range(len(self.producers)))
        assert repr(self.transfers) == "Transfers(loads=0, reading=0, checking=0)"


@pytest.fixture
def fleet():
    return Fleet()


def test_a_good_load_has_every_part_and_the_library_s_counts(fleet):
    fleet.submit()
    assert repr(fleet.transfers) == "Transfers(loads=1, reading=2, checking=0)"
    outcome = fleet.only_outcome()
    assert (outcome.request, outcome.ok, outcome.reason, outcome.peer) == ("r", True, "", "")
    assert (outcome.bytes, outcome.descriptors) == (2 * PAGE_BYTES, 2)
    for index, producer in enumerate(fleet.producers):
        assert fleet.consumer.page(index) == producer.page(index + 1)
    fleet.assert_idle()


def test_one_pass_looks_at_everything_pending(fleet):
    for request in "abc":
        fleet.transfers.submit(request, [fleet.source(0, 1, check=False)], LATER)
    assert sorted(outcome.request for outcome in fleet.transfers.poll(0.0)) == ["a", "b", "c"]


def test_a_load_ends_with_its_last_part(fleet):
    fleet.network.hang_reads("p1")
    fleet.submit()
    assert fleet.drain() == []
    assert not fleet.transfers.busy("p0")
    assert fleet.transfers.busy("p1")
    assert fleet.transfers.is_in_flight("r")
    fleet.network.resume("p1")
    assert fleet.only_outcome().ok
    fleet.assert_idle()


@pytest.mark.parametrize("ended", [0, 1])
def test_a_lease_that_ended_on_any_rank_fails_the_load(fleet, ended):
    fleet.boards[ended].end(SEQUENCE)
    fleet.submit()
    outcome = fleet.only_outcome()
    assert (outcome.ok, outcome.reason, outcome.peer) == (False, LEASE_ENDED, f"p{ended}")
    assert not outcome.peer_broken
    fleet.assert_idle()


def test_a_lease_that_ends_during_the_read_fails_the_load(fleet):
    fleet.network.delay_reads(5)
    fleet.submit()
    assert fleet.drain(polls=3) == []
    fleet.boards[0].end(SEQUENCE)
    assert fleet.only_outcome().reason == LEASE_ENDED
    fleet.assert_idle()


def test_the_end_of_another_lease_does_not_matter(fleet):
    fleet.boards[0].end(SEQUENCE - 1)
    fleet.boards[0].end(SEQUENCE + 1)
    fleet.submit()
    assert fleet.only_outcome().ok


def test_without_a_lease_nothing_is_checked(fleet):
    fleet.boards[0].end(SEQUENCE)
    fleet.submit(check=False)
    assert fleet.only_outcome().ok


def test_a_failed_read_fails_the_load_and_names_the_peer(fleet):
    fleet.network.fail_reads(1)
    fleet.submit()
    outcome = fleet.only_outcome()
    assert (outcome.ok, outcome.reason, outcome.peer) == (False, READ_FAILED, "p0")
    assert outcome.peer_broken
    fleet.assert_idle()


def test_a_failed_load_waits_for_its_other_parts(fleet):
    fleet.network.fail_reads(1)
    fleet.network.hang_reads("p1")
    fleet.submit()
    assert fleet.drain() == []
    fleet.network.resume("p1")
    assert fleet.only_outcome().reason == READ_FAILED
    fleet.assert_idle()


def test_a_post_that_fails_stops_further_posts_and_waits_for_earlier_ones(fleet):
    fleet.network.hang_reads("p0")
    fleet.network.kill("p1")
    fleet.submit()
    assert fleet.drain() == []
    fleet.network.resume("p0")
    outcome = fleet.only_outcome()
    assert (outcome.reason, outcome.peer, outcome.peer_broken) == (POST_FAILED, "p1", True)
    fleet.assert_idle()


def test_a_refused_post_does_not_break_the_peer(fleet):
    fleet.network.refuse_posts(1)
    fleet.submit()
    outcome = fleet.only_outcome()
    assert (outcome.reason, outcome.peer, outcome.peer_broken) == (POST_FAILED, "p0", False)
    fleet.submit()
    assert fleet.only_outcome().ok


def test_a_lease_check_that_fails_fails_the_load():
    fleet = Fleet(sources=1)
    fleet.network.delay_reads(2)
    fleet.submit()
    assert fleet.transfers.poll(0.0) == []
    # The read was posted before; the next post is the check.
    fleet.network.fail_reads(1)
    outcome = fleet.only_outcome()
    assert (outcome.reason, outcome.peer, outcome.peer_broken) == (LEASE_CHECK_FAILED, "p0", True)
    fleet.assert_idle()


def test_a_lease_check_that_cannot_be_posted_fails_the_load():
    fleet = Fleet(sources=1)
    fleet.submit()
    fleet.network.refuse_posts(1)
    outcome = fleet.only_outcome()
    assert (outcome.reason, outcome.peer_broken) == (LEASE_CHECK_FAILED, False)
    fleet.assert_idle()


def test_a_full_scratch_fails_the_load_and_not_the_peer():
    fleet = Fleet(sources=1)
    fleet.network.delay_reads(2)
    for number in range(9):
        fleet.submit(f"r{number}")
    outcomes = fleet.drain()
    assert len(outcomes) == 9
    failed = [outcome for outcome in outcomes if not outcome.ok]
    assert [(o.reason, o.peer_broken) for o in failed] == [(LEASE_CHECK_FAILED, False)]
    fleet.assert_idle()


def test_loads_that_end_at_the_same_look_ask_each_board_once(fleet, monkeypatch):
    asked = []
    start = fleet.boards_reader.start

    def counted(view, sequences):
        asked.append((view.peer, list(sequences)))
        return start(view, sequences)

    monkeypatch.setattr(fleet.boards_reader, "start", counted)
    for number, sequence in enumerate((3, 5, 4)):
        sources = [
            fleet.source(index, number)._replace(check=BoardCheck(fleet.views[index], sequence))
            for index in (0, 1)
        ]
        fleet.transfers.submit(f"r{sequence}", sources, LATER)
    fleet.boards[1].end(5)
    outcomes = {outcome.request: outcome.reason for outcome in fleet.drain()}
    assert asked == [("p0", [3, 5, 4]), ("p1", [3, 5, 4])]
    assert outcomes == {"r3": "", "r5": LEASE_ENDED, "r4": ""}
    fleet.assert_idle()


def test_a_question_that_fails_fails_every_load_that_it_was_about():
    fleet = Fleet(sources=1)
    fleet.network.delay_reads(2)
    fleet.submit("r1")
    fleet.submit("r2")
    assert fleet.transfers.poll(0.0) == []
    fleet.network.fail_reads(1)
    outcomes = fleet.drain()
    assert [(o.request, o.reason, o.peer_broken) for o in outcomes] == [
        ("r1", LEASE_CHECK_FAILED, True),
        ("r2", LEASE_CHECK_FAILED, True),
    ]
    fleet.assert_idle()


def test_more_questions_than_one_read_takes_are_asked_in_several(monkeypatch):
    monkeypatch.setattr(lease_board, "MAX_TOGETHER", 3)
    fleet = Fleet(sources=1)
    for number in range(8):
        fleet.submit(f"r{number}")
    assert [outcome.ok for outcome in fleet.transfers.poll(0.0)] == [True] * 8
    fleet.assert_idle()


def test_an_abort_keeps_the_blocks_until_the_read_has_ended(fleet):
    fleet.network.hang_reads("p0")
    fleet.submit()
    fleet.transfers.abort("r")
    assert fleet.drain() == []
    fleet.network.resume("p0")
    outcome = fleet.only_outcome()
    assert (outcome.ok, outcome.reason, outcome.peer_broken) == (False, ABORTED, False)
    fleet.assert_idle()


def test_aborting_the_unknown_or_the_ended_changes_nothing(fleet):
    fleet.transfers.abort("nobody")
    fleet.submit()
    assert fleet.only_outcome().ok
    fleet.transfers.abort("r")
    assert fleet.drain() == []


def test_a_passed_deadline_fails_the_load_but_does_not_end_it(fleet):
    fleet.network.hang_reads("p1")
    fleet.submit(deadline=10.0)
    assert fleet.drain(now=9.9) == []
    assert fleet.transfers.overdue(9.9) == ()
    assert fleet.drain(now=10.0) == []
    assert fleet.transfers.overdue(10.0) == ("p1",)
    with pytest.raises(AgentError):
        fleet.consumer.agent.remove_peer("p1")
    fleet.network.resume("p1")
    outcome = fleet.only_outcome(now=11.0)
    assert (outcome.ok, outcome.reason, outcome.peer) == (False, DEADLINE, "p1")
    assert fleet.transfers.overdue(11.0) == ()
    fleet.assert_idle()


def test_a_request_is_submitted_once_until_it_ends(fleet):
    fleet.network.hang_reads("p0")
    fleet.submit()
    with pytest.raises(StateError, match="submitted again"):
        fleet.submit()
    fleet.network.resume("p0")
    fleet.drain()
    fleet.submit()
    assert fleet.only_outcome().ok


def test_a_load_without_parts_ends_at_once(fleet):
    fleet.transfers.submit("r", [], LATER)
    assert fleet.only_outcome().ok


FAULTS = st.one_of(
    st.tuples(st.just("submit"), st.just(0)),
    st.tuples(st.just("fail"), st.integers(1, 2)),
    st.tuples(st.just("refuse"), st.integers(1, 2)),
    st.tuples(st.just("hang"), st.integers(0, 1)),
    st.tuples(st.just("resume"), st.integers(0, 1)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("end lease"), st.integers(0, 1)),
    st.tuples(st.just("wait"), st.integers(0, 20)),
)


@given(st.lists(FAULTS, max_size=40))
def test_every_load_ends_once_and_nothing_leaks(events):
    fleet = Fleet()
    now, submitted, outcomes = 0.0, 0, []
    aborted, too_late = set(), set()
    for kind, value in events:
        if kind == "submit":
            fleet.submit(f"r{submitted}", deadline=now + 10)
            if any(board.ended(SEQUENCE) for board in fleet.boards):
                too_late.add(f"r{submitted}")
            submitted += 1
        elif kind == "fail":
            fleet.network.fail_reads(value)
        elif kind == "refuse":
            fleet.network.refuse_posts(value)
        elif kind == "hang":
            fleet.network.hang_reads(f"p{value}")
        elif kind == "resume":
            fleet.network.resume(f"p{value}")
        elif kind == "abort":
            if fleet.transfers.is_in_flight(f"r{value}"):
                aborted.add(f"r{value}")
            fleet.transfers.abort(f"r{value}")
        elif kind == "end lease":
            fleet.boards[value].end(SEQUENCE)
        else:
            now += value
        outcomes += fleet.transfers.poll(now)
    for peer in ("p0", "p1"):
        fleet.network.resume(peer)
    outcomes += fleet.drain(now)
    assert sorted(o.request for o in outcomes) == sorted(f"r{n}" for n in range(submitted))
    assert not any(outcome.ok for outcome in outcomes if outcome.request in aborted | too_late)
    fleet.assert_idle()
