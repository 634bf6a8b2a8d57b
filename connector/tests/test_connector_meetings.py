"""Prefill engines are met before a request names them: with the real peer book and its threads, a
clock that the tests own, and a town that says who lives where.

Left out: engines with both halves (``test_connector_first_contact``).
"""

import logging
import socket
import threading
import time

import pytest
from connector_paces import PACE, A, B

from hybridpd_connector import meetings
from hybridpd_connector.errors import (
    RefusedError,
    SideChannelError,
    SideChannelKeyError,
    VersionError,
)
from hybridpd_connector.meetings import LEFT_IDLE_SECONDS, Meetings, look_up_host
from hybridpd_connector.named_peers import MAX_ADDRESSES, parse_names
from hybridpd_connector.peer_state import PeerState
from hybridpd_connector.peers import Address, PeerLimits, PeerManager

LIMITS = PeerLimits(first_pause_seconds=1.0, refused_pause_seconds=30.0, idle_seconds=600.0)
NOBODY = SideChannelError("side channel", "an answer", "none in time")


class Town:
    """Who lives where, one rank's book, and what it was asked to do."""

    def __init__(self, *names, is_ours=lambda engine_id: False):
        self.now = 0.0
        self.names = {"p": [A.host]}
        self.lives = {A: "a"}
        self.fits = {}
        self.questions, self.handshakes, self.given_back = [], [], []
        self.gate = threading.Event()
        self.gate.set()
        self.book = PeerManager(self._shake_hands, self._give_back, LIMITS, workers=2)
        self.meetings = Meetings(
            parse_names(names or ["p:5600"]), self._ask, is_ours, self._look_up, PACE
        )
        self.meetings.begin()

    def _look_up(self, host):
        found = self.names[host]
        if isinstance(found, Exception):
            raise found
        return found

    def _ask(self, address):
        self.questions.append(address)
        found = self.lives.get(address, NOBODY)
        if isinstance(found, Exception):
            raise found
        return found

    def _shake_hands(self, engine_id, address):
        self.handshakes.append((engine_id, address))
        assert self.gate.wait(10)
        if self.lives.get(address) != engine_id:
            raise RefusedError("engine_id", engine_id, self.lives.get(address))
        if engine_id in self.fits:
            raise self.fits[engine_id]
        return f"link to {engine_id}"

    def _give_back(self, link):
        self.given_back.append(link)
        return True

    def step(self):
        self.book.collect(self.now)
        self.meetings.tick(self.now)
        self.meetings.attend(self.book, self.now)

    def settle(self):
        """Let threads end what they do at this moment of the clock."""
        for _ in range(40):
            self.step()
            rounds = self.meetings._rounds
            looking = any(host.looking for host in rounds._hosts.values())
            if not looking and not any(rounds.addresses().values()) and not self.book._pool.running:
                return
            time.sleep(0.001)

    def wait(self, seconds, step=0.5):
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + step)
            self.settle()

    def ready(self):
        return self.book.ready()

    def until(self, condition):
        for _ in range(2000):
            self.step()
            if condition():
                return
            time.sleep(0.002)
        raise AssertionError(f"not reached: {self.meetings!r} {self.book!r}")


@pytest.fixture
def town(request):
    town = Town(*getattr(request, "param", ()))
    yield town
    town.gate.set()
    town.meetings.close()
    town.book.close()


def test_an_engine_is_met_before_anybody_wants_it(town, caplog):
    caplog.set_level(logging.INFO)
    town.until(lambda: town.ready() == {"a": "link to a"})
    assert town.handshakes == [("a", A)]
    verdict = town.book.want("a", A, town.now)
    assert (verdict.state, verdict.attempt) == (PeerState.READY, None)
    town.settle()
    assert caplog.text.count("engine a at 10.0.0.1:5600 is met ahead of requests") == 1


def test_nothing_is_met_before_the_engine_has_warmed_up():
    town = Town()
    early = Meetings(parse_names(["p:5600"]), town._ask, look_up=town._look_up, pace=PACE)
    for _ in range(5):
        early.tick(0.0)
        early.attend(town.book, 0.0)
    assert (town.questions, town.handshakes, repr(early)) == (
        [], [], "Meetings(Rounds(names=1, addresses=0, known=0), held=0)"
    )  # fmt: skip
    town.book.close()


def test_a_request_that_comes_during_the_handshake_does_not_begin_a_second_one(town):
    town.gate.clear()
    town.until(lambda: town.handshakes)
    verdict = town.book.want("a", A, town.now)
    assert (verdict.state, verdict.attempt) == (PeerState.HANDSHAKING, None)
    town.gate.set()
    town.until(town.ready)
    assert town.handshakes == [("a", A)]


def test_a_request_that_comes_during_the_question_begins_the_only_handshake(town, caplog):
    caplog.set_level(logging.INFO)
    assert town.book.want("a", A, town.now).attempt is not None
    town.until(lambda: town.ready() and town.questions)
    town.settle()
    assert town.handshakes == [("a", A)]
    assert "ahead of requests" not in caplog.text


def test_a_met_engine_is_never_idle_while_it_answers(town):
    town.until(town.ready)
    for _ in range(10):
        town.wait(100, step=5)
    assert town.ready() == {"a": "link to a"}
    assert len(town.handshakes) == 1


def test_an_engine_that_answers_no_longer_goes_when_it_was_idle_for_long(town):
    town.until(town.ready)
    del town.lives[A]
    town.wait(500, step=10)
    assert town.ready(), "a link may well outlive the side channel"
    town.wait(120, step=10)
    assert town.ready() == {}
    assert town.given_back == ["link to a"]
    assert len(town.handshakes) == 1, "hands are only shaken with who answers"


def test_an_engine_that_leaves_the_name_goes_soon_after_its_last_use(town):
    town.until(town.ready)
    town.names["p"] = []
    town.wait(40, step=5)
    town.book.touch("a", town.now)
    town.wait(LEFT_IDLE_SECONDS - 10, step=10)
    assert town.ready(), "somebody has just used it"
    town.wait(20, step=10)
    assert town.ready() == {}


def test_an_engine_that_was_restarted_is_met_again_at_the_same_address(town):
    town.until(town.ready)
    town.lives[A] = "a, again"
    town.wait(12, step=1)
    assert town.ready() == {"a, again": "link to a, again"}
    assert town.given_back == ["link to a"]


def test_an_engine_that_was_restarted_elsewhere_is_met_there(town):
    town.until(town.ready)
    town.lives = {B: "b"}
    town.names["p"] = [B.host]
    town.wait(32, step=1)
    assert town.ready()["b"] == "link to b"
    town.wait(90, step=10)
    assert set(town.ready()) == {"b"}


def test_an_engine_whose_link_broke_is_met_again_within_seconds(town):
    town.until(town.ready)
    town.book.lost("a", "a read failed")
    assert town.ready() == {}
    town.wait(3)
    assert town.ready() == {"a": "link to a"}
    assert town.handshakes == [("a", A)] * 2


def test_a_dead_engine_is_not_shaken_hands_with(town):
    town.until(town.ready)
    del town.lives[A]
    town.book.lost("a", "a read failed")
    town.wait(60, step=1)
    assert town.handshakes == [("a", A)]
    assert town.book.counts()["handshaking"] == town.book.counts()["backing_off"] == 0
    assert 5 <= len(town.questions) <= 15
    town.lives[A] = "a, again"
    town.wait(9, step=1)
    assert set(town.ready()) == {"a, again"}


def test_decode_starts_before_prefill_and_says_so_once(town, caplog):
    caplog.set_level(logging.INFO)
    town.lives = {}
    town.names["p"] = []
    town.wait(20, step=1)
    town.names["p"] = [A.host]
    town.wait(40, step=1)
    town.lives[A] = RefusedError("engine", "ready", "starting", retryable=True)
    town.wait(20, step=1)
    town.lives[A] = "a"
    town.wait(10, step=1)
    assert town.ready() == {"a": "link to a"}
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert {level for level, _ in told} == {"INFO"}
    assert len(told) <= 4
    assert len({text for _, text in told}) == len(told)


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (VersionError("handshake answer version", "1", 2), "WARNING"),
        (SideChannelKeyError("side channel key", "one that fits", "refused"), "WARNING"),
        (RefusedError("question", "a known one", "this one"), "WARNING"),
        (ZeroDivisionError("a fault"), "WARNING"),
        (NOBODY, "INFO"),
    ],
    ids=["version", "key", "refused", "fault", "nobody"],
)
def test_what_will_not_mend_itself_is_a_warning_once(town, caplog, error, level):
    caplog.set_level(logging.INFO)
    town.lives[A] = error
    town.wait(60, step=2)
    (record,) = [r for r in caplog.records if "10.0.0.1:5600" in r.getMessage()]
    assert record.levelname == level
    assert str(error) in record.getMessage()
    assert town.handshakes == []


def test_an_engine_that_does_not_fit_is_refused_once_and_stays_counted(town, caplog):
    town.fits["a"] = RefusedError("layout", "an engine that fits this one", "1 differences")
    town.wait(900, step=5)
    assert town.handshakes == [("a", A)]
    assert caplog.text.count("an engine that fits this one") == 1
    assert town.book.counts()["refused"] == 1
    town.fits.clear()
    town.lives[A] = "a, with another layout"
    town.wait(12, step=1)
    assert set(town.ready()) == {"a, with another layout"}
    assert town.book.counts()["refused"] == 0


def test_a_refusal_at_a_made_up_address_keeps_nobody_from_being_met(town):
    town.lives[B] = "b"
    town.book.want("a", B, town.now)
    town.names["p"] = []
    town.until(lambda: town.book.state("a", B) is PeerState.REFUSED)
    town.names["p"] = [A.host]
    town.wait(6, step=1)
    assert set(town.ready()) == {"a"}


def test_a_refusal_elsewhere_between_two_looks_is_not_taken_for_one_of_its_own(town):
    town.until(town.ready)
    town.settle()
    town.lives[B] = "b"
    town.book.lost("a", "a read failed")
    town.book.want("a", B, town.now)
    for _ in range(2000):
        town.book.collect(town.now)
        if town.book.counts()["refused"]:
            break
        time.sleep(0.002)
    assert town.book.state("a", B) is PeerState.REFUSED
    town.wait(40, step=1)
    assert set(town.ready()) == {"a"}


def test_a_handshake_that_fails_is_tried_again_with_the_pauses_of_the_book(town):
    town.fits["a"] = SideChannelError("agent", "a connection", "none")
    town.wait(60, step=0.5)
    assert 5 <= len(town.handshakes) <= 7
    town.fits.clear()
    town.wait(31, step=1)
    assert set(town.ready()) == {"a"}


@pytest.mark.parametrize("town", [["p:5600", "q:5600-5601"]], indirect=True)
def test_all_engines_of_all_names_are_met_and_a_dead_one_delays_nobody(town):
    town.names = {"p": [A.host, B.host], "q": ["10.0.0.3", "10.0.0.4"]}
    town.lives = {A: "a", Address("10.0.0.3", 5600): "c0", Address("10.0.0.3", 5601): "c1"}
    town.until(lambda: set(town.ready()) == {"a", "c0", "c1"})


def test_lookups_that_fail_or_hang_change_nothing(town, caplog):
    caplog.set_level(logging.INFO)
    town.until(town.ready)
    town.names["p"] = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    def told():
        return [r.levelname for r in caplog.records if "cannot be looked up" in r.getMessage()]

    town.wait(40, step=5)
    assert told() == ["INFO"]
    town.wait(300, step=5)
    assert told() == ["INFO", "WARNING"]
    assert town.ready()
    stuck = threading.Event()
    town.meetings._look_up = lambda host: stuck.wait(20) and []
    before = threading.active_count()
    town.wait(100, step=5)
    assert town.ready()
    assert threading.active_count() <= before + 1, "one lookup of a host at a time"
    stuck.set()


def test_more_addresses_than_are_met_are_said_once(town, caplog):
    town.names["p"] = [f"10.1.{i // 250}.{i % 250}" for i in range(MAX_ADDRESSES + 7)]
    town.wait(60, step=10)
    assert caplog.text.count("has 7 addresses more than") == 1


def test_an_engine_does_not_meet_itself():
    town = Town(is_ours=lambda engine_id: engine_id == "a")
    town.names["p"] = [A.host, B.host]
    town.lives[B] = "b"
    town.wait(30, step=1)
    assert set(town.ready()) == {"b"}
    assert town.handshakes == [("b", B)]
    town.lives[A] = "c"
    town.wait(12, step=1)
    assert set(town.ready()) == {"b", "c"}
    town.meetings.close()
    town.book.close()


def test_closing_starts_nothing_any_more(town):
    town.until(town.ready)
    town.meetings.close()
    town.meetings.close()
    asked = len(town.questions)
    town.wait(60, step=5)
    assert len(town.questions) == asked


def test_hosts_are_looked_up_by_the_system(monkeypatch):
    assert look_up_host("127.0.0.1") == ("127.0.0.1",)
    assert look_up_host("::1") == ("::1",)
    for number, expected in ((socket.EAI_NONAME, ()), (socket.EAI_NODATA, ())):

        def refuse(*arguments, number=number, **named):
            raise socket.gaierror(number, "no such name")

        monkeypatch.setattr(meetings.socket, "getaddrinfo", refuse)
        assert look_up_host("nobody.invalid") == expected

    def fail(*arguments, **named):
        raise socket.gaierror(socket.EAI_AGAIN, "try later")

    monkeypatch.setattr(meetings.socket, "getaddrinfo", fail)
    with pytest.raises(OSError, match="try later"):
        look_up_host("p")
