"""What the operator needs from a Kubernetes API server, as a protocol.

``cluster.KubernetesCluster`` talks to a real one; the tests' fake keeps objects in memory. Both
raise only the errors below, so no caller knows which HTTP library is underneath.

Threading: every method may be called from several worker threads at once.
"""

from collections.abc import Sequence
from typing import Protocol

from hybridpd_operator.kinds import Kind, Manifest


class ClusterError(Exception):
    """A request that did not succeed. Worth retrying unless a subclass says otherwise."""

    def __init__(self, what: str, status: int, message: str) -> None:
        super().__init__(f"{what}: HTTP {status}: {message}")
        self.what = what
        self.status = status
        self.message = message


class NotFoundError(ClusterError):
    """The object (or its kind) does not exist."""


class ConflictError(ClusterError):
    """Somebody else was faster, or a precondition (uid) failed: look again."""


class RefusedError(ClusterError):
    """The server understood and said no (invalid, forbidden by policy): retrying will not help."""


class Cluster(Protocol):
    """Read and write Kubernetes objects as parsed JSON."""

    def get(self, kind: Kind, namespace: str, name: str) -> Manifest:
        """Return one object. NotFoundError when there is none."""

    def list(self, kind: Kind, namespace: str | None, labels: str = "") -> Sequence[Manifest]:
        """Return the objects of a namespace (None: all) that match a label selector."""

    def apply(self, manifest: Manifest, *, subresource: str = "") -> Manifest:
        """Server-side apply with our field manager, forced; return what the server then holds."""

    def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete one object if it still has ``uid``; its dependants follow in the background."""

    def create(self, manifest: Manifest) -> None:
        """Create one object (events)."""
