"""Who uses which peer of an agent: a peer is removed when nobody does any more.

A peer may be in a dropped link, in its successor, and in a measurement at once.
"""

import collections
import threading

from hybridpd_connector.agent_api import Agent


class PeerUses:
    """Uses of each peer, counted; safe from any thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._uses: collections.Counter[str] = collections.Counter()

    def __repr__(self) -> str:
        return f"PeerUses({dict(self._uses)})"

    def add(self, metadata: bytes) -> str:
        """Learn a peer, or use it once more; returns its name. Ends with ``let_go``."""
        with self._lock:
            peer = self._agent.add_peer(metadata)
            self._uses[peer] += 1
            return peer

    def hold(self, peer: str) -> bool:
        """Use a peer that somebody uses already; False when nobody does."""
        with self._lock:
            if peer not in self._uses:
                return False
            self._uses[peer] += 1
            return True

    def let_go(self, peer: str) -> None:
        """One use less; the last one removes the peer. ``AgentError`` while it is read from."""
        with self._lock:
            self._uses[peer] -= 1
            if not self._uses[peer]:
                del self._uses[peer]
                self._agent.remove_peer(peer)
