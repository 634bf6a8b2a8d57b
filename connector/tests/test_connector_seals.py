"""Seals: the same offer has the same seal, any other one another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector.seals import KEY_BYTES, is_sealed, seal_of, sealed
from hybridpd_connector.transfer_params import RemotePrefill

KEY = bytes(range(KEY_BYTES))
OFFER = RemotePrefill("e", "r", "10.0.0.1", 5600, ((1, 2), (3,)), 2, 40, "0" * 64, 30, 7)


def test_the_owner_of_the_key_knows_its_offers():
    assert is_sealed(KEY, sealed(KEY, OFFER))
    assert not is_sealed(b"another key", sealed(KEY, OFFER))
    assert not is_sealed(KEY, OFFER)


def test_the_value_is_part_of_the_wire_format():
    expected = "8b98d261182b4cc50dd253bf2993fc0481de87e1ed40895bbeac9dd22820aa64"
    assert seal_of(KEY, OFFER) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"engine_id": "f"},
        {"request_id": "s"},
        {"engine_id": "er", "request_id": ""},
        {"request_id": "\ud800"},
        {"block_ids": ((1, 2), (4,))},
        {"block_ids": ((1,), (2, 3))},
        {"block_ids": ((1, 2, 3),)},
        {"tp_size": 1},
        {"tokens": 41},
        {"digest": "1" * 64},
        {"lease_seconds": 31},
        {"sequence": 8},
    ],
    ids=str,
)
def test_any_change_breaks_the_seal(change):
    assert not is_sealed(KEY, sealed(KEY, OFFER)._replace(**change))


@pytest.mark.parametrize("change", [{"host": "mesh.local"}, {"port": 1}], ids=str)
def test_whom_to_ask_may_be_rewritten(change):
    assert is_sealed(KEY, sealed(KEY, OFFER)._replace(**change))


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=4))
def test_other_blocks_have_another_seal(groups):
    blocks = tuple(map(tuple, groups))
    other = OFFER._replace(block_ids=blocks)
    assert (seal_of(KEY, other) == seal_of(KEY, OFFER)) == (blocks == OFFER.block_ids)


def test_texts_that_are_no_unicode_have_seals_of_their_own():
    odd = [OFFER._replace(request_id=name) for name in ("\ud800", "\ud801", "\udc80", "\xed")]
    assert len({seal_of(KEY, offer) for offer in odd}) == len(odd)
    assert is_sealed(KEY, sealed(KEY, odd[0]))
