"""The digest: every input counts, none runs into its neighbour, and the value never changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpd_connector.digest import prompt_digest

# Ids that fit the short form, and some that do not.
ids = st.integers(0, 2**32 - 1) | st.sampled_from([-1, 2**32, 2**63, -(2**70)])
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
        (([0x31303030, 0x2C303030], "", [], ""), ([2**32], "", [], "")),
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
    assert value == "f26439d9cbfc237711d9783da5d80611a0bda880ab9425e4f4859ca78d007643"


def test_any_sequence_of_ids_will_do():
    assert prompt_digest((1, 2)) == prompt_digest([1, 2])
    assert prompt_digest(range(3)) == prompt_digest([0, 1, 2])
