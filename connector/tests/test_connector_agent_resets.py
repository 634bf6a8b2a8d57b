"""Connections that hear no reset, on plain sockets; and which sockets are found to be told so."""

import contextlib
import errno
import socket
import struct
import time
import types

import pytest

from hybridpd_connector import agent, agent_readers, agent_resets
from hybridpd_connector.agent_readers import outlive_readers
from hybridpd_connector.agent_resets import (
    SILENCE_SECONDS,
    accepting_inodes,
    ignore_resets,
    listening_sockets,
)

NOT_TIMED_SECONDS = 30.0
RESET_AT_CLOSE = struct.pack("ii", 1, 0)


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def connected(listening):
    client = socket.create_connection(listening.getsockname())
    server, _ = listening.accept()
    return client, server


def descriptors():
    return {descriptor for descriptor, _ in listening_sockets()}


def reset(client):
    """Close as a dead process does that had bytes to read: by a reset, without a last byte."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
    client.close()


def sends(server, seconds):
    """Send until it fails, for so long; the error it failed with."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            server.send(b"answer")
        except OSError as error:
            return error.errno
        time.sleep(0.02)
    return None


def test_a_reset_is_heard_by_others(listening):
    client, server = connected(listening)
    with server:
        reset(client)
        assert sends(server, NOT_TIMED_SECONDS) in (errno.ECONNRESET, errno.EPIPE)


def test_a_reset_is_not_heard(listening):
    ignore_resets([listening.fileno()], SILENCE_SECONDS)
    client, server = connected(listening)
    with server:
        client.send(b"request")
        reset(client)
        # Every packet is answered with another reset.
        assert sends(server, 0.5) is None
        assert server.recv(100) == b"request"


def test_a_last_byte_is_heard(listening):
    ignore_resets([listening.fileno()], SILENCE_SECONDS)
    client, server = connected(listening)
    with server:
        client.send(b"request")
        client.close()
        assert server.recv(100) == b"request"
        assert server.recv(100) == b""


@pytest.mark.parametrize("says", [b"answer", b""])
def test_silence_ends_a_connection(listening, says):
    """Whether bytes are on their way or nobody has anything to say."""
    ignore_resets([listening.fileno()], silence_seconds=1)
    client, server = connected(listening)
    with server:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        server.settimeout(NOT_TIMED_SECONDS)
        reset(client)
        server.send(says)
        with pytest.raises(OSError, match=os_error(errno.ETIMEDOUT)):
            server.recv(100)


def os_error(number):
    return rf"\[Errno {number}\]"


def test_accepted_connections_inherit_it(listening):
    ignore_resets([listening.fileno()], SILENCE_SECONDS)
    client, server = connected(listening)
    with client, server:
        silence = server.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert silence == SILENCE_SECONDS * 1000
        assert server.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        # Nothing else is kept away.
        client.send(b"request")
        assert server.recv(100) == b"request"
        server.send(b"answer")
        assert client.recv(100) == b"answer"


def test_only_sockets_that_accept_are_found(listening):
    client, server = connected(listening)
    with client, server, socket.socket() as fresh, socket.create_server(("127.0.0.1", 0)) as more:
        found = descriptors()
        assert {listening.fileno(), more.fileno()} <= found
        assert not found & {client.fileno(), server.fileno(), fresh.fileno()}


def test_a_table_of_sockets_is_read():
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  "
        "timeout inode\n"
        "   0: 0100007F:D431 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0"
        "        0 4711 1 ffff 100 0 0 10 0\n"
        "   1: 0100007F:D431 0100007F:1234 01 00000000:00000000 00:00000000 00000000     0"
        "        0 4712 1 ffff 100 0 0 10 0\n"
    )
    assert accepting_inodes(table) == {"socket:[4711]"}
    assert accepting_inodes("") == accepting_inodes("title\n\n  0: 1 2 0A\n") == set()


@pytest.mark.parametrize(("missing", "shown"), [("_TABLE", False), ("_TABLE_6", True)])
def test_only_ipv6_may_be_missing(monkeypatch, tmp_path, listening, missing, shown):
    monkeypatch.setattr(agent_resets, missing, tmp_path / "none")
    if shown:
        assert listening.fileno() in descriptors()
    else:
        with pytest.raises(FileNotFoundError):
            listening_sockets()


def test_a_socket_that_is_none_is_refused():
    with pytest.raises(OSError, match=os_error(errno.EBADF)):
        ignore_resets([1 << 20], SILENCE_SECONDS)


@contextlib.contextmanager
def watched(monkeypatch, left=(), error=None):
    """What ``outlive_readers`` tells to ignore resets, without any UCX."""
    told = []

    def ignore(sockets, silence_seconds):
        if error is not None:
            raise error
        assert silence_seconds == 240
        told.append(sockets)

    monkeypatch.setattr(agent_readers, "leave_out_deregistration", lambda: list(left))
    monkeypatch.setattr(agent_readers, "ignore_resets", ignore)
    yield told


def test_sockets_of_the_agent_are_told_and_no_others(monkeypatch, listening, caplog):
    with watched(monkeypatch) as told:
        with outlive_readers(240):
            agents = socket.create_server(("127.0.0.1", 0))
        with agents:
            assert told == [[agents.fileno()]]
    assert not caplog.records


def test_a_socket_of_the_agent_may_have_the_number_of_one_that_was_closed(monkeypatch):
    other = socket.create_server(("127.0.0.1", 0))
    number = other.fileno()
    with watched(monkeypatch) as told:
        with outlive_readers(240):
            other.close()
            agents = socket.create_server(("127.0.0.1", 0))
        with agents:
            assert agents.fileno() == number
            assert told == [[number]]


def test_nothing_is_done_for_an_agent_that_answers_nobody(monkeypatch):
    with watched(monkeypatch, left=["never asked"], error=OSError("never tried")) as told:
        with outlive_readers(0):
            pass
        assert told == []


def test_what_cannot_be_done_is_said(monkeypatch, caplog):
    with (
        watched(monkeypatch, ["/lib/libucp.so: why"], OSError("not allowed")),
        outlive_readers(240),
    ):
        pass
    (record,) = caplog.records
    assert "/lib/libucp.so: why; no socket filter: not allowed" in record.getMessage()


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "hidden"), ValueError("hidden")], ids=repr
)
@pytest.mark.parametrize("name", ["listening_sockets", "leave_out_deregistration"])
def test_a_system_that_shows_nothing_is_no_reason_not_to_start(monkeypatch, caplog, name, error):
    def hidden():
        raise error

    with watched(monkeypatch) as told:
        monkeypatch.setattr(agent_readers, name, hidden)
        with outlive_readers(240):
            pass
    (record,) = caplog.records
    assert "hidden" in record.getMessage()
    assert told == ([] if name == "listening_sockets" else [[]])


@pytest.mark.parametrize(
    ("asked", "done"), [({}, True), ({"outlives": 240}, True), ({"outlives": 0}, False)]
)
def test_it_can_be_turned_off(monkeypatch, asked, done):
    """Nothing is even looked at then."""
    looked = []
    nixl = types.SimpleNamespace(
        nixlBind=types.SimpleNamespace(nixlAgent=None),
        nixl_agent_config=lambda **settings: settings,
        nixl_agent=lambda name, config: type("Agent", (), {"backends": {"UCX": None}})(),
    )
    monkeypatch.setattr(agent, "load_nixl", lambda: nixl)
    monkeypatch.setattr(agent_readers, "listening_sockets", lambda: looked.append("tcp") or set())
    monkeypatch.setattr(
        agent_readers, "leave_out_deregistration", lambda: looked.append("ucx") or []
    )
    agent.NixlAgent("p/0", progress_thread=True, **asked)
    assert looked == (["tcp", "ucx", "tcp"] if done else [])
    agent.NixlAgent("d/0", **asked)
    assert len(looked) == 3 * done
