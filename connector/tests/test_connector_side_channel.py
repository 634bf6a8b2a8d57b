"""The side channel over real sockets on loopback: answers, garbage, size, silence, slowness.

Keys are in test_connector_side_channel_keys, crowds in test_connector_side_channel_crowds. Left
out: cut links, which need a network of their own.
"""

import contextlib
import socket
import struct
import threading
import time

import pytest
import zmq
from connector_sockets import HOST, SOON, free_port

from hybridpd_connector import side_channel, side_channel_client
from hybridpd_connector.errors import SideChannelError
from hybridpd_connector.side_channel import MAX_QUESTION_BYTES, Server
from hybridpd_connector.side_channel_client import Client
from hybridpd_testkit.strangers import GREETING, READY


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def client():
    client = Client()
    yield client
    client.close()


@pytest.fixture
def server(port):
    server = Server(HOST, port, lambda question: b"answer to " + question)
    yield server
    server.close()


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


# Not a gap: without such an address nothing can be asked here. It runs wherever the kernel gives
# its loopback one, as where `make test` is run: nothing is skipped there.
@pytest.mark.skipif(not has_ipv6(), reason="this host's loopback has no IPv6 address")
def test_pods_may_have_ipv6_addresses(port, client):
    server = Server("::1", port, lambda question: b"answer to " + question)
    try:
        assert client.ask("::1", port, b"q", SOON) == b"answer to q"
    finally:
        server.close()


@pytest.fixture
def strange_server(port):
    """A plain TCP listener whose behaviour the test chooses; closed at the end."""
    listener = socket.create_server((HOST, port))
    stop = threading.Event()
    threads = []

    def start(behave):
        def run():
            listener.settimeout(0.05)
            while not stop.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    behave(connection, stop)

        thread = threading.Thread(target=run)
        threads.append(thread)
        thread.start()

    yield start
    stop.set()
    for thread in threads:
        thread.join()
    listener.close()


def receive(connection, size):
    """Exactly ``size`` bytes; fails when the connection ends before."""
    received = b""
    while len(received) < size:
        piece = connection.recv(size - len(received))
        assert piece, f"closed after {received!r}"
        received += piece
    return received


def ask_on(raw_socket, question):
    raw_socket.send_multipart(question)
    assert raw_socket.poll(SOON * 1000)
    return raw_socket.recv_multipart()


@pytest.fixture
def dealer(port):
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.connect(f"tcp://{HOST}:{port}")
        yield raw


def test_a_question_is_answered(server, client, port):
    assert client.ask(HOST, port, b"hello", SOON) == b"answer to hello"
    assert repr(server) == f"Server(tcp://{HOST}:{port}, serving)"


def test_many_threads_ask_at_once(server, client, port):
    answers = {}

    def ask(number):
        answers[number] = client.ask(HOST, port, str(number).encode(), SOON)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: f"answer to {number}".encode() for number in range(20)}


def test_only_the_given_address_is_bound(server, port):
    with socket.socket() as other:
        # The same port of another loopback address is still free.
        other.bind(("127.0.0.2", port))


def test_a_taken_address_is_named(server, port):
    with pytest.raises(SideChannelError, match=str(port)):
        Server(HOST, port, lambda question: question)


def test_a_closed_server_frees_its_address(port, client):
    for _ in range(3):
        server = Server(HOST, port, lambda question: question)
        assert client.ask(HOST, port, b"x", SOON) == b"x"
        server.close()
        server.close()
        assert not server.alive


def test_an_exception_in_the_answer_ends_neither_thread_nor_server(port, client, caplog):
    def answer(question):
        if question == b"bad":
            raise ZeroDivisionError
        return question

    server = Server(HOST, port, answer)
    with pytest.raises(SideChannelError):
        client.ask(HOST, port, b"bad", 0.3)
    assert client.ask(HOST, port, b"good", SOON) == b"good"
    assert "could not be served" in caplog.text
    server.close()


def test_several_frames_get_an_empty_answer(server, dealer, client, port):
    assert ask_on(dealer, [b"one", b"two"]) == [b""]
    assert ask_on(dealer, [b"one"]) == [b"answer to one"]


def test_an_empty_answer_is_an_error_for_the_client(port, client):
    server = Server(HOST, port, lambda question: b"")
    with pytest.raises(SideChannelError, match="one frame"):
        client.ask(HOST, port, b"x", SOON)
    server.close()


def test_an_oversized_question_never_reaches_the_answer(port, client):
    seen = []

    def answer(question):
        seen.append(len(question))
        return b"ok"

    server = Server(HOST, port, answer)
    with pytest.raises(SideChannelError):
        client.ask(HOST, port, bytes(MAX_QUESTION_BYTES + 1), 0.5)
    assert client.ask(HOST, port, bytes(MAX_QUESTION_BYTES), SOON) == b"ok"
    assert seen == [MAX_QUESTION_BYTES]
    server.close()


def test_an_oversized_answer_is_not_taken(port):
    small = Client(max_answer_bytes=1000)
    server = Server(HOST, port, lambda question: bytes(int(question)))
    assert len(small.ask(HOST, port, b"1000", SOON)) == 1000
    with pytest.raises(SideChannelError):
        small.ask(HOST, port, b"1001", 0.5)
    small.close()
    server.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(64),
        b"\xff" * 4096,
        GREETING,
        GREETING + b"\x04\xff" + b"x" * 255,
    ],
    ids=["http", "zeros", "ones", "greeting only", "bad command"],
)
def test_garbage_on_the_socket_leaves_the_server_answering(server, client, port, garbage):
    with socket.create_connection((HOST, port)) as stranger:
        stranger.sendall(garbage)
        assert client.ask(HOST, port, b"x", SOON) == b"answer to x"
    assert server.alive


def test_a_frame_that_claims_too_much_ends_its_connection(server, port):
    with socket.create_connection((HOST, port)) as stranger:
        stranger.settimeout(SOON)
        stranger.sendall(GREETING)
        receive(stranger, len(GREETING))
        stranger.sendall(READY)
        receive(stranger, len(READY))
        stranger.sendall(b"\x00\x01x")
        assert receive(stranger, 13) == b"\x00\x0banswer to x"
        # The connection was good; now the claim of 2^62 bytes ends it.
        stranger.sendall(b"\x02" + struct.pack(">Q", 1 << 62))
        assert stranger.recv(1024) == b""


def test_half_open_connections_are_closed(monkeypatch, port, client):
    monkeypatch.setattr(side_channel, "_CONNECT_MILLISECONDS", 200)
    server = Server(HOST, port, lambda question: question)
    with socket.create_connection((HOST, port)) as silent:
        silent.settimeout(SOON)
        # The server's own greeting, then the end of the connection.
        while silent.recv(1024):
            assert server.alive
    assert client.ask(HOST, port, b"x", SOON) == b"x"
    server.close()


def test_a_client_that_never_reads_does_not_stop_the_server(port, client):
    server = Server(HOST, port, lambda question: bytes(1 << 20))
    with zmq.Context() as context, context.socket(zmq.DEALER) as deaf:
        deaf.linger = 0
        deaf.rcvhwm = 1
        deaf.connect(f"tcp://{HOST}:{port}")
        for _ in range(200):
            deaf.send(b"more")
        assert len(client.ask(HOST, port, b"x", SOON)) == 1 << 20
    server.close()


def silent(connection, stop):
    stop.wait(10)


def closing(connection, stop):
    connection.shutdown(socket.SHUT_RDWR)


def byte_by_byte(connection, stop):
    for byte in GREETING:
        try:
            connection.sendall(bytes([byte]))
        except OSError:
            return
        if stop.wait(0.05):
            return


def talking_nonsense(connection, stop):
    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" * 100)
    stop.wait(10)


@pytest.mark.parametrize("behave", [silent, closing, byte_by_byte, talking_nonsense])
def test_a_client_gives_up_in_time_whatever_the_server_does(strange_server, client, port, behave):
    strange_server(behave)
    with pytest.raises(SideChannelError, match="none in time"):
        client.ask(HOST, port, b"x", 0.3)


def test_a_refused_port_is_an_error_in_time(client, port):
    with pytest.raises(SideChannelError, match="port open"):
        client.ask(HOST, port, b"x", 0.2)


def test_a_bad_host_is_an_error(client):
    with pytest.raises(SideChannelError):
        client.ask("no such host", 5600, b"x", 0.2)


def test_no_socket_is_left_after_an_error(client, port):
    # libzmq allows about a thousand sockets per context: leaking them would show here.
    for _ in range(1100):
        with pytest.raises(SideChannelError):
            client.ask(HOST, port, b"x", 0.0)


def test_a_closed_client_says_so(client, port):
    client.close()
    with pytest.raises(SideChannelError):
        client.ask(HOST, port, b"x", 0.2)


def test_closing_ends_questions_in_flight(port):
    client = Client()
    errors = []

    def ask():
        try:
            client.ask(HOST, port, b"x", 60.0)
        except SideChannelError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.1)
    client.close()
    thread.join(SOON)
    assert len(errors) == 1


def test_an_address_that_takes_no_connection_is_given_up_soon(client, monkeypatch):
    """Its backlog is full, so that packets to it are dropped as those to no machine are."""
    monkeypatch.setattr(side_channel_client, "CONNECT_SECONDS", 0.2)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((HOST, 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        started = time.monotonic()
        with pytest.raises(SideChannelError, match="none in time"):
            client.ask(HOST, listener.getsockname()[1], b"x", 60.0)
        assert time.monotonic() - started < 30.0


def test_a_name_that_means_nothing_is_an_error(client, monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(SideChannelError, match="an address of gone"):
        client.ask("gone.example", 5600, b"x", 60.0)


@pytest.fixture
def silent_resolver(monkeypatch):
    """Names get no answer until it is set."""
    answers = threading.Event()

    def look_up(*_, **__):
        answers.wait()
        raise socket.gaierror("Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield answers
    answers.set()


def test_a_name_whose_servers_are_silent_is_given_up_in_time(client, silent_resolver):
    with pytest.raises(SideChannelError, match="got none in time"):
        client.ask("silent.example", 5600, b"x", 0.2)


def test_names_that_are_looked_up_are_bounded_and_addresses_need_none(
    client, server, port, silent_resolver, monkeypatch
):
    monkeypatch.setattr(side_channel_client, "_look_ups", threading.BoundedSemaphore(2))
    for expected in ("none in time", "none in time", "are being looked up"):
        with pytest.raises(SideChannelError, match=expected):
            client.ask("silent.example", 5600, b"x", 0.05)
    assert client.ask(HOST, port, b"x", SOON) == b"answer to x"
