"""Small parts for running servers as processes: ports, process sessions, log tails, HTTP."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import random
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

# Below the range from which the kernel takes ports for outgoing connections, so that a port
# found free here is not handed to somebody else before the server binds it.
_PORT_RANGE = range(20000, 30000)
# "first-last": the part of them that programs which run beside others take ports from.
PORTS_VARIABLE = "HYBRIDPD_PORTS"
_HANDED_OUT: set[int] = set()
_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception|Failure):")
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET, _CLONE_NEWNS, _CLONE_NEWTIME = 0x40000000, 0x00020000, 0x00000080
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_LIBC = ctypes.CDLL(
    None, use_errno=True
)  # loaded here, since a forked child must not load anything


class HttpError(RuntimeError):
    """An HTTP answer that is not 200: ``status`` and ``body`` as the server sent them."""

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"{url}: expected HTTP 200, got {status}: {body[:500]}")
        self.status = status
        self.body = body


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on, another one at each call.

    Engines bind theirs tens of seconds later, so that a port that is free may have been given out.
    """
    first, _, last = os.environ.get(PORTS_VARIABLE, "").partition("-")
    ports = range(int(first), int(last) + 1) if last else _PORT_RANGE
    for port in random.sample(ports, len(ports)):
        if port in _HANDED_OUT:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            _HANDED_OUT.add(port)
            return port
    raise OSError(f"no free port left in {ports}")


def die_with_parent() -> None:
    """Run in the child: ask the kernel to end it when the starting thread goes away."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def enter_namespace(name: str) -> None:
    """Move this process, which has one thread, into a named network namespace. Root only.

    It also gets a view of /sys of its own: UCX looks there for the network's devices.
    """
    with open(f"/run/netns/{name}") as namespace:
        _set_network(namespace.fileno())
    _require(_LIBC.unshare(_CLONE_NEWNS), "unshare")
    _require(_LIBC.mount(b"", b"/", None, _MS_REC | _MS_SLAVE, None), "mount /")
    _require(_LIBC.mount(b"sysfs", b"/sys", b"sysfs", 0, None), "mount /sys")


def set_clock_ahead(seconds: int) -> None:
    """Put this process, which has one thread, into a time namespace. Root only."""
    _require(_LIBC.unshare(_CLONE_NEWTIME), "unshare")
    Path("/proc/self/timens_offsets").write_text(f"monotonic {seconds} 0\nboottime {seconds} 0\n")
    with open("/proc/self/ns/time_for_children") as namespace:
        _require(_LIBC.setns(namespace.fileno(), _CLONE_NEWTIME), "setns")


@contextlib.contextmanager
def inside_namespace(name: str) -> Iterator[None]:
    """Sockets and devices that this thread makes in the block belong to the namespace for good."""
    with open("/proc/thread-self/ns/net") as before:
        with open(f"/run/netns/{name}") as namespace:
            _set_network(namespace.fileno())
        try:
            yield
        finally:
            _set_network(before.fileno())


def _set_network(file: int) -> None:
    _require(_LIBC.setns(file, _CLONE_NEWNET), "setns")


def _require(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def session_members(session_id: int) -> Iterator[int]:
    """Process ids of a session, from /proc (zombies left out)."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # "pid (name with any characters) state ppid pgrp session …"
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) == session_id and fields[0] != "Z":
            yield int(entry.name)


class Leader(Protocol):
    """A process that leads its own session: a ``subprocess.Popen`` or a forked server."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...


def end_sessions(leaders: Sequence[Leader], grace_seconds: float = 15.0) -> None:
    """End processes that lead their own sessions, together, and all that stayed in the sessions."""
    alive = [leader for leader in leaders if leader.poll() is None]
    for leader in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while any(leader.poll() is None for leader in alive) and time.monotonic() < deadline:
        time.sleep(0.05)
    for leader in leaders:
        _kill_members(leader.pid)
        leader.poll()


def _kill_members(session_id: int, timeout_seconds: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while (members := list(session_members(session_id))) and time.monotonic() < deadline:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def log_tail(path: Path, lines: int = 25) -> str:
    """What a log says about a failure: the lines that name an error, and the last lines."""
    try:
        text = [line[:300] for line in path.read_text(errors="replace").splitlines()]
    except OSError as error:
        return f"(no log: {error})"
    errors = [line for line in text[:-lines] if _ERROR.search(line)]
    return "\n".join([*errors[:lines], *(["…"] if errors else []), *text[-lines:]])


def http_get(url: str, timeout_seconds: float = 10.0) -> str:
    """Body of a GET; ``HttpError`` unless 200, ``OSError`` when nobody answers to the end."""
    return _open(urllib.request.Request(url), timeout_seconds)


def http_post(
    url: str,
    document: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    timeout_seconds: float = 120.0,
) -> Any:
    """POST a JSON object, return the decoded JSON answer (None for an empty one)."""
    request = urllib.request.Request(
        url,
        data=json.dumps(document).encode(),
        headers={"Content-Type": "application/json", **(headers or {})},
    )
    body = _open(request, timeout_seconds)
    return json.loads(body) if body else None


def _open(request: urllib.request.Request, timeout_seconds: float) -> str:
    try:
        try:
            with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:
                body: bytes = answer.read()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            raise HttpError(request.full_url, error.code, said) from None
    except http.client.HTTPException as error:
        # A server that was killed in the middle of its answer is one that does not answer.
        raise ConnectionAbortedError(f"{request.full_url}: {error!r}") from error
    return body.decode()
