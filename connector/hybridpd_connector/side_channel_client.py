"""The side channel: one question, one answer, over ZeroMQ. This is the client's end.

``ask`` is for handshake threads: it blocks its caller, never longer than the timeout, whatever the
other side does (refuses, stays silent, sends one byte a second). It uses sockets of its own, so
threads do not wait for each other. An address at which nobody takes the connection is given up
sooner: a network decides that at once, while an engine may need time to answer. Answers are bounded
by ``max_answer_bytes``. Keys are read from the file for every question, and tried in order.
"""

import enum
import ipaddress
import queue
import socket as sockets
import threading
import time
from typing import Any

import zmq

from hybridpd_connector.errors import SideChannelError, SideChannelKeyError
from hybridpd_connector.side_channel_guard import (
    KEY_ON_ONE_SIDE,
    UNFINISHED,
    WRONG_KEY,
    Watch,
    check_curve,
    endpoint_of,
    secure_client,
)
from hybridpd_connector.side_channel_keys import KeyFile, SharedKey

MAX_ANSWER_BYTES = 64 * 1024 * 1024
_SET_UP_MILLISECONDS = 5000
CONNECT_SECONDS = 2.0
"""For the name, and then for the connection: one lost packet is sent again after a second."""
MAX_LOOK_UPS = 256
"""Names that are looked up at once. A resolver may take half a minute for one that is made up, and
cannot be stopped."""
_AGAIN_SECONDS = 0.2
_look_ups = threading.BoundedSemaphore(MAX_LOOK_UPS)


class Client:
    """Asks servers. Usable from several threads at once."""

    def __init__(
        self, max_answer_bytes: int = MAX_ANSWER_BYTES, keys: KeyFile | None = None
    ) -> None:
        self._context = zmq.Context(io_threads=1)
        self._max_answer_bytes = max_answer_bytes
        self._key_file = keys
        if keys is not None:
            check_curve()

    def ask(self, host: str, port: int, question: bytes, timeout_seconds: float) -> bytes:
        """The answer to one question, within ``timeout_seconds`` in total.

        ``SideChannelKeyError`` when the other side refuses every key of ours, or only one side has
        one; ``SideChannelError`` when there is no answer in time, or an empty or malformed one.
        """
        deadline = time.monotonic() + timeout_seconds
        endpoint = endpoint_of(_numeric(host, min(timeout_seconds, CONNECT_SECONDS)), port)
        keys = self._key_file.current() if self._key_file is not None else (None,)
        early = 0
        while True:
            for key in keys:
                answer = self._try(endpoint, question, key, deadline)
                if isinstance(answer, bytes):
                    return answer
                if answer in (_Ended.NOBODY, _Ended.LATE):
                    raise _none_in_time(endpoint, early)
                if answer is not _Ended.REFUSED:
                    early += answer is _Ended.EARLY
                    break
            else:
                raise SideChannelKeyError(
                    "side channel key",
                    f"one that {endpoint} accepts",
                    f"the connection refused with each of {len(keys)}",
                    "the keys differ, or it uses none (or it was just stopping): "
                    "give both roles the same side_channel_key_file",
                )
            time.sleep(min(_AGAIN_SECONDS, max(0.0, deadline - time.monotonic())))

    def _try(
        self, endpoint: str, question: bytes, key: SharedKey | None, deadline: float
    ) -> "bytes | _Ended":
        """Ask with one key, on one connection."""
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise SideChannelError("side channel", "a socket", error.strerror) from error
        watch: Watch | None = None
        try:
            watch = Watch(self._context, socket)
            self._prepare(socket, endpoint, key)
            socket.connect(endpoint)
            socket.send(question, zmq.NOBLOCK)
            return _await(socket, watch, endpoint, key is not None, deadline)
        except zmq.ZMQError as error:
            raise SideChannelError(
                "side channel", f"an answer from {endpoint}", error.strerror
            ) from error
        finally:
            if watch is not None:
                watch.close()
            socket.close(linger=0)

    def _prepare(self, socket: "zmq.Socket[bytes]", endpoint: str, key: SharedKey | None) -> None:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1 if "[" in endpoint else 0),
            (zmq.MAXMSGSIZE, self._max_answer_bytes),
            (zmq.RCVHWM, 1),
            (zmq.HANDSHAKE_IVL, _SET_UP_MILLISECONDS),
            # Without this, libzmq would retry a refused connection ten times a second.
            (zmq.RECONNECT_IVL, 500),
        ):
            socket.setsockopt(option, value)
        if key is not None:
            secure_client(socket, key)

    def hang_up(self) -> None:
        """``handshake.Asker``: see there."""
        self.close()

    def close(self) -> None:
        """Free all sockets; questions in flight end with ``SideChannelError``. Idempotent."""
        # term, not destroy: sockets are closed by the threads that own them.
        self._context.term()


class _Ended(enum.Enum):
    """How a connection ended without an answer."""

    REFUSED = "the key is not taken"
    EARLY = "it was closed before it was set up; it is tried again"
    LOST = "it was closed: the question is gone, and is asked again"
    NOBODY = "nobody took the connection"
    LATE = "the time is over"


def _numeric(host: str, timeout_seconds: float) -> str:
    """The address of a host. Asked for here: libzmq does it on the thread that all its sockets
    share, and one name whose servers are silent would hold every question up."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    wanted = f"an address of {host}"
    slots = _look_ups
    if not slots.acquire(blocking=False):
        raise SideChannelError("side channel", wanted, f"{MAX_LOOK_UPS} names are being looked up")
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # A daemon, because nothing ends a lookup before its time: neither a caller nor the engine's
    # end waits for it.
    threading.Thread(
        target=_look_up, args=(host, slots, answers), name="hybridpd-lookup", daemon=True
    ).start()
    try:
        answer = answers.get(timeout=timeout_seconds)
    except queue.Empty:
        raise SideChannelError("side channel", wanted, "none in time") from None
    if isinstance(answer, Exception):
        raise SideChannelError("side channel", wanted, str(answer)) from answer
    found: dict[int, str] = {}
    for family, _, _, _, address in answer:
        found.setdefault(family, str(address[0]))
    return found.get(sockets.AF_INET) or next(iter(found.values()))


def _look_up(
    host: str, slots: threading.BoundedSemaphore, answers: "queue.SimpleQueue[Any]"
) -> None:
    """What the resolver says of a host, or its error."""
    answer: Any
    try:
        answer = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
    except Exception as error:
        answer = error
    slots.release()
    answers.put(answer)


def _none_in_time(endpoint: str, early: int) -> SideChannelError:
    hint = "is the engine up, and the port open between the pods?"
    if early:
        # A server with a key often hangs up before it has told a client without one why.
        hint = (
            f"{early} connections were closed before they were set up: does it ask for a key, "
            "and this side has none (side_channel_key_file)?"
        )
    return SideChannelError("side channel", f"an answer from {endpoint}", "none in time", hint)


def _await(
    socket: "zmq.Socket[bytes]", watch: Watch, endpoint: str, with_key: bool, deadline: float
) -> bytes | _Ended:
    """The answer, or how the connection ended without one."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(watch.socket, zmq.POLLIN)
    early = False
    connect_by = min(deadline, time.monotonic() + CONNECT_SECONDS)
    while True:
        remaining = (deadline if watch.connected else connect_by) - time.monotonic()
        ready = dict(poller.poll(int(remaining * 1000) + 1)) if remaining > 0 else {}
        if socket in ready:
            return _only_frame(socket.recv_multipart(zmq.NOBLOCK), endpoint)
        if not ready:
            return _Ended.LATE if watch.connected else _Ended.NOBODY
        refused = watch.take()
        if KEY_ON_ONE_SIDE in refused:
            there, here = ("none", "one") if with_key else ("one", "none")
            raise SideChannelKeyError(
                "side channel key",
                "on both sides or on neither",
                f"{here} here and {there} at {endpoint}",
                "give both roles the same side_channel_key_file",
            )
        # A server that does not know the key only hangs up.
        if WRONG_KEY in refused or (with_key and UNFINISHED in refused):
            return _Ended.REFUSED
        early = early or UNFINISHED in refused
        if watch.lost:
            return _Ended.EARLY if early else _Ended.LOST


def _only_frame(frames: list[bytes], endpoint: str) -> bytes:
    if len(frames) != 1 or not frames[0]:
        raise SideChannelError(
            "side channel", f"one frame from {endpoint}", f"{len(frames)} frames"
        )
    return bytes(frames[0])
