"""An agent that answers readers over TCP outlives them.

Over TCP the CPU of the one that is read from answers, in NIXL's progress thread: the reader sends
requests, UCX sends the bytes. UCX (all of NIXL 0.8 to 1.5.1) ends this process when the reader's
connection ends at the wrong moment, because the reader was killed, or its link was cut for long:

1. Requests that were read from the socket in one go are answered one after the other. When the
   first answer finds that the connection was reset, the rest meet an endpoint that has failed, and
   UCX takes that for a fault of its own: "ucp_request.inl: Fatal: unexpected error: Endpoint
   timeout", SIGABRT. ``agent_resets`` keeps resets away.
2. Answers that wait for room in the socket are thrown away in a way that follows a pointer nobody
   has set: SIGSEGV. ``agent_ucx`` takes the call out.

``connector/tests_vllm/test_vllm_reader_deaths.py`` shows both without this, and neither with it.
NVLink and RDMA devices answer by themselves: none of this is reached.
"""

import contextlib
import logging
from collections.abc import Iterator

from hybridpd_connector.agent_resets import ignore_resets, listening_sockets
from hybridpd_connector.agent_ucx import leave_out_deregistration

logger = logging.getLogger(__name__)

NOT_SAFE = (
    "over TCP this process may end when a decode engine does: %s. Nothing is wrong where NVLink or "
    "RDMA carries the reads"
)


@contextlib.contextmanager
def outlive_readers(silence_seconds: float) -> Iterator[None]:
    """An agent that is made in here, before anybody can know it, outlives its readers. One that is
    silent for so long is dead; 0: nothing is done, since it answers nobody or is not to outlive
    them."""
    if not silence_seconds:
        yield
        return
    left: list[str] = []
    before: set[tuple[int, str]] | None = None
    with _saying(left, "no list of sockets"):
        before = listening_sockets()
    yield
    with _saying(left, "no list of libraries"):
        left += leave_out_deregistration()
    if before is not None:
        with _saying(left, "no socket filter"):
            made = listening_sockets() - before
            ignore_resets([descriptor for descriptor, _ in made], silence_seconds)
    if left:
        logger.warning(NOT_SAFE, "; ".join(left))


@contextlib.contextmanager
def _saying(left: list[str], what: str) -> Iterator[None]:
    """What the system does not let us do is no reason not to start."""
    try:
        yield
    except (OSError, ValueError) as error:
        left.append(f"{what}: {error}")
