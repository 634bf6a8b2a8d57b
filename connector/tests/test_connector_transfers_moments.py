"""Leases that end between any two calls of the agent: no load is good whose pages were given away.

Prefill writes the end of a lease to its board, and then other bytes into its pages, at every moment
there is: between two looks, within one, between the end of a read and the question to the board.
Bytes of a page arrive as late as can be, those of a board as early or as late as can be.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_connector_transfers import Fleet

from hybridpd_connector import lease_board
from hybridpd_connector.agent_api import ReadState
from hybridpd_connector.lease_board import BoardCheck
from hybridpd_testkit.agent_contract import PAGE_BYTES

LOADS = 5
OTHER = bytes([255]) * PAGE_BYTES
POLLS = 60

moves = st.one_of(
    st.just(("nothing", 0, 0)),
    st.tuples(st.just("end"), st.integers(0, 1), st.integers(0, LOADS - 1)),
    st.tuples(st.just("hang"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("resume"), st.integers(0, 1), st.just(0)),
)


class Play:
    """Loads 0, 1, ... of two sources; a script of what happens before each call of the agent."""

    def __init__(self, script, early_boards):
        self.fleet = Fleet()
        self.script = list(script)
        self.early_boards = list(early_boards)
        self.good_until = {}
        agent = self.fleet.consumer.agent
        self._poll, self._post_read = agent.poll, agent.post_read
        agent.poll, agent.post_read = self.poll, self.post_read

    def move(self):
        kind, source, number = self.script.pop(0) if self.script else ("nothing", 0, 0)
        name = f"p{source}"
        if kind == "end":
            self.fleet.boards[source].end(number + 1)
            self.fleet.producers[source].write(self.page(source, number) + 1, OTHER)
        elif kind == "hang":
            self.fleet.network.hang_reads(name)
        elif kind == "resume":
            self.fleet.network.resume(name)

    def poll(self, read):
        self.move()
        state = self._poll(read)
        self.move()
        return state

    def post_read(self, *arguments):
        """Only boards are read by ids."""
        self.move()
        read = self._post_read(*arguments)
        if self.early_boards and self.early_boards.pop(0):
            # Its bytes are here at once, and its end is seen later.
            network = self.fleet.network
            hanging, network.hanging = network.hanging, set()
            polls, network.read_polls = network.read_polls, 1
            assert self._poll(read) is ReadState.DONE
            network.hanging, network.read_polls = hanging, polls
        self.move()
        return read

    @staticmethod
    def page(source, number):
        return 2 * number + source

    def submit(self, number):
        sources = [
            self.fleet.source(source, self.page(source, number))._replace(
                check=BoardCheck(self.fleet.views[source], number + 1)
            )
            for source in (0, 1)
        ]
        self.fleet.transfers.submit(str(number), sources, deadline=1000.0)

    def require_right(self, outcome):
        """What has arrived for a good load is what its prefill had computed."""
        for source in (0, 1):
            page = self.page(source, int(outcome.request))
            pristine = Fleet(sources=1).producers[0].page(page + 1)
            assert self.fleet.consumer.page(page) == pristine


@given(
    script=st.lists(moves, max_size=60),
    early_boards=st.lists(st.booleans(), max_size=12),
    submits=st.lists(st.integers(0, 2), min_size=LOADS, max_size=LOADS),
    delay=st.integers(1, 4),
    together=st.sampled_from([1, 2, 256]),
)
def test_no_load_is_good_whose_pages_were_given_away(
    script, early_boards, submits, delay, together
):
    play = Play(script, early_boards)
    play.fleet.network.delay_reads(delay)
    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease_board, "MAX_TOGETHER", together)
        for number, looks in enumerate(submits):
            play.submit(number)
            for _ in range(looks):
                outcomes += play.fleet.transfers.poll(0.0)
        for _ in range(POLLS):
            outcomes += play.fleet.transfers.poll(0.0)
        play.script.clear()
        for peer in ("p0", "p1"):
            play.fleet.network.resume(peer)
        outcomes += play.fleet.drain()
    assert sorted(outcome.request for outcome in outcomes) == [str(n) for n in range(LOADS)]
    for outcome in outcomes:
        if outcome.ok:
            play.require_right(outcome)
    play.fleet.assert_idle()


def test_loads_of_one_question_end_apart_when_one_is_late_or_unwanted():
    play = Play([], [])
    fleet = play.fleet
    fleet.network.delay_reads(2)
    for number, deadline in enumerate((5.0, 1000.0, 1000.0)):
        check = BoardCheck(fleet.views[0], number + 1)
        fleet.transfers.submit(
            str(number), [fleet.source(0, number)._replace(check=check)], deadline
        )
    assert fleet.transfers.poll(0.0) == fleet.transfers.poll(1.0) == []
    fleet.network.hang_reads("p0")
    assert repr(fleet.transfers) == "Transfers(loads=3, reading=0, checking=3)"
    fleet.transfers.abort("1")
    assert fleet.transfers.poll(6.0) == []
    assert fleet.transfers.overdue(6.0) == ("p0",)
    assert fleet.transfers.busy("p0")
    fleet.network.resume("p0")
    reasons = {outcome.request: outcome.reason for outcome in fleet.drain(now=7.0)}
    assert reasons == {"0": "deadline", "1": "aborted", "2": ""}
    fleet.assert_idle()
