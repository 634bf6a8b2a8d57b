"""Every state x every event of leases and transfers, written down cell by cell.

The request's two machines are enumerated in ``test_connector_request_state``, the peers' in
``test_connector_peers``; whole engines, state x fault, in ``test_connector_every_fault``.
"""

import copy
import itertools

import pytest
from connector_boards import RecordedBoard

from hybridpd_connector.agent_api import Memory
from hybridpd_connector.agent_fake import FakeAgent, FakeNetwork
from hybridpd_connector.lease_board import BoardCheck, BoardReader, LeaseBoard
from hybridpd_connector.leases import (
    AFTER_END,
    OTHER_ENGINE,
    PINNED_TWICE,
    STALE_SEQUENCE,
    TP_SIZE_CHANGED,
    ConsumerLeases,
    LeaseKey,
    ProducerLeases,
)
from hybridpd_connector.notifications import Release, Renew
from hybridpd_connector.transfers import SourceRead, Transfers
from hybridpd_testkit.agent_contract import PAGE_BYTES, Side

LEASE = 30.0


def release(rank, sequence=1, engine="d", tp_size=2):
    return Release("p1", sequence, engine, "r", rank, tp_size)


# --- producer: a lease that a reader with two ranks releases ---------------------------------

PRODUCER_STATES = {
    "unknown": [],
    "early": [[release(0)]],
    "held": ["pin"],
    "part": ["pin", [release(0)]],
    "released": ["pin", [release(0), release(1)]],
    "expired": ["pin", "deadline"],
}
PRODUCER_EVENTS = {
    "pin": "pin again",
    "renew": [Renew("d", ("p1",))],
    "rank 0": [release(0)],
    "rank 1": [release(1)],
    "earlier lease": [release(1, sequence=0)],
    "other engine": [release(0, engine="e"), release(1, engine="e")],
    "other tp size": [release(1, tp_size=3)],
    "deadline": "deadline",
}
R, E = ("p1",), ("p1",)
# (state after, released, expired, problems); "wants 1" is held until rank 1 releases it.
PRODUCER_CELLS = {
    ("unknown", "pin"): ("held", (), (), ()),
    ("unknown", "renew"): ("gone", (), (), ()),
    ("unknown", "rank 0"): ("gone", (), (), ()),
    ("unknown", "rank 1"): ("gone", (), (), ()),
    ("unknown", "earlier lease"): ("gone", (), (), ()),
    ("unknown", "other engine"): ("gone", (), (), ()),
    ("unknown", "other tp size"): ("gone", (), (), ()),
    ("unknown", "deadline"): ("gone", (), (), ()),
    # What was released early was another lease than the one that is pinned now.
    ("early", "pin"): ("held", (), (), (STALE_SEQUENCE,)),
    ("early", "renew"): ("gone", (), (), ()),
    ("early", "rank 0"): ("gone", (), (), ()),
    ("early", "rank 1"): ("gone", (), (), ()),
    ("early", "earlier lease"): ("gone", (), (), ()),
    ("early", "other engine"): ("gone", (), (), ()),
    ("early", "other tp size"): ("gone", (), (), ()),
    ("early", "deadline"): ("gone", (), (), ()),
    ("held", "pin"): ("held", (), (), (PINNED_TWICE,)),
    ("held", "renew"): ("held", (), (), ()),
    ("held", "rank 0"): ("wants 1", (), (), ()),
    ("held", "rank 1"): ("wants 0", (), (), ()),
    ("held", "earlier lease"): ("held", (), (), (STALE_SEQUENCE,)),
    ("held", "other engine"): ("gone", R, (), ()),
    ("held", "other tp size"): ("held", (), (), ()),
    ("held", "deadline"): ("gone", (), E, ()),
    ("part", "pin"): ("held", (), (), (PINNED_TWICE,)),
    ("part", "renew"): ("wants 1", (), (), ()),
    ("part", "rank 0"): ("wants 1", (), (), ()),
    ("part", "rank 1"): ("gone", R, (), ()),
    ("part", "earlier lease"): ("wants 1", (), (), (STALE_SEQUENCE,)),
    ("part", "other engine"): ("gone", R, (), (OTHER_ENGINE,)),
    ("part", "other tp size"): ("wants 1", (), (), (TP_SIZE_CHANGED,)),
    ("part", "deadline"): ("gone", (), E, ()),
    ("released", "pin"): ("held", (), (), ()),
    ("released", "renew"): ("gone", (), (), (AFTER_END,)),
    ("released", "rank 0"): ("gone", (), (), ()),
    ("released", "rank 1"): ("gone", (), (), ()),
    ("released", "earlier lease"): ("gone", (), (), ()),
    ("released", "other engine"): ("gone", (), (), (AFTER_END,)),
    ("released", "other tp size"): ("gone", (), (), ()),
    ("released", "deadline"): ("gone", (), (), ()),
    ("expired", "pin"): ("held", (), (), ()),
    ("expired", "renew"): ("gone", (), (), (AFTER_END,)),
    ("expired", "rank 0"): ("gone", (), (), (AFTER_END,)),
    ("expired", "rank 1"): ("gone", (), (), (AFTER_END,)),
    ("expired", "earlier lease"): ("gone", (), (), (AFTER_END,)),
    ("expired", "other engine"): ("gone", (), (), (AFTER_END,)),
    ("expired", "other tp size"): ("gone", (), (), (AFTER_END,)),
    ("expired", "deadline"): ("gone", (), (), ()),
}


class Producer:
    def __init__(self, steps):
        self.board, self.now, self.sequence = RecordedBoard(), 0.0, 1
        self.leases = ProducerLeases(LEASE, self.board)
        for step in steps:
            self.play(step)

    def play(self, step):
        messages = []
        if step in ("pin", "pin again"):
            self.sequence = 2 if step == "pin again" else 1
            self.leases.pin("p1", self.sequence, self.now)
        elif step == "deadline":
            self.now += LEASE
        else:
            messages = step
        return self.leases.tick(messages, self.now)

    def state(self):
        """Found out by trying, each time on a copy: which rank's release ends it?"""
        if not self.leases.is_held("p1"):
            return "gone"
        for rank in (0, 1):
            leases = copy.deepcopy(self.leases)
            if leases.tick([release(rank, self.sequence)], self.now).released:
                return f"wants {rank}"
        return "held"


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(PRODUCER_STATES, PRODUCER_EVENTS))
)
def test_producer_lease(state, event):
    producer = Producer(PRODUCER_STATES[state])
    held, ended_before = producer.leases.is_held("p1"), list(producer.board.ended)
    ended = producer.play(PRODUCER_EVENTS[event])
    after, released, expired, problems = PRODUCER_CELLS[state, event]
    assert (producer.state(), ended.released, ended.expired) == (after, released, expired)
    assert set(ended.problems) == set(problems)
    published = producer.board.ended[len(ended_before) :]
    assert published == ([1] if held and (released or expired or event == "pin") else [])


# --- consumer: who of D's requests uses a prefill --------------------------------------------

KEY = LeaseKey("p", "p1", 1)
CONSUMER_STATES = {
    "unknown": [],
    "wanted": ["acquire a"],
    "shared": ["acquire a", "acquire b"],
    "released": ["acquire a", "drop a"],
    "forgotten": ["acquire a", "forget"],
}
CONSUMER_EVENTS = ("acquire a", "acquire b", "drop a", "drop b", "renew", "forget")
# (what the call returned, users after it)
CONSUMER_CELLS = {
    ("unknown", "acquire a"): (True, "a"),
    ("unknown", "acquire b"): (True, "b"),
    ("unknown", "drop a"): (False, ""),
    ("unknown", "drop b"): (False, ""),
    ("unknown", "renew"): ({}, ""),
    ("unknown", "forget"): ((), ""),
    ("wanted", "acquire a"): (True, "a"),
    ("wanted", "acquire b"): (True, "ab"),
    ("wanted", "drop a"): (True, ""),
    ("wanted", "drop b"): (False, "a"),
    ("wanted", "renew"): ({"p": ("p1",)}, "a"),
    ("wanted", "forget"): (((KEY, "a"),), ""),
    ("shared", "acquire a"): (True, "ab"),
    ("shared", "acquire b"): (True, "ab"),
    ("shared", "drop a"): (False, "b"),
    ("shared", "drop b"): (False, "a"),
    ("shared", "renew"): ({"p": ("p1",)}, "ab"),
    ("shared", "forget"): (((KEY, "a"), (KEY, "b")), ""),
    ("released", "acquire a"): (False, ""),
    ("released", "acquire b"): (False, ""),
    ("released", "drop a"): (False, ""),
    ("released", "drop b"): (False, ""),
    ("released", "renew"): ({}, ""),
    ("released", "forget"): ((), ""),
    ("forgotten", "acquire a"): (False, ""),
    ("forgotten", "acquire b"): (False, ""),
    ("forgotten", "drop a"): (False, ""),
    ("forgotten", "drop b"): (False, ""),
    ("forgotten", "renew"): ({}, ""),
    ("forgotten", "forget"): ((), ""),
}


def play_consumer(leases, event):
    word, _, user = event.partition(" ")
    if word == "acquire":
        return leases.acquire(KEY, user, LEASE, 0.0)
    if word == "drop":
        return leases.drop(KEY, user)
    return leases.renewals(0.0) if word == "renew" else leases.forget("p")


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(CONSUMER_STATES, CONSUMER_EVENTS))
)
def test_consumer_lease(state, event):
    leases = ConsumerLeases()
    for step in CONSUMER_STATES[state]:
        play_consumer(leases, step)
    result = play_consumer(leases, event)
    users = "".join(user for _, user in copy.deepcopy(leases).forget("p"))
    assert (result, users) == CONSUMER_CELLS[state, event]
    assert leases.is_wanted(KEY) == bool(users)


# --- transfers: one read and the look at the lease board behind it ---------------------------

TRANSFER_STATES = ("reading", "aborted", "overdue", "checking", "aborted while checking", "ended")
TRANSFER_EVENTS = ("nothing", "arrives", "breaks", "abort", "deadline", "lease ends")
WAITS = "waits"
# What is given out, "" for a good load; WAITS when the agent may still touch its bytes. "lease
# ends": before everything else arrives.
TRANSFER_CELLS = {
    ("reading", "nothing"): WAITS,
    ("reading", "arrives"): "",
    ("reading", "breaks"): "read_failed",
    ("reading", "abort"): WAITS,
    ("reading", "deadline"): WAITS,
    ("reading", "lease ends"): "lease_ended",
    ("aborted", "nothing"): WAITS,
    ("aborted", "arrives"): "aborted",
    ("aborted", "breaks"): "aborted",
    ("aborted", "abort"): WAITS,
    ("aborted", "deadline"): WAITS,
    ("aborted", "lease ends"): "aborted",
    ("overdue", "nothing"): WAITS,
    ("overdue", "arrives"): "deadline",
    ("overdue", "breaks"): "deadline",
    ("overdue", "abort"): WAITS,
    ("overdue", "deadline"): WAITS,
    ("overdue", "lease ends"): "deadline",
    ("checking", "nothing"): WAITS,
    ("checking", "arrives"): "",
    ("checking", "breaks"): "lease_check_failed",
    ("checking", "abort"): WAITS,
    ("checking", "deadline"): WAITS,
    ("checking", "lease ends"): "lease_ended",
    ("aborted while checking", "nothing"): WAITS,
    ("aborted while checking", "arrives"): "aborted",
    ("aborted while checking", "breaks"): "aborted",
    ("aborted while checking", "abort"): WAITS,
    ("aborted while checking", "deadline"): WAITS,
    ("aborted while checking", "lease ends"): "aborted",
    **{("ended", event): None for event in TRANSFER_EVENTS},
}


class OneRead:
    def __init__(self):
        self.network = FakeNetwork()
        reader, source = Side(FakeAgent("d", self.network)), Side(FakeAgent("p", self.network))
        self.sides = (reader, source)  # they own the memory that is read
        self.board = LeaseBoard(slots=16)
        source.agent.register([self.board.region()])
        self.agent, self.boards = reader.agent, BoardReader(reader.agent, cells=4)
        self.transfers = Transfers(reader.agent, self.boards)
        peer = reader.agent.add_peer(source.agent.metadata())
        view = self.boards.attach(peer, self.board.address, self.board.slots)
        local = reader.agent.prepare(None, reader.dense(), Memory.DRAM)
        remote = reader.agent.prepare(peer, source.dense(), Memory.DRAM)
        self.network.hang_reads("p")
        pages = (reader.address, source.address, PAGE_BYTES)
        read = SourceRead("p", local, remote, [pages], BoardCheck(view, 7))
        self.transfers.submit("r", [read], deadline=10.0)
        self.now, self.given = 0.0, []

    def poll(self, times=1):
        for _ in range(times):
            self.given += self.transfers.poll(self.now)

    def reach(self, state):
        if state == "ended":
            self.play("arrives")
        elif "checking" in state:
            # Two looks per read: the second look that ends the pages is the board's first.
            self.network.delay_reads(2)
            self.network.resume("p")
            self.poll(2)
            self.network.hang_reads("p")
            assert "checking=1" in repr(self.transfers)
        if "aborted" in state:
            self.transfers.abort("r")
        if state == "overdue":
            self.play("deadline")

    def play(self, event):
        if event == "abort":
            self.transfers.abort("r")
        elif event == "deadline":
            self.now = 10.0
        elif event == "lease ends":
            self.board.end(7)
            self.network.resume("p")
        elif event == "arrives":
            self.network.resume("p")
        elif event == "breaks":
            self.network.kill("p")
        self.poll(10)


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(TRANSFER_STATES, TRANSFER_EVENTS))
)
def test_transfer(state, event):
    load, expected = OneRead(), TRANSFER_CELLS[state, event]
    load.reach(state)
    assert len(load.given) == (state == "ended")
    load.given.clear()
    load.play(event)
    if expected in (WAITS, None):
        assert load.given == []
        assert load.transfers.in_flight == (expected is WAITS)
    else:
        (outcome,) = load.given
        assert (outcome.ok, outcome.reason) == (not expected, expected)
    if expected is WAITS:
        load.play("arrives")
        assert len(load.given) == 1
    assert (load.transfers.in_flight, load.agent.open_reads, load.boards.cells_used) == (0, 0, 0)


@pytest.mark.parametrize(
    ("cells", "states", "events"),
    [
        (PRODUCER_CELLS, PRODUCER_STATES, PRODUCER_EVENTS),
        (CONSUMER_CELLS, CONSUMER_STATES, CONSUMER_EVENTS),
        (TRANSFER_CELLS, TRANSFER_STATES, TRANSFER_EVENTS),
    ],
    ids=["producer", "consumer", "transfer"],
)
def test_no_cell_is_left_out(cells, states, events):
    assert set(cells) == set(itertools.product(states, events))
