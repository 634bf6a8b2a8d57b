"""The side channel: one question, one answer, over ZeroMQ. The only module that imports zmq.

Server
    One thread with one ROUTER socket, bound to the given address only. A question is one frame of
    at most ``MAX_QUESTION_BYTES``; larger ones make libzmq drop the connection. Anything else
    (several frames, an empty frame) is answered with ``b""`` or dropped. Half-open connections and
    clients that never finish libzmq's handshake are closed by libzmq after
    ``_CONNECT_MILLISECONDS``. A client that does not read its answers loses them: the server never
    waits for a client, and no exception ends its thread.

Client
    ``ask`` is for handshake threads: it blocks its caller, never longer than the timeout, whatever
    the other side does (refuses, stays silent, sends one byte a second). It uses a socket of its
    own, so threads do not wait for each other. Answers are bounded by ``max_answer_bytes``.

Not bounded, because libzmq has no setting for it: the number of connections to the server, and the
number of frames that one client may put into one message before it ends it.
"""

import logging
import threading
import time
from collections.abc import Callable

import zmq

from hybridpd_connector.errors import SideChannelError

logger = logging.getLogger(__name__)

MAX_QUESTION_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 64 * 1024 * 1024
_CONNECT_MILLISECONDS = 5000
_HEARTBEAT_SECONDS = 10
_QUEUED_MESSAGES = 64
_WAKE_UP_ADDRESS = "inproc://stop"


class Server:
    """Answers questions on ``host:port`` from its construction until ``close``."""

    def __init__(self, host: str, port: int, answer: Callable[[bytes], bytes]) -> None:
        """Bind and start. ``answer`` must be quick, is called on the server's thread only.

        ``SideChannelError`` when the address cannot be bound.
        """
        self._answer = answer
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._stop_sender = self._context.socket(zmq.PAIR)
        self._stop_receiver = self._context.socket(zmq.PAIR)
        self._stop_sender.bind(_WAKE_UP_ADDRESS)
        self._stop_receiver.connect(_WAKE_UP_ADDRESS)
        self.endpoint = _endpoint(host, port)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1 if ":" in host else 0),
            (zmq.MAXMSGSIZE, MAX_QUESTION_BYTES),
            (zmq.RCVHWM, _QUEUED_MESSAGES),
            (zmq.SNDHWM, _QUEUED_MESSAGES),
            (zmq.HANDSHAKE_IVL, _CONNECT_MILLISECONDS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_SECONDS * 1000),
            (zmq.HEARTBEAT_TIMEOUT, 2 * _HEARTBEAT_SECONDS * 1000),
            (zmq.TCP_KEEPALIVE, 1),
        ):
            self._socket.setsockopt(option, value)
        try:
            self._socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SideChannelError(
                "side channel",
                f"to bind {self.endpoint}",
                error.strerror,
                "set VLLM_NIXL_SIDE_CHANNEL_HOST/PORT to a free address of this host",
            ) from error
        self._thread = threading.Thread(target=self._run, name="hybridpd-side-channel", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "serving" if self._thread.is_alive() else "closed"
        return f"Server({self.endpoint}, {state})"

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop answering and free the address. Idempotent."""
        if not self._stop_sender.closed:
            self._stop_sender.send(b"")
            self._thread.join()
            self._stop_sender.close(linger=0)
            self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop_receiver, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop_receiver in ready:
                break
            try:
                self._serve_one()
            except Exception:
                logger.exception("side channel %s: a question could not be served", self.endpoint)
        self._socket.close(linger=0)
        self._stop_receiver.close(linger=0)

    def _serve_one(self) -> None:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if len(frames) != 2:
            logger.warning(
                "side channel %s: expected 1 frame, got %d", self.endpoint, len(frames) - 1
            )
            reply = b""
        else:
            reply = self._answer(frames[1])
        try:
            self._socket.send_multipart([frames[0], reply], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # A client that left or does not read: its loss, not ours.
            logger.debug("side channel %s: answer dropped: %s", self.endpoint, error)


class Client:
    """Asks servers. Usable from several threads at once."""

    def __init__(self, max_answer_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._context = zmq.Context(io_threads=1)
        self._max_answer_bytes = max_answer_bytes

    def ask(self, host: str, port: int, question: bytes, timeout_seconds: float) -> bytes:
        """The answer to one question, within ``timeout_seconds`` in total.

        ``SideChannelError`` when there is none in time, or an empty or malformed one.
        """
        endpoint = _endpoint(host, port)
        deadline = time.monotonic() + timeout_seconds
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise SideChannelError("side channel", "a socket", error.strerror) from error
        try:
            return self._ask_on(socket, endpoint, question, deadline)
        except zmq.ZMQError as error:
            raise SideChannelError(
                "side channel", f"an answer from {endpoint}", error.strerror
            ) from error
        finally:
            socket.close(linger=0)

    def _ask_on(
        self, socket: "zmq.Socket[bytes]", endpoint: str, question: bytes, deadline: float
    ) -> bytes:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1 if "[" in endpoint else 0),
            (zmq.MAXMSGSIZE, self._max_answer_bytes),
            (zmq.RCVHWM, 1),
            (zmq.HANDSHAKE_IVL, _CONNECT_MILLISECONDS),
            # Without this, libzmq would retry a refused connection ten times a second.
            (zmq.RECONNECT_IVL, 500),
        ):
            socket.setsockopt(option, value)
        socket.connect(endpoint)
        socket.send(question, zmq.NOBLOCK)
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not socket.poll(int(remaining * 1000) + 1, zmq.POLLIN):
            raise SideChannelError(
                "side channel",
                f"an answer from {endpoint}",
                "none in time",
                "is the engine up, and the port open between the pods?",
            )
        frames = socket.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 1 or not frames[0]:
            raise SideChannelError(
                "side channel", f"one frame from {endpoint}", f"{len(frames)} frames"
            )
        return bytes(frames[0])

    def close(self) -> None:
        """Free all sockets; questions in flight end with ``SideChannelError``. Idempotent."""
        # term, not destroy: sockets are closed by the threads that own them.
        self._context.term()


def _endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
