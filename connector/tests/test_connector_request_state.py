"""Request life as a table: every state with every event, and illegal ones change nothing."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector.errors import StateError
from hybridpd_connector.request_state import (
    DECODE_TABLE,
    PREFILL_TABLE,
    Decode,
    DecodeEvent,
    Prefill,
    PrefillEvent,
    next_decode,
    next_prefill,
)

# Rows as in the module's docstring; columns load, skip, received, failed, finish.
DECODE_ROWS = {
    "waiting": ("loading", "local", "-", "-", "gone"),
    "loading": ("-", "-", "loaded", "recompute", "leaving"),
    "leaving": ("-", "-", "gone", "gone", "-"),
    "loaded": ("-", "loaded", "-", "-", "gone"),
    "recompute": ("-", "local", "-", "-", "gone"),
    "local": ("-", "local", "-", "-", "gone"),
    "gone": ("-", "-", "-", "-", "-"),
}
PREFILL_ROWS = {
    "prefilling": ("pinned", "gone", "-"),
    "pinned": ("-", "-", "gone"),
    "gone": ("-", "-", "-"),
}


def cells(rows, states, events):
    return [
        pytest.param(
            state,
            event,
            rows[state.value][list(events).index(event)],
            id=f"{state.value}-{event.value}",
        )
        for state, event in itertools.product(states, events)
    ]


def check(step, state, event, expected):
    if expected == "-":
        with pytest.raises(StateError, match=state.value):
            step(state, event)
    else:
        assert step(state, event).value == expected


@pytest.mark.parametrize(("state", "event", "expected"), cells(DECODE_ROWS, Decode, DecodeEvent))
def test_decode_cell(state, event, expected):
    check(next_decode, state, event, expected)


@pytest.mark.parametrize(("state", "event", "expected"), cells(PREFILL_ROWS, Prefill, PrefillEvent))
def test_prefill_cell(state, event, expected):
    check(next_prefill, state, event, expected)


@given(st.lists(st.sampled_from(list(DecodeEvent))))
def test_any_decode_life_can_still_end(events):
    state = Decode.WAITING
    for event in events:
        state = DECODE_TABLE.get((state, event), state)
    ending = (DecodeEvent.FINISH, DecodeEvent.RECEIVED)
    for _ in range(2):
        for event in ending:
            state = DECODE_TABLE.get((state, event), state)
    assert state is Decode.GONE


@given(st.lists(st.sampled_from(list(PrefillEvent))))
def test_any_prefill_life_can_still_end(events):
    state = Prefill.PREFILLING
    for event in (*events, PrefillEvent.SENT, PrefillEvent.DROP):
        state = PREFILL_TABLE.get((state, event), state)
    assert state is Prefill.GONE


def test_nothing_leaves_the_end():
    assert not [key for key in DECODE_TABLE if key[0] is Decode.GONE]
    assert not [key for key in PREFILL_TABLE if key[0] is Prefill.GONE]
