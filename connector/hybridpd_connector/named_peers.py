"""The prefill engines that a D rank is told by name: where they are, and when to ask for whom.

``prefill_peers`` names hosts; a host may have many addresses that come and go (the pods behind a
headless Service). ``Rounds`` decides when a host is looked up and when an address is asked who
lives there. It is pure: ``now`` is an argument, and whoever does the work tells what came of it.

    address      looked up   answered   silent, no   its engine dropped   gone from the name
    unknown      due         -          -            -                    -
    due          -           -          -            -                    forgotten
    asked        -           known      due, later   -                    forgotten
    known        -           known      due, later   due, later           forgotten, engine left

A known address is asked again every ``check_seconds``: another engine may live there by then. A
silent one is asked after a pause that doubles, one that said no after a long one. What is told of a
forgotten address changes nothing. A lookup that fails changes nothing either: a name server that is
down takes no engine away.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from hybridpd_connector.peers import Address
from hybridpd_connector.vllm_compat import UnsupportedEngineError

FIELD: Final = "prefill_peers"
MAX_NAMES: Final = 64
MAX_PORTS: Final = 64
"""Ports of one name: data parallel ranks of an engine listen side by side."""
MAX_ADDRESSES: Final = 256
"""Addresses in all; further ones are met when a request names them, as without this setting."""

_HOST: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?"
_NAME: Final = re.compile(
    rf"(?:(?P<host>{_HOST})|\[(?P<ipv6>[0-9A-Fa-f:.]{{2,45}})\])"
    r":(?P<first>[0-9]{1,5})(?:-(?P<last>[0-9]{1,5}))?"
)
_MAX_PORT: Final = 65535


@dataclasses.dataclass(frozen=True)
class PeerName:
    """A host, and the ports that engines listen on there."""

    host: str
    ports: range


def parse_names(value: object) -> tuple[PeerName, ...]:
    """The setting: a list of ``host:port`` or ``host:first-last``, IPv6 addresses in brackets.

    ``UnsupportedEngineError`` says which entry is none, and what one looks like.
    """
    if not isinstance(value, list | tuple) or len(value) > MAX_NAMES:
        got = f"{len(value)} of them" if isinstance(value, list | tuple) else value
        raise UnsupportedEngineError(FIELD, f"a list of at most {MAX_NAMES} names", got)
    return tuple(_parse(item) for item in value)


def _parse(item: object) -> PeerName:
    found = _NAME.fullmatch(item) if isinstance(item, str) else None
    if found is not None:
        first = int(found["first"])
        ports = range(first, int(found["last"] or first) + 1)
        if first >= 1 and ports.stop - 1 <= _MAX_PORT and 1 <= len(ports) <= MAX_PORTS:
            return PeerName(found["host"] or found["ipv6"], ports)
    raise UnsupportedEngineError(
        FIELD,
        f"host:port or host:first-last, ports 1 to {_MAX_PORT}, at most {MAX_PORTS} of them",
        item,
        "for example prefill.default.svc:5600",
    )


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds between lookups of a name (pauses double while nothing new is found), and between
    questions: ``check``: to an address whose engine is known; ``refused``: to one that said no (it
    has another key, or version); the others: to a silent one."""

    lookup_seconds: float = 5.0
    longest_lookup_seconds: float = 30.0
    check_seconds: float = 10.0
    first_pause_seconds: float = 1.0
    longest_pause_seconds: float = 8.0
    refused_seconds: float = 30.0
    max_asked: int = 8


@dataclasses.dataclass(frozen=True)
class Errands:
    """What is due now: hosts to look up, and addresses to ask. The caller reports on each."""

    hosts: tuple[str, ...]
    addresses: tuple[Address, ...]


@dataclasses.dataclass
class _Host:
    ports: tuple[int, ...]
    pause: float
    due_at: float = 0.0
    looking: bool = False
    found: frozenset[Address] = frozenset()


@dataclasses.dataclass
class _Door:
    """An address. ``engine_id``: who answered last, "" nobody yet, or nobody that counts."""

    due_at: float
    asked: bool = False
    silences: int = 0
    engine_id: str = ""


class Rounds:
    """See the module. Not thread-safe."""

    def __init__(self, names: Sequence[PeerName], pace: Pace | None = None) -> None:
        self._pace = pace or Pace()
        ports: dict[str, set[int]] = {}
        for name in names:
            ports.setdefault(name.host, set()).update(name.ports)
        self._hosts = {
            host: _Host(tuple(sorted(numbers)), self._pace.lookup_seconds)
            for host, numbers in ports.items()
        }
        self._doors: dict[Address, _Door] = {}
        self._left: list[str] = []
        self.left_out = 0
        """Addresses beyond ``MAX_ADDRESSES`` at the last lookup of each name that had any."""

    def __repr__(self) -> str:
        return (
            f"Rounds(names={len(self._hosts)}, addresses={len(self._doors)}, "
            f"known={len(self.known())})"
        )

    def due(self, now: float) -> Errands:
        """What has to be done now. It counts as being done until the caller says how it ended."""
        hosts = [h for h, item in self._hosts.items() if not item.looking and item.due_at <= now]
        for host in hosts:
            self._hosts[host].looking = True
        free = self._pace.max_asked - sum(door.asked for door in self._doors.values())
        waiting = [
            address
            for address, door in self._doors.items()
            if not door.asked and door.due_at <= now
        ]
        # Who has waited longest first: silent addresses must not keep the others waiting.
        waiting.sort(key=lambda address: self._doors[address].due_at)
        addresses = waiting[: max(0, free)]
        for address in addresses:
            self._doors[address].asked = True
        return Errands(tuple(hosts), tuple(addresses))

    def looked_up(self, host: str, found: Iterable[str], now: float) -> None:
        """All addresses that ``host`` has now; none: it has no engine any more.

        Where there are too many, those stay that were found before.
        """
        item = self._hosts[host]
        every = {Address(one, port) for one in found for port in item.ports}
        others = {a for one in self._hosts.values() if one is not item for a in one.found}
        mine = sorted(every - others, key=lambda address: (address not in item.found, address))
        room = MAX_ADDRESSES - len(others)
        before, item.found = item.found, frozenset(mine[:room]) | (every & others)
        self.left_out = len(every) - len(item.found)
        for address in sorted(item.found.difference(self._doors)):
            self._doors[address] = _Door(now)
        for address in before - item.found - others:
            self._forget(address)
        self._look_again(item, now, news=item.found != before)

    def not_looked_up(self, host: str, now: float) -> None:
        """The lookup failed: what was found before still counts."""
        self._look_again(self._hosts[host], now, news=False)

    def answered(self, address: Address, engine_id: str, now: float) -> None:
        """``engine_id`` lives there. "": somebody who is not to be met, such as this engine."""
        door = self._doors.get(address)
        if door is None:
            return
        before, door.engine_id = door.engine_id, engine_id
        door.asked, door.silences = False, 0
        door.due_at = now + self._pace.check_seconds
        if before != engine_id:
            self._leave(before)

    def silent(self, address: Address, now: float, *, refused: bool = False) -> None:
        """No usable answer. A known engine stays known: one question may get lost. ``refused``:
        there is somebody, and asking soon again would not help."""
        door = self._doors.get(address)
        if door is None:
            return
        door.asked = False
        self._pause(door, now)
        if refused:
            door.due_at = now + self._pace.refused_seconds

    def dropped(self, address: Address, now: float) -> None:
        """Nobody holds the link to the engine that answered there any more: ask who is there."""
        door = self._doors.get(address)
        if door is not None and door.engine_id:
            door.engine_id = ""
            self._pause(door, now)

    def known(self) -> dict[Address, str]:
        """Who lives where, of all that have answered."""
        return {address: door.engine_id for address, door in self._doors.items() if door.engine_id}

    def answers(self, address: Address) -> bool:
        """Did the last question to a known address get an answer?"""
        return self._doors[address].silences == 0

    def take_left(self) -> list[str]:
        """Engines that no name leads to any more, each once."""
        left, self._left = self._left, []
        return left

    def addresses(self) -> Mapping[Address, bool]:
        """All addresses, and whether each is being asked."""
        return {address: door.asked for address, door in self._doors.items()}

    def _pause(self, door: _Door, now: float) -> None:
        pause = self._pace.first_pause_seconds * 2 ** min(door.silences, 30)
        door.silences += 1
        door.due_at = now + min(pause, self._pace.longest_pause_seconds)

    def _look_again(self, item: _Host, now: float, *, news: bool) -> None:
        item.looking = False
        doubled = min(2 * item.pause, self._pace.longest_lookup_seconds)
        item.due_at = now + (self._pace.lookup_seconds if news else item.pause)
        item.pause = self._pace.lookup_seconds if news else doubled

    def _forget(self, address: Address) -> None:
        self._leave(self._doors.pop(address).engine_id)

    def _leave(self, engine_id: str) -> None:
        if engine_id and engine_id not in self.known().values():
            self._left.append(engine_id)
