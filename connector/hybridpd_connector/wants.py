"""Which prefills the requests of one D rank want: renewed while wanted, released when not.

Renewals and releases go to *all* ranks of P, also to those that this rank reads nothing from: each
of them keeps blocks of its own. Nothing here waits: what cannot be sent now is sent when the peer
is ready, and becomes worthless when P's lease has run out anyway.
"""

import collections
import dataclasses
import logging
from collections.abc import Iterable

from hybridpd_connector.agent_api import Agent
from hybridpd_connector.errors import AgentError, shorten
from hybridpd_connector.leases import ConsumerLeases, LeaseKey
from hybridpd_connector.metadata import Interest
from hybridpd_connector.notifications import Release, encode, renewals
from hybridpd_connector.peer_link import LocalCache, PeerLink
from hybridpd_connector.peers import Address, PeerManager
from hybridpd_connector.request_blocks import parent_of
from hybridpd_connector.seals import is_sealed
from hybridpd_connector.transfer_params import RemotePrefill

logger = logging.getLogger(__name__)

RELEASED = "already_released"
PEER_REFUSED = "peer_refused"

MAX_OWED = 4096
"""Releases kept for a peer that is not ready yet; P's lease ends those that are forgotten."""

MAX_OWED_ENGINES = 256
"""Engines that releases are kept for; the one that waits longest is forgotten first."""

OWED_SECONDS = 120.0
"""How long hands are shaken only to release: whoever wrote the offer may have made P up."""

LEAVING_SECONDS = 10.0
"""A message to a rank that was never spoken to waits for a connection, and that for our progress:
so long after the last one progress is made, also when nothing is wanted any more."""

LINGER_SECONDS = 2.0
"""One of n samples may be read before its siblings arrive: their shared release waits so long."""


@dataclasses.dataclass
class Want:
    """A D request with its prefill, from arrival until the lease is dropped.

    ``refusal``: why it must not be loaded any more, empty while it may be; a lease is held then.
    ``detail``: what is known of that beyond the reason. ``sealed``: P has offered exactly this.
    """

    remote: RemotePrefill
    key: LeaseKey
    refusal: str
    arrived_at: float
    detail: str = ""
    sealed: bool = False

    @property
    def address(self) -> Address:
        return Address(self.remote.host, self.remote.port)


@dataclasses.dataclass
class _Owed:
    """Releases for an engine that is not ready, each with its want; worthless after ``until``."""

    address: Address
    until: float = 0.0
    releases: collections.deque[tuple[Want, bytes]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=MAX_OWED)
    )


class Wants:
    """See the module. Not thread-safe: the consumer's lock guards it."""

    def __init__(self, local: LocalCache, agent: Agent, peers: PeerManager[PeerLink]) -> None:
        self._local = local
        self._agent = agent
        self._peers = peers
        self._leases = ConsumerLeases()
        self._wants: dict[str, Want] = {}
        self._unsent: dict[str, set[str]] = {}
        self._owed: dict[str, _Owed] = {}
        self._sent_until = 0.0
        self._stalled = False
        self._left: list[tuple[Want, str]] = []
        self._lingering: collections.deque[tuple[float, Want, str]] = collections.deque()

    def __repr__(self) -> str:
        return (
            f"Wants(requests={len(self._wants)}, leases={self._leases.wanted}, "
            f"owed={len(self._owed)}, lingering={len(self._left) + len(self._lingering)})"
        )

    def idle(self, now: float) -> bool:
        """Nothing to renew, nothing to send, and nothing that may still be leaving."""
        return not self._leases.wanted and not self._owed and now >= self._sent_until

    def find(self, request_id: str) -> Want | None:
        return self._wants.get(request_id)

    def arrive(self, interest: Interest, now: float) -> None:
        """A request arrives: its lease is renewed from now on, and hands are shaken early."""
        remote = interest.remote
        key = LeaseKey(remote.engine_id, remote.request_id, remote.sequence, remote.seal)
        earlier = self._wants.get(interest.request_id)
        if earlier is not None and earlier.key != key:
            # Aborted, and its id has come again before the abort was told.
            self.let_go(interest.request_id, now)
        leased = self._leases.acquire(key, interest.request_id, remote.lease_seconds, now)
        want = Want(remote, key, "" if leased else RELEASED, now)
        self._wants[interest.request_id] = want
        if leased:
            self._peers.count_request(remote.engine_id)
            self._peers.want(remote.engine_id, want.address, now)

    def let_go(self, request_id: str, now: float) -> None:
        """The request needs its prefill no longer: read, failed, or aborted. Idempotent.

        ``drop_left`` tells P: whoever waits for this request's load does not wait for that too.
        """
        want = self._wants.pop(request_id, None)
        if want is None or want.refusal:
            return
        if parent_of(request_id) is not None:
            self._lingering.append((now + LINGER_SECONDS, want, request_id))
        else:
            self._left.append((want, request_id))

    def give_up(self, engine_id: str, address: Address, why: str) -> None:
        """An engine refused, for good: requests that still want it there must not disturb those
        that want the engine which lives there now. Those that want it elsewhere go on: any offer
        may name any address."""
        there = self._at(engine_id, address)
        for _, request_id in self._leases.forget(engine_id, there):
            if request_id in self._wants:
                want = self._wants[request_id]
                want.refusal, want.detail = PEER_REFUSED, why
        if not self._leases.wants_of(engine_id):
            self._unsent.pop(engine_id, None)
        if engine_id in self._owed and self._owed[engine_id].address == address:
            del self._owed[engine_id]

    def _at(self, engine_id: str, address: Address) -> set[str]:
        """Requests that want this engine at this address, or wanted it just now."""
        wants = [*self._wants.items()]
        wants += [(request_id, want) for _, want, request_id in self._lingering]
        return {
            request_id
            for request_id, want in wants
            if want.key.engine_id == engine_id and want.address == address
        }

    def drop_left(self, now: float) -> None:
        """Drop the prefills of requests that have let go, and let go for long enough."""
        if self._left:
            left, self._left = self._left, []
            for want, request_id in left:
                self._drop(want, request_id, now)
        while self._lingering and self._lingering[0][0] <= now:
            _, want, request_id = self._lingering.popleft()
            self._drop(want, request_id, now)

    def send_due(self, now: float, stall: str = "") -> None:
        """Send releases that are owed and renewals that are due, as far as peers are ready. With a
        ``stall`` no renewals."""
        self._send_owed(now)
        self._tell_stall(stall)
        if stall:
            return
        for engine_id, p_requests in self._leases.renewals(now).items():
            self._unsent.setdefault(engine_id, set()).update(p_requests)
        ready = self._peers.ready()
        for engine_id in [engine_id for engine_id in self._unsent if engine_id in ready]:
            self._peers.touch(engine_id, now)
            p_requests_due = sorted(self._unsent.pop(engine_id))
            messages = list(renewals(self._local.engine_id, p_requests_due))
            self._send(ready[engine_id], messages, now)
        self._reach_out(now)

    def _tell_stall(self, stall: str) -> None:
        if stall and self._leases.wanted and not self._stalled:
            logger.warning(
                "leases are not renewed until it goes on (%d prefills): %s",
                self._leases.wanted,
                stall,
            )
            self._stalled = True
        elif not stall:
            self._stalled = False

    def _reach_out(self, now: float) -> None:
        """Shake hands again with engines that are owed a renewal and are not ready."""
        addresses = {
            want.key.engine_id: want.address
            for want in self._wants.values()
            if want.key.engine_id in self._unsent
        }
        for engine_id, address in addresses.items():
            self._peers.want(engine_id, address, now)

    def _drop(self, want: Want, request_id: str, now: float) -> None:
        """Release on every P rank, once nobody here uses the prefill any more."""
        again = self._wants.get(request_id)
        if again is not None and not again.refusal and again.key == want.key:
            return
        if not self._leases.drop(want.key, request_id):
            return
        unsent = self._unsent.get(want.key.engine_id, set())
        unsent.discard(want.key.p_request)
        if not unsent:
            # Its engine may never be ready again, and nobody would look at an empty set.
            self._unsent.pop(want.key.engine_id, None)
        message = encode(
            Release(
                p_request=want.key.p_request,
                sequence=want.key.sequence,
                d_engine=self._local.engine_id,
                d_request=shorten(request_id) or "-",
                d_rank=self._local.placement.rank,
                d_tp_size=self._local.layout.tp_size,
            )
        )
        link = self._peers.ready().get(want.key.engine_id)
        if link is not None and want.key.engine_id not in self._owed:
            self._send(link, _offered(link, [(want, message)]), now)
            return
        owed = self._owed.setdefault(want.key.engine_id, _Owed(want.address))
        owed.releases.append((want, message))
        owed.until = max(owed.until, now + min(want.remote.lease_seconds, OWED_SECONDS))
        if len(self._owed) > MAX_OWED_ENGINES:
            del self._owed[next(iter(self._owed))]
        self._send_owed(now)

    def _send_owed(self, now: float) -> None:
        """Releases go out when their peer is ready; after a lease time P has freed anyway."""
        ready = self._peers.ready()
        for engine_id, owed in list(self._owed.items()):
            link = ready.get(engine_id)
            if link is not None:
                del self._owed[engine_id]
                self._send(link, _offered(link, owed.releases), now)
            elif now >= owed.until:
                del self._owed[engine_id]
            else:
                self._peers.want(engine_id, owed.address, now)

    def _send(self, link: PeerLink, messages: list[bytes], now: float) -> None:
        self._sent_until = now + LEAVING_SECONDS
        for peer in link.peers:
            try:
                for message in messages:
                    self._agent.send_notification(peer, message)
            except AgentError as error:
                self._peers.lost(link.engine_id, str(error))
                return


def _offered(link: PeerLink, releases: Iterable[tuple[Want, bytes]]) -> list[bytes]:
    """Messages for what this engine has offered: a made-up offer must free nobody's blocks."""
    return [
        message
        for want, message in releases
        if want.sealed or is_sealed(link.seal_key, want.remote)
    ]
