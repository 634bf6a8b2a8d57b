"""Errors name field, expected, got and way out; what a peer sent is shown bounded and escaped."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpd_connector.errors import AgentError, ConnectorError, RefusedError, shorten


def test_the_message_has_every_part():
    error = AgentError("rows", "N x 5", (3, 2), "see the docs")
    assert str(error) == "rows: expected N x 5, got (3, 2); see the docs"
    assert isinstance(error, ConnectorError)


def test_errors_cross_processes():
    error = pickle.loads(pickle.dumps(RefusedError("f", "e", "g", "h")))
    assert (error.field, error.expected, error.got, error.hint) == ("f", "e", "g", "h")


@given(st.text(), st.text(), st.text(), st.text())
def test_an_error_is_one_line_whatever_a_peer_said(field, expected, got, hint):
    assert str(RefusedError(field, expected, got, hint)).isprintable()


nasty = st.recursive(
    st.one_of(st.text(), st.binary(), st.integers(), st.floats(), st.none()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=30,
)


@settings(max_examples=40)
@given(nasty)
def test_what_is_shown_is_bounded_and_printable(value):
    text = shorten(value)
    assert len(text) <= 163
    assert text.isprintable()
    assert text.isascii()


@pytest.mark.parametrize(
    "value", ["x" * 10**6, 10**5000, [10**5000], [[]] * 10**5, "\x1b[31m\n", "\ud800"], ids=range(6)
)
def test_hostile_values_are_shown_in_small(value):
    assert len(shorten(value)) <= 163
    assert shorten(value).isprintable()
