"""The side channel with keys, over real sockets: who gets in, who does not, and what is said."""

import logging
import os
import pickle
import socket
import threading
import time

import pytest
import zmq
from connector_sockets import HOST, SOON, free_port
from zmq.utils import z85

from hybridpd_connector import side_channel
from hybridpd_connector.errors import SideChannelError, SideChannelKeyError
from hybridpd_connector.side_channel import Server
from hybridpd_connector.side_channel_client import Client
from hybridpd_connector.side_channel_guard import KEY_ON_ONE_SIDE, WRONG_KEY
from hybridpd_connector.side_channel_keys import (
    KeyFile,
    derive,
    tell_about_keys,
)

OLD = "YV9maXJzdF9zZWNyZXRfZm9yX3Rlc3RzXzAxMjM0NTY="
NEW = "c2Vjb25kX3NlY3JldF9mb3JfdGVzdHNfMDEyMzQ1Njc="
OTHER = "dGhpcmRfc2VjcmV0X2Zvcl90ZXN0c18wMTIzNDU2Nzg="


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(side_channel, "_LOOK_MILLISECONDS", 20)


@pytest.fixture
def serve():
    servers = []

    def serve(path=None):
        port = free_port()
        keys = KeyFile(path) if path else None
        server = Server(HOST, port, lambda question: b"answer to " + question, keys)
        servers.append(server)
        return server, port

    yield serve
    for server in servers:
        server.close()


@pytest.fixture
def ask():
    clients = []

    def ask(port, path=None, timeout_seconds=SOON):
        client = Client(keys=KeyFile(path) if path else None)
        clients.append(client)
        return client.ask(HOST, port, b"x", timeout_seconds)

    yield ask
    for client in clients:
        client.close()


def refused(server):
    """Refusals by reason, once there is one."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        taken = server.take_refused()
        if taken:
            return taken
        time.sleep(0.01)
    return {}


# --- who gets in ----------------------------------------------------------------------------------


def test_the_same_file_lets_in(serve, ask, write_keys):
    path = write_keys("key", OLD)
    server, port = serve(path)
    assert ask(port, path) == b"answer to x"
    assert server.take_refused() == {}


def test_another_key_is_refused_and_counted(serve, ask, write_keys):
    server, port = serve(write_keys("p", OLD))
    with pytest.raises(SideChannelKeyError, match="keys differ"):
        ask(port, write_keys("d", OTHER))
    assert refused(server) == {WRONG_KEY: 1}
    assert server.take_refused() == {}


def test_a_client_without_a_key_is_refused_and_counted(serve, ask, write_keys):
    server, port = serve(write_keys("p", OLD))
    with pytest.raises(SideChannelError, match=r"none here and one at|does it ask for a key"):
        ask(port, timeout_seconds=1.0)
    counted = refused(server)
    assert counted
    assert set(counted) <= {KEY_ON_ONE_SIDE, "unfinished"}


def test_a_client_with_a_key_does_not_talk_to_a_server_without(serve, ask, write_keys):
    server, port = serve()
    with pytest.raises(SideChannelKeyError, match=r"one here and none at|uses none"):
        ask(port, write_keys("d", OLD))
    assert refused(server)


def test_knowing_the_servers_public_key_is_not_enough(serve, write_keys):
    """The stranger has a key pair of its own and the right public key of the server."""
    server, port = serve(write_keys("p", OLD))
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.curve_publickey, stranger.curve_secretkey = public, secret
        stranger.curve_serverkey = zmq.curve_public(z85.encode(derive(OLD.encode()).server))
        stranger.connect(f"tcp://{HOST}:{port}")
        stranger.send(b"x")
        assert not stranger.poll(300)
    assert refused(server)[WRONG_KEY] >= 1


def test_the_servers_own_key_is_no_clients_key(serve, write_keys):
    server, port = serve(write_keys("p", OLD))
    key = z85.encode(derive(OLD.encode()).server)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_public(key), key
        stranger.curve_serverkey = zmq.curve_public(key)
        stranger.connect(f"tcp://{HOST}:{port}")
        stranger.send(b"x")
        assert not stranger.poll(300)
    assert refused(server)[WRONG_KEY] >= 1


def test_a_refused_client_leaves_no_connection_behind(serve, ask, write_keys):
    """libzmq would come back for ever, were its socket still there."""
    server, port = serve(write_keys("p", OLD))
    with pytest.raises(SideChannelKeyError):
        ask(port, write_keys("d", OTHER))
    assert refused(server)
    time.sleep(0.7)
    assert server.take_refused() == {}
    assert server.connections == 0


def test_no_descriptor_is_left_after_refusals(serve, write_keys):
    _, port = serve(write_keys("p", OLD))
    client = Client(keys=KeyFile(write_keys("d", OTHER)))

    def descriptors_after_one_more():
        with pytest.raises(SideChannelKeyError):
            client.ask(HOST, port, b"x", SOON)
        time.sleep(0.05)
        return len(os.listdir("/proc/self/fd"))

    before = descriptors_after_one_more()
    for _ in range(30):
        after = descriptors_after_one_more()
    # A socket that is being closed may still be there.
    assert after <= before + 6
    client.close()


def test_a_silent_server_is_given_up_in_time_with_a_key_too(ask, write_keys):
    with pytest.raises(SideChannelError, match="none in time"):
        ask(free_port(), write_keys("d", OLD, NEW), 0.3)


def test_nothing_readable_crosses_the_wire(serve, write_keys):
    """A relay between the two sees neither question nor answer, nor the secret."""
    path = write_keys("key", OLD)
    _, port = serve(path)
    seen = bytearray()
    listener = socket.create_server((HOST, 0))

    def relay(source, target):
        while data := source.recv(65536):
            seen.extend(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def run():
        near, _ = listener.accept()
        with near, socket.create_connection((HOST, port)) as far:
            threads = [
                threading.Thread(target=relay, args=pair) for pair in ((near, far), (far, near))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    thread = threading.Thread(target=run)
    thread.start()
    client = Client(keys=KeyFile(path))
    question = b"question that must not be seen"
    answer = client.ask(HOST, listener.getsockname()[1], question, SOON)
    client.close()
    thread.join()
    listener.close()
    assert answer == b"answer to " + question
    assert len(seen) > len(question)
    for plain in (question, b"answer to", OLD.encode()):
        assert plain not in seen


# --- rotation -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_p", "on_d"),
    [
        ([OLD], [OLD, NEW]),
        ([OLD, NEW], [OLD]),
        ([OLD, NEW], [NEW, OLD]),
        ([NEW, OLD], [OLD, NEW]),
        ([NEW], [NEW, OLD]),
        ([NEW, OLD], [NEW]),
    ],
)
def test_every_state_of_a_rotation_works(serve, ask, write_keys, on_p, on_d):
    _, port = serve(write_keys("p", *on_p))
    assert ask(port, write_keys("d", *on_d)) == b"answer to x"


def test_a_rotation_needs_no_restart(serve, write_keys):
    """Both files change step by step, in different order, while the two sides run."""
    p, d = write_keys("p", OLD), write_keys("d", OLD)
    server, port = serve(p)
    client = Client(keys=KeyFile(d))
    for name, secrets in (
        ("p", (OLD, NEW)),
        ("d", (OLD, NEW)),
        ("d", (NEW, OLD)),
        ("p", (NEW, OLD)),
        ("p", (NEW,)),
        ("d", (NEW,)),
    ):
        write_keys(name, *secrets)
        assert answered(client, port), (name, secrets)
    client.close()
    assert server.alive


def test_a_key_that_was_taken_out_lets_in_no_more(serve, ask, write_keys):
    p, d = write_keys("p", OLD, OTHER), write_keys("d", OLD)
    server, port = serve(p)
    assert ask(port, d) == b"answer to x"
    write_keys("p", OTHER)
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        try:
            ask(port, d)
        except SideChannelKeyError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the old key still lets in")
    assert ask(port, write_keys("d2", OTHER)) == b"answer to x"
    assert server.alive


def test_a_connection_made_with_a_key_ends_when_the_key_is_taken_out(serve, write_keys):
    """Who has a leaked key must not keep a connection and go on asking."""
    p = write_keys("p", NEW, OLD)
    _, port = serve(p)
    leaked = z85.encode(derive(OLD.encode()).client)
    ours = z85.encode(derive(NEW.encode()).server)
    with zmq.Context() as context, context.socket(zmq.DEALER) as held:
        held.linger = 0
        held.curve_secretkey, held.curve_publickey = leaked, zmq.curve_public(leaked)
        held.curve_serverkey = zmq.curve_public(ours)
        held.connect(f"tcp://{HOST}:{port}")
        held.send(b"x")
        assert held.poll(SOON * 1000)
        assert held.recv() == b"answer to x"
        write_keys("p", NEW)
        deadline = time.monotonic() + SOON
        refused_at_last = False
        while not refused_at_last and time.monotonic() < deadline:
            held.send(b"again")
            refused_at_last = not held.poll(200)
            if not refused_at_last:
                held.recv()
        assert refused_at_last


def answered(client, port):
    """Within ``SOON``: a server that takes over its new key listens anew."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        try:
            return client.ask(HOST, port, b"x", 1.0) == b"answer to x"
        except SideChannelError:
            time.sleep(0.05)
    return False


# --- what is shown --------------------------------------------------------------------------------


def test_secrets_and_keys_are_nowhere_to_be_seen(serve, ask, write_keys, caplog):
    caplog.set_level(logging.DEBUG)
    path = write_keys("p", OLD, NEW)
    server, port = serve(path)
    keys = KeyFile(path)
    client = Client(keys=keys)
    tell_about_keys(keys)
    shown = [repr(keys), repr(server), repr(client), repr(keys.current()), str(keys.current()[0])]
    with pytest.raises(SideChannelKeyError) as caught:
        ask(port, write_keys("d", OTHER))
    shown += [str(caught.value), repr(caught.value), repr(pickle.dumps(caught.value))]
    assert refused(server)
    write_keys("p", NEW)
    assert answered(client, port)
    client.close()
    text = "\n".join([*shown, caplog.text])
    for secret in (OLD, NEW, OTHER):
        key = derive(secret.encode())
        assert secret not in text
        for private in (key.server, key.client):
            assert private.hex() not in text
            assert repr(private) not in text
            assert z85.encode(private).decode() not in text
    assert derive(OLD.encode()).name in text
