"""kv_transfer_params: round trip, every key missing, null, of the wrong type, huge, hostile."""

import contextlib
import copy
import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector import transfer_params
from hybridpd_connector.errors import ParamsError
from hybridpd_connector.transfer_params import (
    MAX_BLOCKS,
    MAX_GROUPS,
    RemotePrefill,
    answer,
    parse_decode,
    wants_prefill,
)

PREFILL = RemotePrefill(
    engine_id="engine-1",
    request_id="cmpl-1-abcd",
    host="10.0.0.7",
    port=5600,
    block_ids=((1, 2, 3), (9,)),
    tp_size=2,
    tokens=511,
    digest="0123456789abcdef" * 4,
    lease_seconds=30,
    sequence=17,
    seal="fedcba9876543210" * 4,
)
ASKED_OF_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def changed(key, value):
    params = copy.deepcopy(answer(PREFILL))
    holder = params["hybridpd"] if key.startswith("hybridpd.") else params
    name = key.removeprefix("hybridpd.")
    if value is MISSING:
        del holder[name]
    else:
        holder[name] = value
    return params


MISSING = object()
KEYS = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "tp_size",
    "hybridpd",
    "hybridpd.v",
    "hybridpd.tokens",
    "hybridpd.digest",
    "hybridpd.lease_seconds",
    "hybridpd.sequence",
    "hybridpd.seal",
)


def test_the_answer_survives_json():
    assert parse_decode(json.loads(json.dumps(answer(PREFILL)))) == PREFILL


def test_keys_that_routers_relay_keep_their_names():
    assert set(answer(PREFILL)) == {
        "do_remote_prefill",
        "do_remote_decode",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "remote_block_ids",
        "tp_size",
        "hybridpd",
    }


def test_keys_of_others_are_ignored():
    assert parse_decode({**answer(PREFILL), "some_router_key": {"x": 1}}) == PREFILL


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": None}, {"other": 1}])
def test_a_request_without_flags_is_an_ordinary_one(params):
    assert not wants_prefill(params)
    assert parse_decode(params) is None


def test_a_prefill_is_asked_for():
    assert wants_prefill(ASKED_OF_PREFILL)
    assert parse_decode(ASKED_OF_PREFILL) is None
    assert not wants_prefill(answer(PREFILL))


@pytest.mark.parametrize("params", ["text", 7, ["do_remote_prefill"], True])
def test_params_that_are_no_object_are_refused(params):
    with pytest.raises(ParamsError, match="an object"):
        parse_decode(params)


@pytest.mark.parametrize("value", ["true", 1, [], {}])
@pytest.mark.parametrize("key", ["do_remote_prefill", "do_remote_decode"])
def test_flags_are_booleans(key, value):
    with pytest.raises(ParamsError, match=key):
        wants_prefill({key: value})


def test_both_roles_at_once_are_refused():
    with pytest.raises(ParamsError, match="never both"):
        wants_prefill({"do_remote_prefill": True, "do_remote_decode": True})


@pytest.mark.parametrize("value", [MISSING, None, {}, {"a": 1}, 1.5, "", float("nan"), b"x"])
@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_needed_and_typed(key, value):
    with pytest.raises(ParamsError) as caught:
        parse_decode(changed(key, value))
    assert key.split(".")[0] in caught.value.field


HOSTILE = [
    ("remote_port", 0),
    ("remote_port", 65536),
    ("remote_port", True),
    ("remote_port", 10**5000),
    ("tp_size", -1),
    ("tp_size", 10**9),
    ("remote_host", "a" * 300),
    ("remote_host", "host;rm -rf"),
    ("remote_host", "tcp://x"),
    ("remote_host", "a\nb"),
    ("remote_engine_id", "x" * 10**6),
    ("remote_engine_id", "line\nbreak"),
    ("remote_request_id", "\x00"),
    ("hybridpd.v", 2),
    ("hybridpd.tokens", -1),
    ("hybridpd.tokens", 10**400),
    ("hybridpd.digest", "0" * 63),
    ("hybridpd.digest", "Z" * 64),
    ("hybridpd.digest", "0" * 64 + "\n"),
    ("hybridpd.lease_seconds", 0),
    ("hybridpd.lease_seconds", 10**9),
    ("hybridpd.sequence", 0),
    ("hybridpd.sequence", 2**53),
    ("remote_block_ids", []),
    ("remote_block_ids", [[1], "23"]),
    ("remote_block_ids", [[1], [None]]),
    ("remote_block_ids", [[True]]),
    ("remote_block_ids", [[-1]]),
    ("remote_block_ids", [[2**31]]),
    ("remote_block_ids", [[10**5000]]),
    ("remote_block_ids", [[1.0]]),
    ("remote_block_ids", [[[1]]]),
    ("remote_block_ids", [[]] * (MAX_GROUPS + 1)),
]


@pytest.mark.parametrize(
    ("key", "value"), HOSTILE, ids=[f"{n}-{key}" for n, (key, _) in enumerate(HOSTILE)]
)
def test_hostile_values_are_refused_and_not_repeated_at_length(key, value):
    with pytest.raises(ParamsError) as caught:
        parse_decode(changed(key, value))
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()


def test_the_number_of_blocks_is_bounded(monkeypatch):
    assert MAX_BLOCKS >= 1 << 20
    monkeypatch.setattr(transfer_params, "MAX_BLOCKS", 100)
    assert parse_decode(changed("remote_block_ids", [[1] * 60, [2] * 40]))
    with pytest.raises(ParamsError, match="at most 100"):
        parse_decode(changed("remote_block_ids", [[1] * 60, [2] * 41]))


def test_what_we_would_refuse_we_do_not_answer():
    with pytest.raises(ParamsError):
        answer(dataclasses.replace(PREFILL, sequence=0))


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=8), inner, max_size=5)
    ),
    max_leaves=15,
)


@given(json_values)
def test_any_json_is_parsed_or_refused(params):
    for parse in (wants_prefill, parse_decode):
        with contextlib.suppress(ParamsError):
            parse(params)


@given(st.sampled_from(KEYS), json_values)
def test_any_json_in_any_key_is_parsed_or_refused(key, value):
    with contextlib.suppress(ParamsError):
        assert isinstance(parse_decode(changed(key, value)), RemotePrefill)
