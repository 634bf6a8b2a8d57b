"""Strangers at the side channel: at prefill's, while decode shakes hands; and one that decode is
sent to by forged parameters."""

import contextlib
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from chaos_processes import both, right
from chaos_stage import ANSWER, ERROR, HANDSHAKE_SECONDS, Seen, ask

from hybridpd_connector.errors import SideChannelError
from hybridpd_connector.handshake import MAGIC
from hybridpd_connector.side_channel import MAX_QUESTION_BYTES
from hybridpd_connector.side_channel_client import Client
from hybridpd_testkit.network import SIDE_CHANNEL_PORT
from hybridpd_testkit.processes import inside_namespace

# What a ZeroMQ 3.1 peer without security says first: signature, version, mechanism NULL.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(52, b"\x00")
READY = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
CONNECTIONS = 1000
MADE_UP = 80


class Strangers:
    """Connections from decode's host to prefill's side channel, held until ``close``."""

    def __init__(self, stage):
        self._host = stage.network.decode.namespace
        self._address = (stage.network.prefill.data, SIDE_CHANNEL_PORT)
        self._sockets = []
        self._stop = threading.Event()
        self._threads = []

    def connect(self, count, first_words=b""):
        """``count`` connections that say ``first_words`` and then nothing."""
        with inside_namespace(self._host):
            made = [socket.create_connection(self._address, 10) for _ in range(count)]
        self._sockets.extend(made)
        for one in made:
            self._say(one, first_words)
        return made

    @staticmethod
    def _say(one, words):
        # Whoever is hung up on while speaking has had its answer.
        with contextlib.suppress(OSError):
            one.sendall(words)

    def slowly(self, one, words):
        """Say ``words`` one byte a second."""

        def run():
            for byte in words:
                self._say(one, bytes([byte]))
                if self._stop.wait(1.0):
                    return

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def question(self, raw):
        """A whole message in good ZeroMQ; the answer, or None when there is none."""
        with inside_namespace(self._host):
            client = Client()
        try:
            return client.ask(*self._address, raw, 2.0)
        except SideChannelError:
            return None
        finally:
            client.close()

    def close(self):
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()


def garbage(strangers):
    noise = random.Random(1)
    for size in (1, 64, 4096, 100_000):
        for first in (b"", GREETING):
            strangers.connect(5, first + noise.randbytes(size))
    strangers.question(noise.randbytes(500))


def wrong_version(strangers):
    strangers.connect(5, GREETING.replace(b"\x7f\x03\x01", b"\x7f\x09\x09"))
    answer = strangers.question(MAGIC + (9999).to_bytes(2, "big") + b"\x80")
    assert answer is None or answer.startswith(MAGIC)


def wrong_size(strangers):
    assert strangers.question(bytes(MAX_QUESTION_BYTES + 1)) is None
    strangers.question(b"H")
    # A frame that announces 2^60 bytes.
    strangers.connect(5, GREETING + READY + b"\x02" + (2**60).to_bytes(8, "big") + bytes(1000))


def half_open(strangers):
    strangers.connect(20)
    strangers.connect(20, GREETING[:10])


def one_byte_a_second(strangers):
    for one in strangers.connect(10):
        strangers.slowly(one, GREETING)


def a_thousand_connections(strangers):
    strangers.connect(CONNECTIONS, GREETING)


def side_channel_fed(feed):
    """Strangers hold on to prefill's side channel while a new decode engine shakes hands."""

    def fault(stage):
        prompt, expected = stage.prompt(300)
        stage.kill("decode")
        stage.start("decode")
        strangers = Strangers(stage)
        try:
            feed(strangers)
            return right(stage.load(prompt, stage.prefilled(prompt)), expected)
        finally:
            strangers.close()

    return fault


def decode_sent_to_a_stranger(stage):
    """Somebody else listens at the address in the parameters: it answers noise, or nothing."""
    prompt, expected = stage.prompt(301)
    params = stage.prefilled(prompt)
    seen = []
    for words in (b"", b"\x00" * 5000, GREETING + b"\x00\xff" * 500):
        with stranger(stage, words) as address:
            forged = {
                **params,
                "remote_engine_id": f"nobody-{len(words)}",
                "remote_host": address[0],
                "remote_port": address[1],
            }
            call = stage.later(stage.load, prompt, forged)
            other = ask(stage.decode, prompt, None)
            assert right(other, expected).what == ANSWER
            seen.append(right(call.result(), expected))
    worst = max(seen, key=lambda one: one.seconds)
    assert worst.seconds < HANDSHAKE_SECONDS + 20
    return Seen(seen[0].what, worst.seconds)


def decode_sent_to_made_up_addresses(stage):
    """Packets to them vanish, and decode has never met the real engine: it must not queue behind
    them all, as a few more requests ask for it."""
    stage.kill("decode")
    stage.start("decode")
    prompt, expected = stage.prompt(302, length=40)
    params = stage.prefilled(prompt)
    subnet = stage.network.prefill.data.rpartition(".")[0]
    with ThreadPoolExecutor(MADE_UP) as clients:
        lost = [
            clients.submit(
                stage.load,
                prompt,
                {
                    **params,
                    "remote_engine_id": f"made-up-{number}",
                    "remote_host": f"{subnet}.{100 + number}",
                },
            )
            for number in range(MADE_UP)
        ]
        time.sleep(1.0)
        offers = [stage.prefilled(prompt) for _ in range(3)]
        calls = [stage.later(stage.load, prompt, offer) for offer in offers]
        seen = [right(call.result(), expected) for call in calls]
        assert {call.result().what for call in lost} == {ERROR}
    return both(*seen[:2]) if seen[2].what == ANSWER else seen[2]


@contextlib.contextmanager
def stranger(stage, words):
    """Somebody who listens on the wire and says ``words`` to whoever comes."""
    with inside_namespace(stage.network.wire):
        listener = socket.create_server((stage.network.wire_address, 0))
    stop = threading.Event()

    def serve():
        listener.settimeout(0.2)
        callers = []
        while not stop.is_set():
            with contextlib.suppress(OSError):
                caller, _ = listener.accept()
                callers.append(caller)
                caller.sendall(words)
        for caller in callers:
            caller.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        stop.set()
        thread.join()
        listener.close()
