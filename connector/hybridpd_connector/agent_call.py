"""One call into the transfer library: under its agent's lock, foreign exceptions translated."""

from contextlib import AbstractContextManager
from types import TracebackType

from hybridpd_connector.errors import AgentError, PeerLostError, StateError

_PEER_GONE = "nixlRemoteDisconnectError"


class AgentCall(AbstractContextManager[None]):
    """Around every call of an agent: there is no other place where NIXL's exceptions become ours.

    A class, since a generator as a context manager would cost each of a load's calls microseconds.
    """

    __slots__ = ("_agent", "_lock", "_what")

    def __init__(self, agent: str, lock: AbstractContextManager[bool], what: str) -> None:
        """``what`` the agent was asked to do, for the error's text."""
        self._agent = agent
        self._lock = lock
        self._what = what

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.__exit__(kind, error, trace)
        if not isinstance(error, Exception) or isinstance(error, AgentError | StateError):
            return
        lost = type(error).__name__ == _PEER_GONE
        ours = PeerLostError if lost else AgentError
        got = str(error) or repr(error)
        raise ours(f"agent {self._agent}", f"to {self._what}", got) from error
