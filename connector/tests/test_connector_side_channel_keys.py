"""The side channel with keys, over real sockets: who gets in, who does not, and what is said."""

import logging
import os
import pickle
import socket
import stat
import threading
import time

import pytest
import zmq
from connector_sockets import HOST, SOON, free_port
from zmq.utils import z85

from hybridpd_connector import side_channel, side_channel_keys
from hybridpd_connector.errors import KeyFileError, SideChannelError, SideChannelKeyError
from hybridpd_connector.side_channel import Server
from hybridpd_connector.side_channel_client import Client
from hybridpd_connector.side_channel_guard import KEY_ON_ONE_SIDE, WRONG_KEY
from hybridpd_connector.side_channel_keys import (
    MAX_FILE_BYTES,
    MAX_KEYS,
    KeyFile,
    derive,
    hkdf_sha256,
    parse_keys,
    tell_about_keys,
)

OLD = "YV9maXJzdF9zZWNyZXRfZm9yX3Rlc3RzXzAxMjM0NTY="
NEW = "c2Vjb25kX3NlY3JldF9mb3JfdGVzdHNfMDEyMzQ1Njc="
OTHER = "dGhpcmRfc2VjcmV0X2Zvcl90ZXN0c18wMTIzNDU2Nzg="


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(side_channel, "_LOOK_MILLISECONDS", 20)


@pytest.fixture
def write(tmp_path):
    def write(name, *secrets):
        path = tmp_path / name
        fresh = tmp_path / f"{name}.fresh"
        fresh.write_text("\n".join(secrets) + "\n")
        fresh.chmod(0o600)
        # Replaced whole, as a mounted Secret is.
        os.replace(fresh, path)
        return str(path)

    return write


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


def test_the_same_file_lets_in(serve, ask, write):
    path = write("key", OLD)
    server, port = serve(path)
    assert ask(port, path) == b"answer to x"
    assert server.take_refused() == {}


def test_another_key_is_refused_and_counted(serve, ask, write):
    server, port = serve(write("p", OLD))
    with pytest.raises(SideChannelKeyError, match="keys differ"):
        ask(port, write("d", OTHER))
    assert refused(server) == {WRONG_KEY: 1}
    assert server.take_refused() == {}


def test_a_client_without_a_key_is_refused_and_counted(serve, ask, write):
    server, port = serve(write("p", OLD))
    with pytest.raises(SideChannelKeyError, match="none here and one at"):
        ask(port)
    assert set(refused(server)) <= {KEY_ON_ONE_SIDE, "unfinished"}


def test_a_client_with_a_key_does_not_talk_to_a_server_without(serve, ask, write):
    server, port = serve()
    with pytest.raises(SideChannelKeyError, match=r"one here and none at|uses none"):
        ask(port, write("d", OLD))
    assert refused(server)


def test_knowing_the_servers_public_key_is_not_enough(serve, write):
    """The stranger has a key pair of its own and the right public key of the server."""
    server, port = serve(write("p", OLD))
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.curve_publickey, stranger.curve_secretkey = public, secret
        stranger.curve_serverkey = zmq.curve_public(z85.encode(derive(OLD.encode()).server))
        stranger.connect(f"tcp://{HOST}:{port}")
        stranger.send(b"x")
        assert not stranger.poll(300)
    assert refused(server)[WRONG_KEY] >= 1


def test_the_servers_own_key_is_no_clients_key(serve, write):
    server, port = serve(write("p", OLD))
    key = z85.encode(derive(OLD.encode()).server)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_public(key), key
        stranger.curve_serverkey = zmq.curve_public(key)
        stranger.connect(f"tcp://{HOST}:{port}")
        stranger.send(b"x")
        assert not stranger.poll(300)
    assert refused(server)[WRONG_KEY] >= 1


def test_a_refused_client_leaves_no_connection_behind(serve, ask, write):
    """libzmq would come back for ever, were its socket still there."""
    server, port = serve(write("p", OLD))
    with pytest.raises(SideChannelKeyError):
        ask(port, write("d", OTHER))
    assert refused(server)
    time.sleep(0.7)
    assert server.take_refused() == {}
    assert server.connections == 0


def test_no_descriptor_is_left_after_refusals(serve, write):
    _, port = serve(write("p", OLD))
    client = Client(keys=KeyFile(write("d", OTHER)))

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


def test_a_silent_server_is_given_up_in_time_with_a_key_too(ask, write):
    with pytest.raises(SideChannelError, match="none in time"):
        ask(free_port(), write("d", OLD, NEW), 0.3)


def test_nothing_readable_crosses_the_wire(serve, write):
    """A relay between the two sees neither question nor answer, nor the secret."""
    path = write("key", OLD)
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
def test_every_state_of_a_rotation_works(serve, ask, write, on_p, on_d):
    _, port = serve(write("p", *on_p))
    assert ask(port, write("d", *on_d)) == b"answer to x"


def test_a_rotation_needs_no_restart(serve, write):
    """Both files change step by step, in different order, while the two sides run."""
    p, d = write("p", OLD), write("d", OLD)
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
        write(name, *secrets)
        assert answered(client, port), (name, secrets)
    client.close()
    assert server.alive


def test_a_key_that_was_taken_out_lets_in_no_more(serve, ask, write):
    p, d = write("p", OLD, OTHER), write("d", OLD)
    server, port = serve(p)
    assert ask(port, d) == b"answer to x"
    write("p", OTHER)
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        try:
            ask(port, d)
        except SideChannelKeyError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the old key still lets in")
    assert ask(port, write("d2", OTHER)) == b"answer to x"
    assert server.alive


def answered(client, port):
    """Within ``SOON``: a server that takes over its new key listens anew."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        try:
            return client.ask(HOST, port, b"x", 1.0) == b"answer to x"
        except SideChannelError:
            time.sleep(0.05)
    return False


def test_a_file_that_breaks_later_changes_nothing(serve, ask, write, caplog):
    path = write("key", OLD)
    keys = KeyFile(path)
    write("key", "short")
    for _ in range(3):
        assert keys.current() == parse_keys(OLD.encode())
    os.unlink(path)
    assert keys.current() == parse_keys(OLD.encode())
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, told
    write("key", NEW)
    assert keys.current() == parse_keys(NEW.encode())


# --- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secrets", "said"),
    [
        ([], "none"),
        (["# only a remark", ""], "none"),
        (["short"], "got 5"),
        ([OLD, "short"], "line 2"),
        (["two words " + OLD], "without spaces"),
        (["\u00fc" * 40], "printable"),
        (["a" * 2000], "1024"),
        (["ab" * 20], "different"),
        ([f"{OLD}{number}" for number in range(MAX_KEYS + 1)], f"at most {MAX_KEYS}"),
        (["#" * MAX_FILE_BYTES], "larger"),
    ],
)
def test_a_bad_file_is_refused_at_start_and_says_why(write, secrets, said):
    with pytest.raises(KeyFileError, match=said) as caught:
        KeyFile(write("key", *secrets))
    for secret in secrets:
        assert secret not in str(caught.value) or secret in ("", "short")


def test_a_short_secret_is_not_shown(write):
    secret = "Tr0ub4dor&3"
    with pytest.raises(KeyFileError) as caught:
        KeyFile(write("key", secret))
    assert secret not in repr(caught.value)


@pytest.mark.parametrize("path", [OLD, "relative/key", "", 5, None, ["/x"], True])
def test_what_is_no_absolute_path_is_refused_and_not_shown(path):
    with pytest.raises(KeyFileError) as caught:
        KeyFile(path)
    assert OLD not in str(caught.value)


def test_a_missing_file_a_folder_and_a_pipe_are_refused(tmp_path):
    with pytest.raises(KeyFileError, match="No such file"):
        KeyFile(str(tmp_path / "missing"))
    with pytest.raises(KeyFileError, match="regular file"):
        KeyFile(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(KeyFileError, match="regular file"):
        KeyFile(str(tmp_path / "pipe"))
    with pytest.raises(KeyFileError, match="not a path"):
        KeyFile("/nul\0byte")


def test_lines_may_end_in_any_way_and_repeat():
    raw = f"# a remark\r\n\r\n  {OLD}  \r\n{NEW}\n{OLD}".encode()
    assert parse_keys(raw) == (derive(OLD.encode()), derive(NEW.encode()))


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (0o600, ""),
        (0o400, ""),
        (0o440, ""),
        (0o644, "everyone"),
        (0o604, "everyone"),
        (0o620, "group"),
    ],
)
def test_a_file_that_others_can_use_is_warned_about(write, mode, said, caplog):
    path = write("key", OLD)
    os.chmod(path, mode)
    assert stat.S_IMODE(os.stat(path).st_mode) == mode
    keys = KeyFile(path)
    tell_about_keys(keys)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (said in keys.exposure()) if said else (keys.exposure() == "")
    assert len(warnings) == (1 if said else 0)


def test_without_a_key_there_is_one_warning_with_the_way_out(caplog):
    tell_about_keys(None)
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert side_channel_keys.FIELD in caplog.text


# --- what is shown --------------------------------------------------------------------------------


def test_secrets_and_keys_are_nowhere_to_be_seen(serve, ask, write, caplog):
    caplog.set_level(logging.DEBUG)
    path = write("p", OLD, NEW)
    server, port = serve(path)
    keys = KeyFile(path)
    client = Client(keys=keys)
    tell_about_keys(keys)
    shown = [repr(keys), repr(server), repr(client), repr(keys.current()), str(keys.current()[0])]
    with pytest.raises(SideChannelKeyError) as caught:
        ask(port, write("d", OTHER))
    shown += [str(caught.value), repr(caught.value), repr(pickle.dumps(caught.value))]
    assert refused(server)
    write("p", NEW)
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


def test_the_derivation_is_rfc_5869():
    """Appendix A.1 and A.3 of the RFC."""
    secret = bytes.fromhex("0b" * 22)
    assert hkdf_sha256(
        secret,
        bytes.fromhex("f0f1f2f3f4f5f6f7f8f9"),
        42,
        bytes.fromhex("000102030405060708090a0b0c"),
    ).hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )
    assert hkdf_sha256(secret, b"", 42).hex() == (
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    )


def test_roles_and_secrets_have_keys_of_their_own():
    keys = [derive(secret.encode()) for secret in (OLD, NEW)]
    parts = {part for key in keys for part in (key.server, key.client)}
    assert len(parts) == 4
    assert all(len(part) == 32 for part in parts)
    assert keys[0].name != keys[1].name
