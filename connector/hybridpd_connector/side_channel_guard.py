"""Who may use the side channel: CURVE keys on its sockets, a ZAP handler, and what was refused.

With keys, a connection is encrypted and both ends prove that they know a secret of the file: the
client will only talk to the server key that it derived itself, and the server asks ``Doorman``
(libzmq's ZAP, RFC 27) about every client key, so that knowing the server's public key is not
enough. The ZAP domain is enforced: without its handler libzmq admits nobody.
"""

import collections
import contextlib
import itertools
import threading
from collections.abc import Iterable
from typing import Any, Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from hybridpd_connector.errors import KeyFileError
from hybridpd_connector.side_channel_keys import SharedKey

WRONG_KEY: Final = "wrong_key"
"""The client has another key: it expected another server, or the server did not know it."""
KEY_ON_ONE_SIDE: Final = "key_on_one_side"
"""One side uses a key and the other does not."""
UNFINISHED: Final = "unfinished"
"""The connection was closed, or said too little for too long, before it was set up."""
GARBAGE: Final = "garbage"
"""The other side does not speak the protocol."""
TOO_MANY: Final = "too_many"
"""There were more connections than the server keeps."""
REASONS: Final = (WRONG_KEY, KEY_ON_ONE_SIDE, UNFINISHED, GARBAGE, TOO_MANY)

_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
_ZAP_DOMAIN: Final = b"hybridpd"
_ZAP_FRAMES: Final = 7
_FAILURES: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_names = itertools.count()


def endpoint_of(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def check_curve() -> None:
    """``KeyFileError`` when a key was given and this libzmq cannot encrypt."""
    if not zmq.has("curve"):
        raise KeyFileError("pyzmq", "a libzmq with CURVE", "one without", "install the pyzmq wheel")


def _public(private: bytes) -> bytes:
    """The 32-byte public key of a private one."""
    return z85.decode(zmq.curve_public(z85.encode(private)))


def secure_server(socket: "zmq.Socket[bytes]", key: SharedKey) -> None:
    """Before ``bind``: only clients that know this server's key, and that the handler admits."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.server)
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: "zmq.Socket[bytes]", key: SharedKey) -> None:
    """Before ``connect``: only the server that knows the same secret."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, _public(key.server))
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.client)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, _public(key.client))


class Doorman:
    """Answers libzmq's questions whether a client key may come in. One per context; one thread."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ADDRESS)
        self._admitted: frozenset[bytes] = frozenset()

    def admit(self, keys: Iterable[SharedKey]) -> None:
        """From now on these clients, and no others. Connections that exist stay."""
        self._admitted = frozenset(_public(key.client) for key in keys)

    def serve_one(self) -> None:
        """Take one question if there is one, and answer it."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        # identity, empty, version, request, domain, address, routing id, mechanism, key
        peer, request = frames[:2], frames[2:]
        if len(request) < 2:
            return
        good = (
            len(request) == _ZAP_FRAMES
            and request[0] == _ZAP_VERSION
            and request[2] == _ZAP_DOMAIN
            and request[5] == b"CURVE"
            and request[6] in self._admitted
        )
        status = (b"200", b"OK") if good else (b"400", b"unknown key")
        self.socket.send_multipart([*peer, _ZAP_VERSION, request[1], *status, b"", b""])


class Watch:
    """What happens to the connections of one socket. Read it on the socket's own thread."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", watched: "zmq.Socket[bytes]"
    ) -> None:
        """Before ``bind`` or ``connect``."""
        address = f"inproc://watch-{next(_names)}"
        watched.monitor(
            address,
            _FAILURES | zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED,
        )
        self.socket = context.socket(zmq.PAIR)
        # No limit: libzmq's own thread would wait for us otherwise, and with it every connection.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._watched = watched
        self.accepted = self.connected = self.lost = 0

    @property
    def connections(self) -> int:
        """How many are open now, of those that were accepted."""
        return self.accepted - self.lost

    def take(self) -> list[str]:
        """Why connections were refused since the last call, one entry for each."""
        refused: list[str] = []
        while self.socket.poll(0):
            event: dict[str, Any] = dict(recv_monitor_message(self.socket, zmq.NOBLOCK))
            kind = event["event"]
            if kind == zmq.EVENT_ACCEPTED:
                self.accepted += 1
            elif kind == zmq.EVENT_CONNECTED:
                self.connected += 1
            elif kind == zmq.EVENT_DISCONNECTED:
                self.lost += 1
            elif kind & _FAILURES:
                refused.append(_reason(kind, event["value"]))
        return refused

    def close(self) -> None:
        """Before the watched socket is closed.

        In this order: libzmq's thread would wait for ever to tell an event that nobody takes.
        """
        # A context that is being closed tells nobody anything any more.
        with contextlib.suppress(zmq.ContextTerminated):
            self._watched.disable_monitor()
        self.socket.close(linger=0)


def _reason(kind: int, value: int) -> str:
    if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return WRONG_KEY
    if kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return UNFINISHED
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return WRONG_KEY
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return KEY_ON_ONE_SIDE
    return GARBAGE


class Tally:
    """Counts refusals on one thread for a reader on another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: collections.Counter[str] = collections.Counter()
        self.total: collections.Counter[str] = collections.Counter()

    def add(self, reasons: Iterable[str]) -> None:
        with self._lock:
            for reason in reasons:
                self._new[reason] += 1
                self.total[reason] += 1

    def take(self) -> dict[str, int]:
        """Refusals by reason since the last call. Costs nothing while there are none: a prefill
        engine asks in every step."""
        if not self._new:
            return {}
        with self._lock:
            taken, self._new = dict(self._new), collections.Counter()
            return taken
