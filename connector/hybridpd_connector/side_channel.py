"""The side channel: one question, one answer, over ZeroMQ. This is the server's end.

With a key file both ends are authenticated and the connection is encrypted (``side_channel_guard``,
``side_channel_keys``); without one, whoever reaches the port may ask.

One thread with one ROUTER socket, bound to the given address only. A question is one frame of
at most ``MAX_QUESTION_BYTES``; larger ones make libzmq drop the connection. Anything else
(several frames, an empty frame) is answered with ``b""`` or dropped. Half-open connections and
clients that never finish libzmq's handshake are closed by libzmq after
``_CONNECT_MILLISECONDS``, whatever they send meanwhile. A client that does not read its answers
loses them: the server never waits for a client, and no exception ends its thread. At
``max_connections`` all are closed and it listens anew (libzmq can close one only with all): a
reader asks once and goes, so that many are strangers. The key file is looked at every second:
new clients are admitted at once, a new key of the server's own makes it listen anew, too.

Not bounded, because libzmq has no setting for it: the number of frames that one client may put into
one message before it ends it. With a key only the other engines can do that.
"""

import logging
import resource
import threading
import time
from collections.abc import Callable, Iterable

import zmq

from hybridpd_connector.errors import SideChannelError
from hybridpd_connector.side_channel_guard import (
    TOO_MANY,
    Doorman,
    Tally,
    Watch,
    check_curve,
    endpoint_of,
    secure_server,
)
from hybridpd_connector.side_channel_keys import KeyFile, SharedKey

logger = logging.getLogger(__name__)

MAX_QUESTION_BYTES = 64 * 1024
MAX_CONNECTIONS = 4096
_CONNECT_MILLISECONDS = 5000
_HEARTBEAT_SECONDS = 10
_QUEUED_MESSAGES = 64
_BACKLOG = 256
_LOOK_MILLISECONDS = 1000
_BIND_MILLISECONDS = 20
_TELL_SECONDS = 60.0
_WAKE_UP_ADDRESS = "inproc://stop"


def connection_bound() -> int:
    """Half of the descriptors that this process may have, and at most ``MAX_CONNECTIONS``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft < 0 else max(1, min(MAX_CONNECTIONS, soft // 2))


class Server:
    """Answers questions on ``host:port`` from its construction until ``close``."""

    def __init__(
        self,
        host: str,
        port: int,
        answer: Callable[[bytes], bytes],
        keys: KeyFile | None = None,
        max_connections: int = 0,
    ) -> None:
        """Bind and start. ``answer`` must be quick, is called on the server's thread only.

        ``max_connections``: 0 for ``connection_bound()``. ``SideChannelError`` when the address
        cannot be bound.
        """
        self.endpoint = endpoint_of(host, port)
        self._answer = answer
        self._key_file = keys
        self._max_connections = max_connections or connection_bound()
        self._context = zmq.Context(io_threads=1)
        self._stop_sender = self._context.socket(zmq.PAIR)
        self._stop_receiver = self._context.socket(zmq.PAIR)
        self._stop_sender.bind(_WAKE_UP_ADDRESS)
        self._stop_receiver.connect(_WAKE_UP_ADDRESS)
        self._refused = Tally()
        self._told_at = float("-inf")
        self._untold = 0
        self._look_at = float("-inf")
        self._listening = True
        self._keys: tuple[SharedKey, ...] = ()
        self._doorman: Doorman | None = None
        if keys is not None:
            check_curve()
            self._keys = keys.current()
            self._doorman = Doorman(self._context)
            self._doorman.admit(self._keys)
        self._open()
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

    @property
    def connections(self) -> int:
        """Open connections, as far as libzmq has told. For tests; read on any thread."""
        return self._watch.connections

    def take_refused(self) -> dict[str, int]:
        """Refused connections by reason (``side_channel_guard.REASONS``) since the last call."""
        return self._refused.take()

    def close(self) -> None:
        """Stop answering and free the address. Idempotent."""
        if not self._stop_sender.closed:
            self._stop_sender.send(b"")
            self._thread.join()
            self._stop_sender.close(linger=0)
            self._context.term()

    def _open(self) -> None:
        """A new socket with this server's own key, not bound yet."""
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1 if "[" in self.endpoint else 0),
            (zmq.MAXMSGSIZE, MAX_QUESTION_BYTES),
            (zmq.RCVHWM, _QUEUED_MESSAGES),
            (zmq.SNDHWM, _QUEUED_MESSAGES),
            (zmq.BACKLOG, _BACKLOG),
            (zmq.HANDSHAKE_IVL, _CONNECT_MILLISECONDS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_SECONDS * 1000),
            (zmq.HEARTBEAT_TIMEOUT, 2 * _HEARTBEAT_SECONDS * 1000),
            (zmq.TCP_KEEPALIVE, 1),
        ):
            self._socket.setsockopt(option, value)
        if self._keys:
            secure_server(self._socket, self._keys[0])
        self._watch = Watch(self._context, self._socket)

    def _run(self) -> None:
        while True:
            try:
                if not self._serve():
                    break
            except Exception:
                logger.exception("side channel %s: a question could not be served", self.endpoint)
        self._watch.close()
        self._socket.close(linger=0)
        self._stop_receiver.close(linger=0)
        if self._doorman is not None:
            self._doorman.socket.close(linger=0)

    def _serve(self) -> bool:
        """Wait for what comes next and deal with it; False: stop."""
        poller = zmq.Poller()
        sockets = [self._socket, self._stop_receiver, self._watch.socket]
        if self._doorman is not None:
            sockets.append(self._doorman.socket)
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(self._patience_milliseconds()))
            if self._stop_receiver in ready:
                return False
            if self._doorman is not None and self._doorman.socket in ready:
                self._doorman.serve_one()
            if self._watch.socket in ready:
                self._note(self._watch.take())
            if self._socket in ready:
                self._serve_one()
            self._tell(time.monotonic())
            if self._too_many() or self._renew_keys(time.monotonic()):
                self._reopen()
                return True
            if not self._listening:
                self._listen()

    def _patience_milliseconds(self) -> int | None:
        """How long nothing has to be done by itself; None: for ever."""
        if not self._listening:
            return _BIND_MILLISECONDS
        return _LOOK_MILLISECONDS if self._key_file is not None or self._untold else None

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

    def _note(self, reasons: Iterable[str]) -> None:
        reasons = list(reasons)
        self._refused.add(reasons)
        self._untold += len(reasons)

    def _tell(self, now: float) -> None:
        """Say what was refused: the first at once, then once a minute."""
        if self._untold and now - self._told_at >= _TELL_SECONDS:
            logger.warning(
                "side channel %s: %d connections refused; so far, by reason: %s",
                self.endpoint,
                self._untold,
                ", ".join(f"{reason}={n}" for reason, n in sorted(self._refused.total.items())),
            )
            self._untold, self._told_at = 0, now

    def _too_many(self) -> bool:
        connections = self._watch.connections
        if connections < self._max_connections:
            return False
        self._note([TOO_MANY] * connections)
        return True

    def _reopen(self) -> None:
        """Close the socket with all its connections, and listen on a new one."""
        self._watch.close()
        self._socket.close(linger=0)
        self._open()
        self._listen()

    def _listen(self) -> None:
        """Bind again; the address may take a moment to be free, so it is tried until it works."""
        try:
            self._socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            self._listening = False
            logger.debug("side channel %s: not bound yet: %s", self.endpoint, error)
        else:
            self._listening = True

    def _renew_keys(self, now: float) -> bool:
        """Take over what the key file says now. True: connections made before must end.

        They must when this server's own key is another one, and when a key was taken out: who has
        it could keep a connection and ask again.
        """
        if self._key_file is None or self._doorman is None or now < self._look_at:
            return False
        self._look_at = now + _LOOK_MILLISECONDS / 1000
        before, self._keys = self._keys, self._key_file.current()
        if self._keys == before:
            return False
        self._doorman.admit(self._keys)
        return self._keys[0] != before[0] or not set(before) <= set(self._keys)
