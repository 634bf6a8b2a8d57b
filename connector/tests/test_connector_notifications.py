"""Notifications: what is encoded is decoded, and no bytes raise anything but our errors."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector.agent_api import Notification
from hybridpd_connector.errors import VersionError, WireError
from hybridpd_connector.notifications import (
    MAGIC,
    MAX_BYTES,
    MAX_TEXT,
    VERSION,
    Release,
    Renew,
    decode,
    decode_all,
    encode,
    renewals,
)

HEADER = MAGIC + bytes((VERSION,))
RELEASE = Release("p", 1, "d-engine", "d", 1, 2)

names = st.text(min_size=1, max_size=40)
messages = st.one_of(
    st.builds(Renew, names, st.lists(names, max_size=20).map(tuple)),
    st.integers(1, 1024).flatmap(
        lambda size: st.builds(
            Release,
            names,
            st.integers(1, 2**53 - 1),
            names,
            names,
            st.integers(0, size - 1),
            st.just(size),
        )
    ),
)


@given(messages)
def test_what_is_encoded_is_decoded(message):
    assert decode(encode(message)) == message


def test_the_wire_format_stays_as_documented():
    assert encode(Renew("d", ("p",))) == b"HPDN\x01\x93\xa5renew\xa1d\x91\xa1p"
    assert (
        encode(Release("p", 7, "d", "r", 0, 1))
        == b"HPDN\x01\x97\xa7release\xa1p\x07\xa1d\xa1r\x00\x01"
    )


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(lambda raw: HEADER + raw)))
def test_arbitrary_bytes_raise_only_wire_errors(raw):
    with contextlib.suppress(WireError):
        assert isinstance(decode(raw), Renew | Release)


json_like = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63),
        st.text(max_size=9),
        st.binary(max_size=9),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=9), st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(json_like)
def test_well_formed_bodies_of_the_wrong_shape_are_refused(body):
    with pytest.raises(WireError):
        decode(HEADER + msgspec.msgpack.encode(body))


@pytest.mark.parametrize(
    "body",
    [
        ["release", "p", 1, "d", "r", 2, 2],
        ["release", "p", 1, "d", "r", -1, 2],
        ["release", "p", 1, "d", "r", True, 2],
        ["release", "p", 0, "d", "r", 0, 2],
        ["release", "p", 1, "d", "r", 0, 100000],
        ["release", "", 1, "d", "r", 0, 1],
        ["release", "p" * (MAX_TEXT + 1), 1, "d", "r", 0, 1],
        ["release", "p", 1, "d", "r", 0, 1, "more"],
        ["renew", "d"],
        ["renew", "d", ["p", 7]],
        ["other", "d"],
    ],
)
def test_each_field_is_checked(body):
    with pytest.raises(WireError):
        decode(HEADER + msgspec.msgpack.encode(body))


def test_the_version_is_read_before_the_body():
    with pytest.raises(VersionError, match="one connector version"):
        decode(MAGIC + b"\x02" + b"anything")


def test_size_and_depth_are_bounded():
    with pytest.raises(WireError, match="at most"):
        decode(HEADER + bytes(MAX_BYTES))
    with pytest.raises(WireError):
        decode(HEADER + b"\x91" * 10_000)
    # An array that claims 2^32-1 items in five bytes.
    with pytest.raises(WireError):
        decode(HEADER + b"\xdd\xff\xff\xff\xff")


def test_what_the_other_side_would_refuse_is_not_sent():
    with pytest.raises(WireError):
        encode(Renew("d", ("p" * (MAX_TEXT + 1),)))
    with pytest.raises(WireError):
        encode(Release("p", 1, "d", "r", 5, 2))


@given(st.lists(names, max_size=400))
def test_renewals_are_split_and_complete(requests):
    encoded = list(renewals("engine", requests))
    assert all(len(raw) <= MAX_BYTES for raw in encoded)
    decoded = [decode(raw) for raw in encoded]
    assert [p for renew in decoded for p in renew.p_requests] == requests


def test_renewals_split_by_bytes_not_by_characters():
    requests = ["\U0001f600" * MAX_TEXT] * 40
    assert sum(len(decode(raw).p_requests) for raw in renewals("d", requests)) == 40


def test_a_bad_message_does_not_hide_good_ones():
    received = decode_all(
        Notification("x", payload) for payload in (b"junk", encode(RELEASE), HEADER + b"\xc1")
    )
    assert received.messages == (RELEASE,)
    assert len(received.errors) == 2
