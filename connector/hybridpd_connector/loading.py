"""One load of a D rank, from its order to its end."""

import dataclasses

from hybridpd_connector.metadata import Load
from hybridpd_connector.peer_link import PeerLink
from hybridpd_connector.stats import Moved
from hybridpd_connector.transfers import Outcome
from hybridpd_connector.wants import Want
from hybridpd_geometry import ReadRequest, RequestBlocks


@dataclasses.dataclass(slots=True)
class Loading:
    """A load that has not ended; ``link`` is set while it is read, until ``read_by``. ``late``: it
    was told that this is over. ``abandoned``: its end is told of apart from its report."""

    order: Load
    want: Want
    deadline: float
    link: PeerLink | None = None
    read_by: float = 0.0
    predicted_bytes: int = 0
    predicted_descriptors: int = 0
    late: bool = False
    abandoned: bool = False
    reported: bool = False


def read_request(loading: Loading) -> ReadRequest:
    remote = loading.want.remote
    return ReadRequest(
        tokens=remote.tokens,
        source=RequestBlocks(remote.block_ids),
        destination=RequestBlocks(loading.order.block_ids),
        first_token=loading.order.first_token,
    )


def moved(loading: Loading, outcome: Outcome) -> Moved:
    """What a load has read, beside what its plan foresaw."""
    return (
        outcome.bytes,
        outcome.descriptors,
        loading.predicted_bytes,
        loading.predicted_descriptors,
        outcome.post_seconds,
        outcome.transfer_seconds,
    )
