"""Connections of readers that end by silence or by a last byte, and never by a reset.

A reader that dies, or closes with unread bytes, has its host answer every packet with a TCP reset.
A reset makes the next ``send`` fail at once, in the middle of whatever the sender is doing. Where
that is UCX, answering requests it has already taken out of the socket, it aborts the process
(``agent_readers``). Without resets a dead connection still takes bytes, until the kernel sees that
nobody acknowledges them; by then nothing is left to answer.

The kernel does it: a socket filter, which needs no privilege and which accepted connections inherit
from the socket they were accepted on. Segments with RST set are dropped, all others pass.
"""

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

SILENCE_SECONDS = 180
"""How long a connection lives at least whose peer acknowledges nothing, or takes nothing. Longer
than decode waits for a read: a reader that is late is no dead one."""
PROBE_SECONDS = 10
"""Between two questions to a peer that has nothing to say."""

_TABLE, _TABLE_6 = Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")
_DESCRIPTORS = "/proc/self/fd"
_LISTEN = "0A"
_SO_ATTACH_FILTER = 26
# Classic BPF, (code, jump if true, jump if false, constant) per instruction. A filter of a TCP
# socket sees a segment from its TCP header on: byte 13 has the flags, RST is bit 2.
_INSTRUCTIONS = (
    (0x30, 0, 0, 13),  # load byte 13
    (0x45, 0, 1, 0x04),  # RST set? else skip one
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # keep all of it
)
_FILTER = b"".join(struct.pack("HBBI", *instruction) for instruction in _INSTRUCTIONS)


def listening_sockets() -> set[tuple[int, str]]:
    """This process's TCP sockets that accept connections: file descriptor, and which socket that
    is, since numbers come again. ``OSError``: the system does not show them."""
    accepting = accepting_inodes(_TABLE.read_text())
    with contextlib.suppress(FileNotFoundError):  # no IPv6
        accepting |= accepting_inodes(_TABLE_6.read_text())
    found = set()
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # closed meanwhile
            link = os.readlink(f"{_DESCRIPTORS}/{name}")
            if link in accepting:
                found.add((int(name), link))
    return found


def accepting_inodes(table: str) -> set[str]:
    """Sockets in state LISTEN of a text such as /proc/self/net/tcp, as links to them read."""
    rows = (line.split() for line in table.splitlines()[1:])
    return {f"socket:[{row[9]}]" for row in rows if len(row) > 9 and row[3] == _LISTEN}


def ignore_resets(listening: Iterable[int], silence_seconds: float) -> None:
    """Connections accepted on these sockets from now on do not hear resets, and end after
    ``silence_seconds``. ``OSError``: the kernel does not let us."""
    instructions = ctypes.create_string_buffer(_FILTER, len(_FILTER))
    program = struct.pack("HP", len(_INSTRUCTIONS), ctypes.addressof(instructions))
    options = (
        (socket.SOL_SOCKET, _SO_ATTACH_FILTER, program),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silence_seconds * 1000)),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_SECONDS),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS),
    )
    for descriptor in listening:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            for level, option, value in options:
                copy.setsockopt(level, option, value)
