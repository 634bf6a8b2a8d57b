"""The wire itself: it cuts, delays, loses and slows packets, and is whole again afterwards."""

import contextlib
import socket
import time

import pytest

from hybridpd_testkit.processes import inside_namespace
from hybridpd_testkit.relay import Weather

PORT = 9999
PACKETS = 60


@pytest.fixture
def ends(wire):
    """A socket of the prefill host, and one of the decode host that listens."""
    with contextlib.ExitStack() as stack:
        with inside_namespace(wire.prefill.namespace):
            sender = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        with inside_namespace(wire.decode.namespace):
            receiver = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        receiver.bind((wire.decode.data, PORT))
        receiver.settimeout(1.0)
        sender.connect(receiver.getsockname())
        yield sender, receiver
        wire.calm()


def arrived(ends, count, size=100):
    """Send ``count`` packets; how many came, and the seconds until the first was here."""
    sender, receiver = ends
    started = time.monotonic()
    for _ in range(count):
        sender.send(bytes(size))
    came, first = 0, None
    with contextlib.suppress(TimeoutError):
        while came < count:
            receiver.recv(65536)
            came += 1
            first = first or time.monotonic() - started
    return came, first


def test_chaos_network_is_whole_at_first(ends):
    assert arrived(ends, PACKETS)[0] == PACKETS


def test_chaos_network_cut_and_mended(wire, ends):
    wire.cut()
    with contextlib.suppress(OSError):
        assert arrived(ends, 5)[0] == 0
    wire.mend()
    arrived(ends, 1)  # the hosts look for each other's hardware address again
    assert arrived(ends, PACKETS)[0] == PACKETS


def test_chaos_network_delays_and_loses_by_its_seed(wire, ends):
    relay = wire.weather(Weather(0.2, 0.3, seed=7))
    came, first = arrived(ends, PACKETS)
    assert first >= 0.2
    assert 0 < relay.lost < PACKETS
    assert came == PACKETS - relay.lost
    wire.calm()
    assert arrived(ends, PACKETS)[0] == PACKETS


def test_chaos_network_slowed(wire, ends):
    """A megabit a second: what does not fit into the short queue is lost, as on a real link."""
    wire.throttle(1000)
    assert 0 < arrived(ends, PACKETS, size=1000)[0] < PACKETS
    wire.calm()
    assert arrived(ends, PACKETS, size=1000)[0] == PACKETS
