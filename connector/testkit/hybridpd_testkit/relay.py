"""A bad line: packets between two network interfaces, delayed and lost by a fixed seed.

Two TUN devices live in the wire's namespace. Packets that come in from one host are routed into
the device of its side; a thread here reads them, drops some, holds the others back for a while and
writes them to the other side's device, from where the kernel routes them on. Order is kept, as on
a line.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybridpd_testkit.processes import inside_namespace

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_PACKET_BYTES = 65536
_IPV4 = 4
_IDLE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Weather:
    """One way. ``lost``: the share of packets that never arrive, 0 to 1."""

    delay_seconds: float
    lost: float
    seed: int


class Relay:
    """Carries packets until ``close``. ``devices``: the interface of each side, to route into."""

    def __init__(self, namespace: str, sides: Sequence[str], weather: Weather) -> None:
        self.devices = tuple(f"tun-{side}" for side in sides)
        self.passed = 0
        self.lost = 0
        self._weather = weather
        self._random = random.Random(weather.seed)
        with inside_namespace(namespace):
            self._files = [_open_tun(device) for device in self.devices]
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; the devices, and routes through them, go away."""
        os.write(self._stop_writer, b"x")
        self._thread.join()
        for file in (*self._files, self._stop_reader, self._stop_writer):
            os.close(file)

    def _run(self) -> None:
        waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
        while True:
            pause = _IDLE_SECONDS
            if waiting:
                pause = max(0.0, waiting[0][0] - time.monotonic())
            ready, _, _ = select.select([*self._files, self._stop_reader], [], [], pause)
            if self._stop_reader in ready:
                return
            for file in ready:
                waiting.extend(self._arrivals(file))
            while waiting and waiting[0][0] <= time.monotonic():
                _, target, packet = waiting.popleft()
                # The kernel refuses what it cannot route.
                with contextlib.suppress(OSError):
                    os.write(target, packet)

    def _arrivals(self, file: int) -> Iterator[tuple[float, int, bytes]]:
        (target,) = (other for other in self._files if other != file)
        packet = os.read(file, _PACKET_BYTES)
        if packet[0] >> 4 != _IPV4:
            return  # the device's own IPv6 greetings
        if self._random.random() < self._weather.lost:
            self.lost += 1
            return
        self.passed += 1
        yield time.monotonic() + self._weather.delay_seconds, target, packet


def _open_tun(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return file
