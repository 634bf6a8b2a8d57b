"""A configured prefill engine, and a crowd of made-up ones at the same threads."""

import pytest
from connector_paces import A
from test_connector_meetings import LIMITS, Town

from hybridpd_connector.errors import SideChannelError
from hybridpd_connector.peer_state import PeerState
from hybridpd_connector.peers import Address


@pytest.fixture
def town():
    town = Town()
    yield town
    town.gate.set()
    town.meetings.close()
    town.book.close()


def test_an_engine_whose_name_is_configured_waits_for_no_made_up_one(town):
    """It does not answer the handshake yet, so nothing but its name speaks for it."""
    town.fits["a"] = SideChannelError("side channel", "an answer", "none in time")
    town.until(lambda: town.handshakes == [("a", A)])
    town.settle()
    del town.fits["a"]
    town.gate.clear()
    for number in range(6):
        address = Address(f"10.9.0.{number}", 5600)
        for _ in range(9):
            town.book.count_request(f"made-up-{number}")
        town.book.want(f"made-up-{number}", address, town.now)
    town.until(lambda: len(town.handshakes) == 3)  # both threads are taken
    town.now += LIMITS.longest_pause_seconds
    town.until(lambda: town.book.state("a", A) is PeerState.HANDSHAKING)
    town.gate.set()
    town.until(lambda: "a" in town.ready())
    assert ("a", A) in town.handshakes[3:5]
