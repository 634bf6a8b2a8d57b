"""The digest: every input counts, none runs into its neighbour, and the value never changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector.digest import prompt_digest

inputs = st.tuples(
    st.lists(st.integers(0, 2**31 - 1), max_size=6),
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


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (([1, 2], "", [], ""), ([1, 2, 0], "", [], "")),
        (([1], "ab", [], ""), ([1], "a", ["b"], "")),
        (([1], "", ["ab"], ""), ([1], "", ["a", "b"], "")),
        (([1], "", ["a"], "b"), ([1], "", ["a", "b"], "")),
        (([1], "x", [], ""), ([1], "", [], "x")),
    ],
    ids=["a zero token", "lora and image", "split image", "salt and image", "lora and salt"],
)
def test_neighbouring_fields_do_not_run_together(ours, theirs):
    assert digest(ours) != digest(theirs)


def test_the_value_is_part_of_the_wire_format():
    # P and D may run on different machines and Python versions: this value must not move.
    value = prompt_digest([1, 2, 3], lora="l", multimodal=["m"], cache_salt="s")
    assert value == "5f2bd733dda8ba5ceb3a3ea7c1ea4991d93bb7a15372e9eb5f4084254220f128"


def test_any_sequence_of_ids_will_do():
    assert prompt_digest((1, 2)) == prompt_digest([1, 2])
    assert prompt_digest(range(3)) == prompt_digest([0, 1, 2])
