"""kv_transfer_params: round trip, every key missing, null, of the wrong type, huge, hostile."""

import contextlib
import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector import transfer_params
from hybridpd_connector.errors import ParamsError
from hybridpd_connector.transfer_params import (
    MAX_BLOCKS,
    MAX_GROUPS,
    VERSION,
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


def written(offer):
    """An answer as JSON-able values, whatever is in it."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": offer.engine_id,
        "remote_request_id": offer.request_id,
        "remote_host": offer.host,
        "remote_port": offer.port,
        "remote_block_ids": [list(group) for group in offer.block_ids],
        "tp_size": offer.tp_size,
        "hybridpd": {
            "v": transfer_params.VERSION,
            "tokens": offer.tokens,
            "digest": offer.digest,
            "lease_seconds": offer.lease_seconds,
            "sequence": offer.sequence,
            "seal": offer.seal,
        },
    }


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
    ("hybridpd.v", VERSION - 1),
    ("hybridpd.v", VERSION + 1),
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
        answer(PREFILL._replace(sequence=0))


offers = st.builds(
    RemotePrefill,
    engine_id=st.sampled_from(["engine-1", "", "line\nbreak"]),
    request_id=st.sampled_from(["cmpl-1", "r" * 512, "r" * 513, "", "\x00"]),
    host=st.sampled_from(["10.0.0.7", "a b"]),
    port=st.sampled_from([5600, 0, True]),
    block_ids=st.lists(
        st.lists(st.sampled_from([0, 7, 2**31 - 1, 2**31, -1, True, 1.0, None]), max_size=3).map(
            tuple
        ),
        max_size=3,
    ).map(tuple),
    tp_size=st.sampled_from([1, 0]),
    tokens=st.sampled_from([0, 1, 2, 511, -1]),
    digest=st.sampled_from(["0" * 64, "0" * 63]),
    lease_seconds=st.sampled_from([30, 0]),
    sequence=st.sampled_from([1, 2**53 - 1, 2**53]),
    seal=st.sampled_from(["f" * 64, ""]),
)
right_offers = st.builds(
    RemotePrefill,
    engine_id=st.just("engine-1"),
    request_id=st.text("abc-", min_size=1),
    host=st.just("10.0.0.7"),
    port=st.integers(1, 65535),
    block_ids=st.lists(
        st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple), min_size=1, max_size=4
    ).map(tuple),
    tp_size=st.integers(1, 8),
    tokens=st.integers(4, 4096),
    digest=st.just("0" * 64),
    lease_seconds=st.integers(1, 60),
    sequence=st.integers(1, 2**53 - 1),
    seal=st.just("f" * 64),
)


@given(offers | right_offers)
def test_what_is_answered_is_what_would_be_parsed(offer):
    try:
        expected = parse_decode(written(offer))
    except ParamsError:
        with pytest.raises(ParamsError):
            answer(offer)
    else:
        assert expected == offer
        assert json.loads(json.dumps(answer(offer))) == written(offer)


@given(right_offers)
def test_what_is_right_is_answered(offer):
    assert parse_decode(answer(offer)) == offer


@given(st.lists(st.lists(st.integers(-1, 2**31) | st.sampled_from([True, 1.0, None, "1"]))))
def test_block_ids_are_integers_in_their_range(groups):
    right = 1 <= len(groups) <= MAX_GROUPS and all(
        type(block) is int and 0 <= block < 2**31 for group in groups for block in group
    )
    try:
        parsed = parse_decode(changed("remote_block_ids", groups))
    except ParamsError:
        assert not right
    else:
        assert right
        assert parsed.block_ids == tuple(map(tuple, groups))


@given(st.integers(0, 100), st.sampled_from([-1, 2**31, True, 1.0, None, "1", 0, 2**31 - 1]))
def test_one_among_many_block_ids_counts(place, value):
    ids = list(range(1, 101))
    ids.insert(place, value)
    right = type(value) is int and 0 <= value < 2**31
    params = changed("remote_block_ids", [[1], ids])
    if right:
        assert parse_decode(params).block_ids == ((1,), tuple(ids))
    else:
        with pytest.raises(ParamsError, match=r"remote_block_ids\[1\]: expected block ids"):
            parse_decode(params)


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
