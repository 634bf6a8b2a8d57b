"""A D rank meets its prefill engines before a request names them.

Who lives behind the names of ``prefill_peers`` is asked on threads of its own; the answer is only
an engine id. From then on the peer book is asked for that engine the way a request would: one
handshake per engine, whoever wants it first, with the book's own pauses and bounds. A request that
comes meanwhile finds the engine ready, or its handshake begun, or begins it itself.

An engine that was met stays met while it answers. One that no name leads to any more, or that does
not answer, goes when it was not used for a while: its last readers may still be at work.
"""

import logging
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from hybridpd_connector.errors import (
    ConnectorError,
    RefusedError,
    SideChannelKeyError,
    VersionError,
)
from hybridpd_connector.named_peers import FIELD, MAX_ADDRESSES, Pace, PeerName, Rounds
from hybridpd_connector.peer_state import PeerState
from hybridpd_connector.peers import Address, PeerManager

logger = logging.getLogger(__name__)

LEFT_IDLE_SECONDS: Final = 60.0
"""How long an engine that no name leads to stays, counted from its last use."""

FAILURES_UNTIL_WARNING: Final = 5
"""Lookups of a host that fail in a row before that is a warning: about a minute."""

_NOBODY: Final = (socket.EAI_NONAME, socket.EAI_NODATA)
_MAX_TOLD: Final = 4 * MAX_ADDRESSES


class _Found(NamedTuple):
    host: str
    addresses: tuple[str, ...]
    error: str


class _Said(NamedTuple):
    address: Address
    engine_id: str
    error: Exception | None


class Meetings:
    """See the module. ``tick`` and ``attend`` are for one thread, the ticker's."""

    def __init__(
        self,
        names: Sequence[PeerName],
        ask: Callable[[Address], str],
        is_ours: Callable[[str], bool] = lambda engine_id: False,
        look_up: Callable[[str], Sequence[str]] | None = None,
        pace: Pace | None = None,
    ) -> None:
        """``ask`` says who lives at an address, or raises; it blocks for seconds at most.
        ``is_ours``: is this engine id our own engine's? ``look_up``: a host's addresses, or
        ``OSError``; it may block for long.
        """
        pace = pace or Pace()
        self._rounds = Rounds(names, pace)
        self._ask = ask
        self._is_ours = is_ours
        self._look_up = look_up or look_up_host
        self._found: queue.SimpleQueue[_Found | _Said] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(pace.max_asked, thread_name_prefix="hybridpd-meeting")
        self._begun = threading.Event()
        self._asked_for: dict[Address, str] = {}
        self._held: dict[Address, str] = {}
        self._failures: dict[str, int] = {}
        self._told: dict[tuple[object, ...], None] = {}

    def __repr__(self) -> str:
        return f"Meetings({self._rounds!r}, held={len(self._held)})"

    def begin(self) -> None:
        """The engine has warmed up. Not before: what a handshake does on a GPU would disturb the
        recording of its graphs. Safe from any thread, any number of times."""
        self._begun.set()

    def tick(self, now: float) -> None:
        """Take what was found out, and start what is due. Never waits."""
        if not self._begun.is_set():
            return
        while not self._found.empty():
            found = self._found.get_nowait()
            if isinstance(found, _Found):
                self._looked_up(found, now)
            else:
                self._heard(found, now)
        errands = self._rounds.due(now)
        for host in errands.hosts:
            # Daemons, because a lookup may hang for as long as it likes; one per host at a time.
            threading.Thread(
                target=self._run_look_up, args=(host,), name="hybridpd-lookup", daemon=True
            ).start()
        for address in errands.addresses:
            self._pool.submit(self._run_ask, address)

    def attend(self, peers: PeerManager[Any], now: float) -> None:
        """Keep the book's peers as the names say. For whoever holds the book's lock."""
        for engine_id in self._rounds.take_left():
            peers.hasten(engine_id, LEFT_IDLE_SECONDS)
        known = self._rounds.known()
        peers.trust(known)
        for told in (self._asked_for, self._held):
            for address in [a for a, engine_id in told.items() if known.get(a) != engine_id]:
                del told[address]
        for address, engine_id in known.items():
            self._keep(peers, address, engine_id, now)

    def close(self) -> None:
        """Start nothing any more. Questions on their way end by themselves. Idempotent."""
        self._begun.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _keep(self, peers: PeerManager[Any], address: Address, engine_id: str, now: float) -> None:
        state, answers = peers.state(engine_id, address), self._rounds.answers(address)
        asked_for = self._asked_for.get(address) == engine_id
        if state is PeerState.UNKNOWN and self._held.get(address) == engine_id:
            # It was in the book, and was dropped: it may have died, or be another one by now.
            self._rounds.dropped(address, now)
        elif state is PeerState.READY or (state is PeerState.REFUSED and asked_for):
            # Two engines do not come to fit each other later: a refused one is only kept in view.
            if address not in self._held:
                self._held[address] = engine_id
                if state is PeerState.READY and asked_for:
                    logger.info("engine %s at %s:%d is met ahead of requests", engine_id, *address)
            if answers:
                peers.touch(engine_id, now)
        elif answers and peers.want(engine_id, address, now).attempt is not None:
            self._asked_for[address] = engine_id

    def _looked_up(self, found: _Found, now: float) -> None:
        if found.error:
            self._rounds.not_looked_up(found.host, now)
            failures = self._failures[found.host] = self._failures.get(found.host, 0) + 1
            if failures in (1, FAILURES_UNTIL_WARNING):
                # A name that has no address yet may look like this too: not a warning at once.
                logger.log(
                    logging.INFO if failures == 1 else logging.WARNING,
                    "%s: %s cannot be looked up: %s", FIELD, found.host, found.error,
                )  # fmt: skip
            return
        self._failures.pop(found.host, None)
        self._rounds.looked_up(found.host, found.addresses, now)
        left_out = self._rounds.left_out
        if left_out:
            self._tell(
                logging.WARNING, (found.host, "left out"),
                "%s: %s has %d addresses more than the %d that are met ahead",
                FIELD, found.host, left_out, MAX_ADDRESSES,
            )  # fmt: skip
        if not found.addresses:
            self._tell(
                logging.INFO, (found.host, "empty"), "%s: %s has no address yet", FIELD, found.host
            )

    def _heard(self, said: _Said, now: float) -> None:
        error = said.error
        if error is None:
            engine_id = "" if self._is_ours(said.engine_id) else said.engine_id
            self._rounds.answered(said.address, engine_id, now)
            return
        # An engine that is not up yet is normal; one that says no is not.
        refused = isinstance(error, VersionError | SideChannelKeyError) or (
            isinstance(error, RefusedError) and not error.retryable
        )
        self._rounds.silent(said.address, now, refused=refused)
        self._tell(
            logging.WARNING if refused or not isinstance(error, ConnectorError) else logging.INFO,
            (said.address, type(error)),
            "%s: nobody to meet at %s:%d yet: %s",
            FIELD, *said.address, error if isinstance(error, ConnectorError) else repr(error),
        )  # fmt: skip

    def _tell(self, level: int, key: tuple[object, ...], text: str, *arguments: object) -> None:
        """Once per key: this goes round for as long as the engine lives."""
        if key not in self._told and len(self._told) < _MAX_TOLD:
            self._told[key] = None
            logger.log(level, text, *arguments)

    def _run_look_up(self, host: str) -> None:
        try:
            found = _Found(host, tuple(self._look_up(host)), "")
        except Exception as error:
            found = _Found(host, (), str(error) or repr(error))
        self._found.put(found)

    def _run_ask(self, address: Address) -> None:
        try:
            said = _Said(address, self._ask(address), None)
        except Exception as error:
            said = _Said(address, "", error)
        self._found.put(said)


def look_up_host(host: str) -> tuple[str, ...]:
    """All addresses of a host; none when it has none. ``OSError`` when nobody could say."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NOBODY:
            return ()
        raise
    return tuple(sorted({str(sockaddr[0]) for *_, sockaddr in found}))
