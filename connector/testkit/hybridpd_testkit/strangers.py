"""Strangers at a side channel: many raw TCP connections that say nothing, nonsense, or too little.

    python -m hybridpd_testkit.strangers 127.0.0.1 5600 --count 1000 --seconds 20 --again

Prints one JSON line when all have connected, and one at the end. It is a process of its own so that
its descriptors are not those of the server; in a test use ``started``. Nothing here needs zmq.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

_BACK_SECONDS = 0.5
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = _SIGNATURE + b"\x03\x01NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
_ADMITTED = GREETING + READY


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """What a stranger sends: pieces, one after the other, and the seconds between two of them."""

    pieces: tuple[bytes, ...]
    pause_seconds: float = 0.0


def _byte_by_byte(data: bytes) -> Behaviour:
    return Behaviour(tuple(bytes((byte,)) for byte in data), 1.0)


BEHAVIOURS: Mapping[str, Behaviour] = {
    "half_open": Behaviour(()),
    "http": Behaviour((b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",)),
    "zeros": Behaviour((bytes(4096),)),
    "ones": Behaviour((b"\xff" * 4096,)),
    "one_byte_a_second": _byte_by_byte(GREETING),
    "other_version": Behaviour((_SIGNATURE + b"\x09\x09" + bytes(52),)),
    "greeting_only": Behaviour((GREETING,)),
    "bad_command": Behaviour((GREETING + b"\x04\xff" + b"x" * 255,)),
    # These get past the handshake of a server without a key.
    "huge_frame": Behaviour((_ADMITTED, b"\x02" + (1 << 62).to_bytes(8, "big"))),
    "bad_question": Behaviour((_ADMITTED + b"\x00\x07garbage",)),
    "wrong_wire_version": Behaviour((_ADMITTED + b"\x00\x06HPDH\xff\xff",)),
    "many_frames": Behaviour((_ADMITTED + b"\x01\x01x" * 1000,)),
    "silent_after_handshake": Behaviour((_ADMITTED,)),
}


@dataclasses.dataclass
class _Stranger:
    behaviour: Behaviour
    sent: int = 0
    due_at: float = 0.0


class Crowd:
    """``count`` strangers at one address, their behaviours in turn. Single-threaded: ``step``."""

    def __init__(
        self, address: tuple[str, int], count: int, behaviours: Sequence[str], *, again: bool
    ) -> None:
        """``again``: who is thrown out or not let in comes back after half a second, for ever."""
        self._address = address
        self._again = again
        self._selector = selectors.DefaultSelector()
        self._outside: list[Behaviour] = []
        self._back_at = 0.0
        self.opened = self.thrown_out = self.not_let_in = 0
        turns = itertools.cycle([BEHAVIOURS[name] for name in behaviours])
        for behaviour in itertools.islice(turns, count):
            self._come(behaviour)

    @property
    def here(self) -> int:
        return len(self._selector.get_map())

    def step(self, now: float) -> None:
        """Send what is due, notice who was thrown out; waits at most a tenth of a second."""
        if self._outside and now >= self._back_at:
            # Not at once: those who are thrown out together would leave no gap for anybody.
            self._back_at = now + _BACK_SECONDS
            outside, self._outside = self._outside, []
            for behaviour in outside if self._again else ():
                self._come(behaviour)
        for key, _ in self._selector.select(0.1):
            connection: socket.socket = key.fileobj  # type: ignore[assignment]
            try:
                if connection.recv(65536):
                    continue
            except BlockingIOError:
                continue
            except OSError:
                pass
            self._leave(connection, key.data)
        for key in [*self._selector.get_map().values()]:
            stranger: _Stranger = key.data
            if stranger.sent < len(stranger.behaviour.pieces) and stranger.due_at <= now:
                self._say(key.fileobj, stranger, now)  # type: ignore[arg-type]

    def close(self) -> None:
        for key in [*self._selector.get_map().values()]:
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _come(self, behaviour: Behaviour) -> None:
        try:
            connection = socket.create_connection(self._address, timeout=5)
        except OSError:
            self.not_let_in += 1
            self._outside.append(behaviour)
            return
        self.opened += 1
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, _Stranger(behaviour))

    def _say(self, connection: socket.socket, stranger: _Stranger, now: float) -> None:
        piece = stranger.behaviour.pieces[stranger.sent]
        stranger.sent += 1
        stranger.due_at = now + stranger.behaviour.pause_seconds
        try:
            connection.send(piece)
        except BlockingIOError:
            stranger.sent -= 1
        except OSError:
            self._leave(connection, stranger)

    def _leave(self, connection: socket.socket, stranger: _Stranger) -> None:
        self._selector.unregister(connection)
        connection.close()
        self.thrown_out += 1
        self._outside.append(stranger.behaviour)


@contextlib.contextmanager
def started(
    host: str, port: int, count: int, behaviours: Sequence[str] = (), *, again: bool = False
) -> "Iterator[subprocess.Popen[str]]":
    """A crowd in a process of its own, all of it connected; gone at the end of the block."""
    # As a file: it needs nothing of the kit, and no path to it.
    command = [sys.executable, __file__, host, str(port)]
    command += ["--count", str(count), *(["--again"] if again else [])]
    command += ["--behaviours", *behaviours] if behaviours else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        try:
            if run.stdout is None or not run.stdout.readline():
                raise RuntimeError("the strangers ended before they had connected")
            yield run
        finally:
            run.kill()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="Strangers at a side channel.")
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--again", action="store_true", help="who is thrown out comes back")
    names = [*BEHAVIOURS]
    parser.add_argument("--behaviours", nargs="+", choices=names, default=names, metavar="NAME")
    options = parser.parse_args()
    started_at = time.monotonic()
    crowd = Crowd(
        (options.host, options.port), options.count, options.behaviours, again=options.again
    )
    try:
        crowd.step(time.monotonic())
        _say(crowd)
        while time.monotonic() < started_at + options.seconds and (crowd.here or options.again):
            crowd.step(time.monotonic())
            if not crowd.here:
                time.sleep(0.1)
    finally:
        _say(crowd)
        crowd.close()
    return 0


def _say(crowd: Crowd) -> None:
    numbers = {
        "here": crowd.here,
        "opened": crowd.opened,
        "thrown_out": crowd.thrown_out,
        "not_let_in": crowd.not_let_in,
    }
    print(json.dumps(numbers), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
