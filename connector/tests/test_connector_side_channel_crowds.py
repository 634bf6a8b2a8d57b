"""A thousand strangers at the side channel, in a process of their own: the server still answers,
its descriptors are counted, and they fall back when the strangers have gone."""

import os
import random
import socket
import time

import pytest
from connector_sockets import HOST, free_port

from hybridpd_connector import side_channel
from hybridpd_connector.errors import SideChannelError
from hybridpd_connector.side_channel import Server, connection_bound
from hybridpd_connector.side_channel_client import Client
from hybridpd_connector.side_channel_guard import TOO_MANY
from hybridpd_connector.side_channel_keys import KeyFile
from hybridpd_testkit import strangers

SECRET = "YV9maXJzdF9zZWNyZXRfZm9yX3Rlc3RzXzAxMjM0NTY="
CROWD = 1000
PATIENCE = 60.0


@pytest.fixture(params=["with a key", "without a key"])
def keys(request, tmp_path):
    if request.param == "without a key":
        return None
    path = tmp_path / "key"
    path.write_text(SECRET)
    path.chmod(0o600)
    return KeyFile(str(path))


@pytest.fixture
def client(keys):
    client = Client(keys=keys)
    yield client
    client.close()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def falls_to(read, most):
    """The value once it is ``most`` or less, or the last one seen."""
    deadline = time.monotonic() + PATIENCE
    while (value := read()) > most and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def test_a_thousand_strangers_do_not_keep_a_good_client_out(keys, client):
    port = free_port()
    server = Server(HOST, port, lambda question: b"answer to " + question, keys)
    assert client.ask(HOST, port, b"before", PATIENCE) == b"answer to before"
    idle = descriptors()
    with strangers.started(HOST, port, CROWD) as crowd:
        assert client.ask(HOST, port, b"among them", PATIENCE) == b"answer to among them"
        most = descriptors()
        # One descriptor a connection, and nothing else: the pipe pair of the child is the rest.
        assert most <= idle + CROWD + 10
        crowd.kill()
        crowd.wait()
        assert falls_to(lambda: server.connections, 0) == 0
    assert falls_to(descriptors, idle) <= idle
    assert client.ask(HOST, port, b"after", PATIENCE) == b"answer to after"
    server.close()


def test_those_who_say_nothing_or_too_little_are_thrown_out(monkeypatch, keys, client):
    """They stay: it is the server that ends it."""
    monkeypatch.setattr(side_channel, "_CONNECT_MILLISECONDS", 500)
    port = free_port()
    server = Server(HOST, port, lambda question: question, keys)
    kinds = ["half_open", "one_byte_a_second", "greeting_only"]
    with strangers.started(HOST, port, 300, kinds) as crowd:
        assert falls_to(lambda: server.connections, 0) == 0
        assert crowd.poll() is None or crowd.returncode == 0
    assert server.take_refused()
    assert client.ask(HOST, port, b"x", PATIENCE) == b"x"
    server.close()


def test_random_bytes_after_any_part_of_a_greeting_change_nothing(keys, client):
    port = free_port()
    server = Server(HOST, port, lambda question: question, keys)
    good = strangers.GREETING + strangers.READY
    for seed in range(60):
        chooser = random.Random(seed)
        start = good[: chooser.randrange(len(good) + 1)]
        with socket.create_connection((HOST, port)) as stranger:
            stranger.sendall(start + chooser.randbytes(chooser.choice((1, 9, 64, 3000))))
    assert client.ask(HOST, port, b"x", PATIENCE) == b"x"
    assert falls_to(lambda: server.connections, 1) <= 1
    assert server.alive
    server.close()


def test_at_the_bound_everyone_is_put_out_and_the_next_is_served(keys, client):
    """The strangers never give up: whenever they are put out they come back, all together."""
    port = free_port()
    server = Server(HOST, port, lambda question: question, keys, max_connections=50)
    assert client.ask(HOST, port, b"x", PATIENCE) == b"x"
    before = descriptors()
    with strangers.started(HOST, port, 200, ["half_open"], again=True):
        assert too_many(server) >= 2 * 50
        assert answered(client, port)
    assert falls_to(descriptors, before) <= before
    server.close()


def too_many(server):
    """How many were put out, once it has happened twice."""
    put_out, times = 0, 0
    deadline = time.monotonic() + PATIENCE
    while times < 2 and time.monotonic() < deadline:
        taken = server.take_refused().get(TOO_MANY, 0)
        put_out += taken
        times += taken > 0
        time.sleep(0.01)
    return put_out


def answered(client, port):
    """As a peer manager asks: again, when the connection was closed in the handshake."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            return client.ask(HOST, port, b"x", 5.0) == b"x"
        except SideChannelError:
            time.sleep(0.05)
    return False


def test_the_bound_leaves_half_of_the_descriptors_to_the_engine(monkeypatch):
    for soft, bound in ((1024, 512), (65536, 4096), (1, 1), (-1, 4096)):
        monkeypatch.setattr(
            side_channel.resource, "getrlimit", lambda _, soft=soft: (soft, 1 << 20)
        )
        assert connection_bound() == bound
