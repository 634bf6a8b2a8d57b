"""The handshake: round trip, version first, every field checked, and no exception but ours."""

import contextlib
import dataclasses
import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector import handshake
from hybridpd_connector.errors import RefusedError, SideChannelError, VersionError, WireError
from hybridpd_connector.handshake import (
    HEADER_BYTES,
    MAGIC,
    MAX_OUTLINE_BYTES,
    MAX_QUESTION_BYTES,
    MAX_TEXT,
    WIRE_VERSION,
    Hello,
    RankHello,
    Responder,
    decode_answer,
    decode_question,
    describe,
    encode_hello,
    encode_question,
    encode_refusal,
    fetch,
    who_is_there,
)

HEADER = MAGIC + WIRE_VERSION.to_bytes(2, "big")
HELLO = Hello(
    engine_id="engine-1",
    connector_version="0.1.0",
    vllm_version="0.32.0",
    role="producer",
    tp_size=2,
    lease_seconds=30,
    layout={"layers": [{"name": "model.layers.0", "page_bytes": 4096}]},
    ranks=tuple(
        RankHello(rank, {"bases": [1 << 47]}, b"\x00metadata\xff", 1 << 47, 65536)
        for rank in range(2)
    ),
)


def body(raw):
    return msgspec.msgpack.decode(raw[HEADER_BYTES:])


def answer_with(**changes):
    hello = body(encode_hello(HELLO))["hello"]
    for path, value in changes.items():
        *outer, name = path.split("__")
        holder = hello
        for step in outer:
            holder = holder[int(step) if step.isdigit() else step]
        if value is Ellipsis:
            del holder[name]
        else:
            holder[name] = value
    return HEADER + msgspec.msgpack.encode({"hello": hello})


def test_a_hello_arrives_as_it_was_sent():
    assert decode_answer(encode_hello(HELLO)) == HELLO


def test_a_hello_crosses_processes():
    assert pickle.loads(pickle.dumps(HELLO)) == HELLO


def test_a_question_arrives_as_it_was_sent():
    assert decode_question(encode_question("p", "d")) == ("p", "d")


def test_a_refusal_arrives_as_an_error():
    error = RefusedError("layout.page_bytes", "local=1", "remote=2", "hint")
    with pytest.raises(RefusedError, match=r"layout.page_bytes: expected local=1, got remote=2"):
        decode_answer(encode_refusal(error, retryable=False))
    with pytest.raises(RefusedError) as caught:
        decode_answer(encode_refusal(error, retryable=True))
    assert caught.value.retryable


@pytest.mark.parametrize("decode", [decode_answer, decode_question])
def test_the_version_is_read_before_the_body(decode):
    newer = MAGIC + (WIRE_VERSION + 1).to_bytes(2, "big")
    with pytest.raises(VersionError, match="one connector version"):
        decode(newer + b"not even msgpack")


@pytest.mark.parametrize("decode", [decode_answer, decode_question])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        MAGIC,
        HEADER,
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER + b"\xc1",
        HEADER + b"\x91" * 4000,
        HEADER + b"\xdf\xff\xff\xff\xff",
        HEADER + b"\x80" + b"\x00",
    ],
    ids=["empty", "cut", "no body", "http", "reserved", "deep", "huge map", "trailing"],
)
def test_garbage_is_refused(decode, raw):
    with pytest.raises(WireError):
        decode(raw)


@given(st.binary(max_size=400))
def test_arbitrary_bodies_raise_only_wire_errors(raw):
    for decode in (decode_answer, decode_question):
        for prefix in (b"", HEADER):
            with contextlib.suppress(WireError, RefusedError):
                decode(prefix + raw)


@given(st.data())
def test_a_damaged_hello_raises_only_wire_errors(data):
    raw = bytearray(encode_hello(HELLO))
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for damaged in (bytes(raw), bytes(raw[:cut])):
        with contextlib.suppress(WireError):
            assert isinstance(decode_answer(damaged), Hello)


@pytest.mark.parametrize(
    "changes",
    [
        {"engine_id": ...},
        {"engine_id": ""},
        {"engine_id": 7},
        {"engine_id": "x" * (MAX_TEXT + 1)},
        {"role": "observer"},
        {"tp_size": 0},
        {"tp_size": True},
        {"tp_size": 3},
        {"lease_seconds": 0},
        {"lease_seconds": 1.5},
        {"layout": None},
        {"layout": {1: 2}},
        {"ranks": []},
        {"ranks__0__rank": 1},
        {"ranks__0__rank": -1},
        {"ranks__1__agent_metadata": b""},
        {"ranks__1__agent_metadata": "text"},
        {"ranks__1__board_address": -1},
        {"ranks__1__board_slots": 0},
        {"ranks__1__board_slots": 1 << 40},
        {"ranks__1__placement": ...},
    ],
    ids=str,
)
def test_each_field_is_checked(changes):
    with pytest.raises(WireError):
        decode_answer(answer_with(**changes))


@pytest.mark.parametrize(
    "answer", [{}, {"other": 1}, {"refusal": {"field": "x"}}, [], None, {"hello": {}}], ids=str
)
def test_an_answer_is_a_hello_or_a_refusal(answer):
    with pytest.raises(WireError):
        decode_answer(HEADER + msgspec.msgpack.encode(answer))


EMPTY_MAPS = b"\xdd" + (3 * 1024 * 1024).to_bytes(4, "big") + b"\x80" * (3 * 1024 * 1024)


@pytest.mark.parametrize("where", ["layout", "ranks__1__placement", "ranks__1__host", "more"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_objects_of_one_byte_are_not_made_by_the_million(where, again, monkeypatch):
    """Each costs 72 bytes, and the engine's threads stand still while they are made."""
    decoded = []
    answers = handshake._answer_decoder

    class Watched:
        def decode(self, raw):
            decoded.append(raw)
            return answers.decode(raw)

    raw = answer_with(**{where: {"bomb": "here"}})
    monkeypatch.setattr(handshake, "_answer_decoder", Watched())
    bomb = raw.replace(msgspec.msgpack.encode("here"), EMPTY_MAPS)
    if again:  # the same key twice, the second one is small
        name = msgspec.msgpack.encode("hello")
        hello = raw[raw.index(name) + len(name) :]
        bomb = HEADER + b"\x82" + bomb[HEADER_BYTES + 1 :] + name + hello
    with pytest.raises(WireError, match="beside the metadata"):
        decode_answer(bomb)
    assert decoded == []
    assert decode_answer(encode_hello(HELLO)) == HELLO
    assert len(decoded) == 2


def test_metadata_may_be_larger_than_all_the_rest():
    ranks = tuple(
        dataclasses.replace(rank, agent_metadata=b"m" * (MAX_OUTLINE_BYTES + 1))
        for rank in HELLO.ranks
    )
    large = dataclasses.replace(HELLO, ranks=ranks)
    assert decode_answer(encode_hello(large)) == large


def test_what_is_only_skipped_may_not_nest_without_end():
    with pytest.raises(WireError):
        decode_answer(HEADER + b"\x81" + msgspec.msgpack.encode("other") + b"\x91" * 10**6)


def test_a_refusal_cannot_forge_lines_of_a_log():
    texts = ("f\n", "e\x1b[2J", "g\r", "h\u2028WARNING all is well")
    raw = encode_refusal(RefusedError("f", "e", "g", "h"), retryable=False)
    refusal = body(raw)["refusal"]
    refusal.update(zip(("field", "expected", "got", "hint"), texts, strict=True))
    with pytest.raises(RefusedError) as caught:
        decode_answer(HEADER + msgspec.msgpack.encode({"refusal": refusal}))
    assert str(caught.value).isprintable()
    assert caught.value.hint == "h?WARNING all is well"


def test_our_own_bad_hello_is_not_published():
    with pytest.raises(WireError):
        Responder("engine-1").publish(dataclasses.replace(HELLO, tp_size=5))


def test_metadata_stays_out_of_logs():
    assert "metadata" not in repr(HELLO)
    assert "metadata" not in str(describe(HELLO))


class Wire:
    """A side channel that hands questions to a function."""

    def __init__(self, answer):
        self.answer = answer

    def ask(self, host, port, question, timeout_seconds):
        return self.answer(question)


def fetch_from(responder, engine_id="engine-1"):
    return fetch(
        Wire(responder.answer),
        ("host", 5600),
        engine_id=engine_id,
        our_engine_id="decode-1",
        timeout_seconds=1.0,
    )


def test_an_engine_that_starts_asks_for_a_retry():
    responder = Responder("engine-1")
    with pytest.raises(RefusedError) as caught:
        fetch_from(responder)
    assert caught.value.retryable
    responder.publish(HELLO)
    assert fetch_from(responder) == HELLO
    assert repr(responder) == "Responder('engine-1', published, refused=1)"


def test_a_replaced_engine_is_recognised():
    responder = Responder("engine-1")
    responder.publish(HELLO)
    with pytest.raises(RefusedError, match="replaced") as caught:
        fetch_from(responder, "engine-0")
    assert not caught.value.retryable


def test_a_server_that_answers_for_another_engine_is_refused():
    with pytest.raises(RefusedError, match="engine_id"):
        fetch(
            Wire(lambda _: encode_hello(HELLO)),
            ("host", 1),
            engine_id="engine-0",
            our_engine_id="d",
            timeout_seconds=1.0,
        )


def ask_who(answer):
    return who_is_there(Wire(answer), ("host", 5600), our_engine_id="decode-1", timeout_seconds=1.0)


def test_whoever_is_there_says_who_it_is():
    responder = Responder("engine-1")
    with pytest.raises(RefusedError) as caught:
        ask_who(responder.answer)
    assert caught.value.retryable
    responder.publish(HELLO)
    assert ask_who(responder.answer) == "engine-1"
    assert responder.refused == 1


@pytest.mark.parametrize(
    "changes",
    [{"engine_id": ...}, {"engine_id": ""}, {"engine_id": 7}, {"engine_id": "x" * (MAX_TEXT + 1)},
     {"engine_id": "a\nWARNING forged"}],
    ids=str,
)  # fmt: skip
def test_a_name_is_checked(changes):
    with pytest.raises(WireError):
        ask_who(lambda question: answer_with(**changes))


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda raw: HEADER + raw)))
def test_asking_who_is_there_raises_only_our_errors(raw):
    with contextlib.suppress(WireError, RefusedError):
        assert ask_who(lambda question: raw)


def test_an_unreachable_engine_stays_a_side_channel_error():
    def unreachable(question):
        raise SideChannelError("side channel", "an answer", "none in time")

    with pytest.raises(SideChannelError):
        fetch(Wire(unreachable), ("h", 1), engine_id="e", our_engine_id="d", timeout_seconds=1.0)


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda raw: HEADER + raw)))
def test_a_responder_answers_everything_in_small(raw):
    responder = Responder("engine-1")
    answer = responder.answer(raw)
    assert len(answer) < 4 * 1024
    with pytest.raises(RefusedError):
        decode_answer(answer)


def test_an_oversized_question_is_refused():
    responder = Responder("engine-1")
    with pytest.raises(RefusedError, match="at most"):
        decode_answer(responder.answer(HEADER + bytes(MAX_QUESTION_BYTES)))
    assert responder.refused == 1
