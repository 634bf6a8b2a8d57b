"""The digest: every input counts, none runs into its neighbour, and the value never changes."""

import hashlib
import struct
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector.digest import feed, prompt_digest

# Ids that fit the short form, and some that do not.
ids = st.integers(0, 2**32 - 1) | st.sampled_from([-1, 127, 128, 255, 256, 65535, 65536, 2**32,
                                                   2**63, 2**64 - 1, 2**64, -(2**70)])  # fmt: skip
id_lists = st.lists(ids, max_size=6)
inputs = st.tuples(
    id_lists,
    st.text(max_size=4),
    st.lists(st.text(max_size=4), max_size=3),
    st.text(max_size=4),
)


def digest(given_inputs):
    tokens, lora, multimodal, salt = given_inputs
    return prompt_digest(tokens, lora=lora, multimodal=multimodal, cache_salt=salt)


@given(inputs, inputs)
def test_equal_inputs_and_only_those_have_equal_digests(ours, theirs):
    assert (digest(ours) == digest(theirs)) == (ours == theirs)


@given(id_lists, st.integers(0, 8), id_lists)
def test_ids_behind_the_prefix_do_not_count(prefix, more, behind):
    tokens = len(prefix) + (more if not behind else 0)
    assert prompt_digest(prefix + behind, tokens) == prompt_digest(prefix)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (([1, 2], "", [], ""), ([1, 2, 0], "", [], "")),
        (([1], "ab", [], ""), ([1], "a", ["b"], "")),
        (([1], "", ["ab"], ""), ([1], "", ["a", "b"], "")),
        (([1], "", ["a"], "b"), ([1], "", ["a", "b"], "")),
        (([1], "x", [], ""), ([1], "", [], "x")),
        (([2**32, 1], "", [], ""), ([2**32 + 1], "", [], "")),
        (([*b"10000000000000000"], "", [], ""), ([2**64], "", [], "")),
    ],
    ids=[
        "a zero token",
        "lora and image",
        "split image",
        "salt and image",
        "lora and salt",
        "two large ids",
        "ids that look like text",
    ],
)
def test_neighbouring_fields_do_not_run_together(ours, theirs):
    assert digest(ours) != digest(theirs)


def test_the_value_is_part_of_the_wire_format():
    # P and D may run on different machines and Python versions: this value must not move.
    value = prompt_digest([1, 2, 3], lora="l", multimodal=["m"], cache_salt="s")
    assert value == "6682bfe73bcc83d0e9bb5c0f4dac434ab3cc249b8135ab33118c98781cacef61"


@pytest.mark.parametrize("count", [0, 1, 14, 15, 16, 17, 65534, 65535, 65536, 65537])
@pytest.mark.parametrize("behind", [[], [5], [70000, 2**40], [2**70], [1] * 17])
def test_the_length_of_the_list_is_not_in_its_bytes_twice(count, behind):
    prompt = [token % 300 for token in range(count)]
    encoded = b"".join(map(msgspec.msgpack.encode, prompt))
    tag, no_context = b"hybridpd-prompt-3", bytes(24)
    written = tag + struct.pack("<qq", count, len(encoded)) + encoded + no_context
    assert prompt_digest(prompt + behind, count) == hashlib.sha256(written).hexdigest()


@pytest.mark.parametrize("length", [0, 1, 2046, 2047, 2048, 4094, 4095, 10000])
def test_no_piece_is_so_large_that_hashing_lets_go_of_the_interpreter(length):
    pieces = []
    data = bytes(at % 251 for at in range(length))
    feed(SimpleNamespace(update=pieces.append), data)
    assert b"".join(pieces) == data
    # `hashlib`: "releases the GIL for data larger than 2047 bytes".
    assert all(len(piece) <= 2047 for piece in pieces)


def test_any_sequence_of_integers_will_do():
    assert prompt_digest((1, 2)) == prompt_digest([1, 2])
    assert prompt_digest(range(3)) == prompt_digest([0, 1, 2])
    assert prompt_digest(np.array([1, 2])) == prompt_digest([1, 2])
    assert prompt_digest([np.int64(1), 2, 9], 2) == prompt_digest([1, 2])
