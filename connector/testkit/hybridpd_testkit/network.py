"""Two hosts and a wire between them on one machine: network namespaces, made by root.

    tests ──manage0── prefill host ──data0── wire ──data0── decode host ──manage0── tests

HTTP goes over ``manage0``, which nothing here disturbs. Everything between the two engines goes
over ``data0`` and through the wire, a namespace that forwards packets. There the link is cut
(its interface goes down, both hosts see silence), made slow (a token bucket) or long and lossy
(packets take the way through ``relay``). Linux moves the bytes, so what the engines see is TCP on
a bad line and nothing simulated.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hybridpd_testkit.engines import Place
from hybridpd_testkit.relay import Relay, Weather

HTTP_PORT = 8000
SIDE_CHANNEL_PORT = 5600
_NAMESPACES = Path("/run/netns")
_OURS = re.compile(r"hpd(\d+)-(prefill|decode|wire)")
_SIDES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Host:
    """One engine's side. ``namespace`` is its network; ``data`` its address on the wire."""

    side: str
    namespace: str
    manage: str
    data: str

    def place(self) -> Place:
        """Where to start an engine here."""
        return Place(
            namespace=self.namespace,
            http_host=self.manage,
            http_port=HTTP_PORT,
            data_host=self.data,
            side_channel_port=SIDE_CHANNEL_PORT,
        )


class Network:
    """The namespaces and the wire. Use ``network()``; needs root and iproute2."""

    def __init__(self, serial: int) -> None:
        """``serial`` tells networks of one machine apart: the process id of who makes it."""
        self._serial = serial
        self.wire = f"hpd{serial}-wire"
        self.wire_address = "198.19.2.1"  # as the decode host sees it
        number = _free_number(serial % 250)
        self.prefill, self.decode = (
            Host(
                side,
                f"hpd{serial}-{side}",
                manage=f"198.18.{number}.{4 * index + 2}",
                data=f"198.19.{index + 1}.2",
            )
            for index, side in enumerate(_SIDES)
        )
        self._relay: Relay | None = None

    def build(self) -> None:
        """Make everything."""
        self._make_namespace(self.wire)
        _in(self.wire, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for index, host in enumerate((self.prefill, self.decode)):
            self._make_namespace(host.namespace)
            self._connect_wire(host, index)
            self._connect_tests(host, index)

    def _make_namespace(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _connect_wire(self, host: Host, index: int) -> None:
        wire_end = host.side
        _run(
            *("ip", "link", "add", "data0", "netns", host.namespace, "type", "veth"),
            *("peer", "name", wire_end, "netns", self.wire),
        )
        gateway = f"198.19.{index + 1}.1"
        # What comes from this host takes the way through the relay when there is one.
        _run(*("ip", "-n", self.wire, "rule", "add", "iif", wire_end, "lookup", _table(index)))
        _run("ip", "-n", self.wire, "address", "add", f"{gateway}/24", "dev", wire_end)
        _run("ip", "-n", host.namespace, "address", "add", f"{host.data}/24", "dev", "data0")
        _run("ip", "-n", self.wire, "link", "set", wire_end, "up")
        _run("ip", "-n", host.namespace, "link", "set", "data0", "up")
        _run("ip", "-n", host.namespace, "route", "add", "198.19.0.0/16", "via", gateway)

    def _connect_tests(self, host: Host, index: int) -> None:
        ours = f"hpd{self._serial}{host.side[0]}"
        _run(
            *("ip", "link", "add", "manage0", "netns", host.namespace, "type", "veth"),
            *("peer", "name", ours),
        )
        number = host.manage.rpartition(".")[0]
        _run("ip", "address", "add", f"{number}.{4 * index + 1}/30", "dev", ours)
        _run("ip", "-n", host.namespace, "address", "add", f"{host.manage}/30", "dev", "manage0")
        _run("ip", "link", "set", ours, "up")
        _run("ip", "-n", host.namespace, "link", "set", "manage0", "up")

    def remove(self) -> None:
        """Remove everything; a namespace lives on until the last process in it has ended."""
        self.calm()
        for side in _SIDES:
            _try("ip", "link", "delete", f"hpd{self._serial}{side[0]}")
        for name in (self.prefill.namespace, self.decode.namespace, self.wire):
            _try("ip", "netns", "delete", name)

    def cut(self) -> None:
        """From now on no packet passes between the two hosts; neither is told."""
        _run("ip", "-n", self.wire, "link", "set", "prefill", "down")

    def mend(self) -> None:
        """End ``cut``. Does nothing to a link that is whole."""
        _run("ip", "-n", self.wire, "link", "set", "prefill", "up")

    def throttle(self, kilobits: int) -> None:
        """Let so many kilobits a second pass towards decode. The queue is as short as a real one:
        acknowledgements that wait behind seconds of data would stop what decode sends."""
        self._unthrottle()
        rate = ("rate", f"{kilobits}kbit", "burst", "3kb", "latency", "400ms")
        _run("tc", "-n", self.wire, "qdisc", "add", "dev", "decode", "root", "tbf", *rate)

    def _unthrottle(self) -> None:
        _try("tc", "-n", self.wire, "qdisc", "delete", "dev", "decode", "root")

    def weather(self, weather: Weather) -> Relay:
        """Delay and lose packets of both directions from now on."""
        self._clear()
        relay = Relay(self.wire, _SIDES, weather)
        self._relay = relay
        for index, device in enumerate(relay.devices):
            _run("ip", "-n", self.wire, "link", "set", device, "up")
            route = ("route", "add", "default", "dev", device, "table", _table(index))
            _run("ip", "-n", self.wire, *route)
        return relay

    def _clear(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def calm(self) -> None:
        """A whole, fast link without loss."""
        self._clear()
        self._unthrottle()
        _try("ip", "-n", self.wire, "link", "set", "prefill", "up")

    def bytes_to_decode(self) -> int:
        """Bytes that the wire has sent to the decode host so far, by the kernel's counter."""
        name = "statistics/tx_bytes"
        return int(_in(self.wire, "cat", f"/sys/class/net/decode/{name}"))


def _table(index: int) -> str:
    return str(101 + index)


def _in(namespace: str, *command: str) -> str:
    return _run("ip", "netns", "exec", namespace, *command)


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: expected exit code 0, got {done.stderr.strip()}")
    return done.stdout


def _try(*command: str) -> None:
    subprocess.run(command, check=False, capture_output=True)


def _free_number(first: int) -> int:
    """The third byte of our addresses towards the hosts: other runs may have theirs."""
    used = set(re.findall(r"198\.18\.(\d+)\.", _run("ip", "-o", "-4", "address")))
    return next(n % 250 for n in range(first, first + 250) if str(n % 250) not in used)


def _remove_leftovers() -> None:
    """What dead processes have left behind."""
    if not _NAMESPACES.is_dir():
        return
    for name in os.listdir(_NAMESPACES):
        found = _OURS.fullmatch(name)
        if found and not Path(f"/proc/{found[1]}").exists():
            _try("ip", "netns", "delete", name)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A network for this process, gone after the block."""
    _remove_leftovers()
    made = Network(os.getpid())
    try:
        made.build()
        yield made
    finally:
        made.remove()
