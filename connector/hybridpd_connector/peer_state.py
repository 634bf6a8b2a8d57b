"""The states of a remote engine, and what moves it from one to the next.

    state        wanted            succeeded   failed        refused   lost / idle / replaced
    unknown      handshaking       -           -             -         -
    handshaking  (wait)            ready       backing off   refused   evicted
    ready        (use)             -           -             -         evicted
    backing off  handshaking, once -           -             -         evicted
                 the pause is over
    refused      the same; a longer pause                              evicted

``TRANSITIONS`` is this table; ``peers`` keeps the book.
"""

import enum
from collections.abc import Mapping


class PeerState(enum.Enum):
    """State of one remote engine."""

    UNKNOWN = "unknown"
    HANDSHAKING = "handshaking"
    READY = "ready"
    BACKING_OFF = "backing_off"
    REFUSED = "refused"
    EVICTED = "evicted"


class PeerEvent(enum.Enum):
    """What can happen to a peer."""

    START = "start"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REFUSED = "refused"
    DROPPED = "dropped"


TRANSITIONS: Mapping[PeerState, Mapping[PeerEvent, PeerState]] = {
    PeerState.UNKNOWN: {PeerEvent.START: PeerState.HANDSHAKING},
    PeerState.HANDSHAKING: {
        PeerEvent.SUCCEEDED: PeerState.READY,
        PeerEvent.FAILED: PeerState.BACKING_OFF,
        PeerEvent.REFUSED: PeerState.REFUSED,
        PeerEvent.DROPPED: PeerState.EVICTED,
    },
    PeerState.READY: {PeerEvent.DROPPED: PeerState.EVICTED},
    PeerState.BACKING_OFF: {
        PeerEvent.START: PeerState.HANDSHAKING,
        PeerEvent.DROPPED: PeerState.EVICTED,
    },
    PeerState.REFUSED: {
        PeerEvent.START: PeerState.HANDSHAKING,
        PeerEvent.DROPPED: PeerState.EVICTED,
    },
    PeerState.EVICTED: {},
}
