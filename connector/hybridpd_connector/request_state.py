"""The life of a request as two transition tables, one for each side of a hand-over.

Decode side (a request whose prompt was prefilled elsewhere):

    state     load        skip      received   failed     finish
    waiting   loading     local     -          -          gone
    loading   -           -         loaded     recompute  leaving
    leaving   -           -         gone       gone       -
    loaded    -           loaded    -          -          gone
    recompute -           local     -          -          gone
    local     -           local     -          -          gone

"load" and "skip" are vLLM's allocation with and without external tokens; a preempted request is
allocated again, hence "skip" in ``loaded`` and ``local``. "failed" ends in ``recompute`` because
under the policy "fail" vLLM finishes the request first, so its state is ``leaving`` by then.

Prefill side (a request whose state another engine will read):

    state       pin       drop     sent
    prefilling  pinned    gone     -
    pinned      -         -        gone

A dash is an illegal move: ``StateError``, and nothing has changed.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType

from hybridpd_connector.errors import StateError


class _Key(enum.Enum):
    """Its members are one of a kind: the quick hash will do, and every move looks them up."""

    __hash__ = object.__hash__


class Decode(_Key):
    """Where a request of the decode side stands."""

    WAITING = "waiting"
    LOADING = "loading"
    LEAVING = "leaving"
    LOADED = "loaded"
    RECOMPUTE = "recompute"
    LOCAL = "local"
    GONE = "gone"


class DecodeEvent(_Key):
    """What can happen to it."""

    LOAD = "load"
    SKIP = "skip"
    RECEIVED = "received"
    FAILED = "failed"
    FINISH = "finish"


class Prefill(_Key):
    """Where a request of the prefill side stands."""

    PREFILLING = "prefilling"
    PINNED = "pinned"
    GONE = "gone"


class PrefillEvent(_Key):
    """What can happen to it."""

    PIN = "pin"
    DROP = "drop"
    SENT = "sent"


_DECODE: dict[tuple[Decode, DecodeEvent], Decode] = {
    (Decode.WAITING, DecodeEvent.LOAD): Decode.LOADING,
    (Decode.WAITING, DecodeEvent.SKIP): Decode.LOCAL,
    (Decode.WAITING, DecodeEvent.FINISH): Decode.GONE,
    (Decode.LOADING, DecodeEvent.RECEIVED): Decode.LOADED,
    (Decode.LOADING, DecodeEvent.FAILED): Decode.RECOMPUTE,
    (Decode.LOADING, DecodeEvent.FINISH): Decode.LEAVING,
    (Decode.LEAVING, DecodeEvent.RECEIVED): Decode.GONE,
    (Decode.LEAVING, DecodeEvent.FAILED): Decode.GONE,
    (Decode.LOADED, DecodeEvent.SKIP): Decode.LOADED,
    (Decode.LOADED, DecodeEvent.FINISH): Decode.GONE,
    (Decode.RECOMPUTE, DecodeEvent.SKIP): Decode.LOCAL,
    (Decode.RECOMPUTE, DecodeEvent.FINISH): Decode.GONE,
    (Decode.LOCAL, DecodeEvent.SKIP): Decode.LOCAL,
    (Decode.LOCAL, DecodeEvent.FINISH): Decode.GONE,
}

_PREFILL: dict[tuple[Prefill, PrefillEvent], Prefill] = {
    (Prefill.PREFILLING, PrefillEvent.PIN): Prefill.PINNED,
    (Prefill.PREFILLING, PrefillEvent.DROP): Prefill.GONE,
    (Prefill.PINNED, PrefillEvent.SENT): Prefill.GONE,
}

DECODE_TABLE: Mapping[tuple[Decode, DecodeEvent], Decode] = MappingProxyType(_DECODE)
PREFILL_TABLE: Mapping[tuple[Prefill, PrefillEvent], Prefill] = MappingProxyType(_PREFILL)


def next_decode(state: Decode, event: DecodeEvent) -> Decode:
    """The state after ``event``; ``StateError`` when the table has no such move."""
    after = _DECODE.get((state, event))
    if after is None:
        raise _illegal("decode request", state, event)
    return after


def next_prefill(state: Prefill, event: PrefillEvent) -> Prefill:
    """The state after ``event``; ``StateError`` when the table has no such move."""
    after = _PREFILL.get((state, event))
    if after is None:
        raise _illegal("prefill request", state, event)
    return after


def _illegal(what: str, state: enum.Enum, event: enum.Enum) -> StateError:
    return StateError(what, f"an event that is legal while {state.value}", event.value)
