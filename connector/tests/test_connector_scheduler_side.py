"""The scheduler half over plain values: what it claims, pins, orders, and answers."""

import json

import pytest
from connector_engines import TO_PREFILL

from hybridpd_connector import stats
from hybridpd_connector.errors import StateError
from hybridpd_connector.metadata import NO_ORDERS, GroupFacts, RequestFacts
from hybridpd_connector.request_blocks import (
    Identity,
    parent_of,
    state_block,
    transfer_blocks,
)
from hybridpd_connector.scheduler_side import SchedulerHalf

GROUPS = (GroupFacts("state", 4096), GroupFacts("attention", 16))
PROMPT = tuple(range(40))


def half(role="both", groups=GROUPS):
    return SchedulerHalf(Identity("engine", "10.0.0.1", 5600, 2, role, 30), groups)


def facts(request_id, params, token_ids=PROMPT, **more):
    return RequestFacts(request_id, len(token_ids), token_ids, params, **more)


def answer_of(prefiller, request_id="p", token_ids=PROMPT):
    prefiller.on_new_request(facts(request_id, TO_PREFILL, token_ids))
    return prefiller.on_finished(request_id, len(token_ids) - 1, ([7], [4, 5, 6]))[1]


@pytest.mark.parametrize(
    ("block_ids", "scratch", "expected"),
    [([5], 0, 5), ([5, 8, 9], 2, 5), ([0, 0, 0, 5], 0, 5), ([0, 0, 5, 8], 1, 5), ([5], 2, 5)],
)
def test_the_state_bearing_block(block_ids, scratch, expected):
    assert state_block(block_ids, scratch) == expected


@pytest.mark.parametrize("block_ids", [[], [0], [3, 0]])
def test_no_state_bearing_block(block_ids):
    with pytest.raises(StateError, match="state block"):
        state_block(block_ids, 0)


def test_only_blocks_with_tokens_are_handed_over():
    assert transfer_blocks(GROUPS, ([9], [1, 2, 3, 4]), 32) == ((9,), (1, 2))
    assert transfer_blocks(GROUPS, ([9], [1, 2, 3, 4]), 33) == ((9,), (1, 2, 3))


def test_a_reader_keeps_spare_blocks_to_zero_them():
    assert transfer_blocks(GROUPS, ([9], [1, 2, 3]), 32, spare=True) == ((9,), (1, 2, 3))


@pytest.mark.parametrize("block_ids", [([9], [1]), ([9],), ([9], [1, 0, 3]), ([], [1, 2, 3])])
def test_missing_blocks_are_an_error(block_ids):
    with pytest.raises(StateError):
        transfer_blocks(GROUPS, block_ids, 33)


@pytest.mark.parametrize(
    ("request_id", "parent"),
    [("0_cmpl-1", "cmpl-1"), ("12_a_b", "a_b"), ("cmpl-0_1", None), ("_x", None), ("3", None)],
)
def test_children_of_a_request(request_id, parent):
    assert parent_of(request_id) == parent


@pytest.mark.parametrize(
    ("more", "truncated"),
    [
        ({}, True),
        ({"token_ids": (5,)}, False),
        ({"reads_cache": False}, False),
    ],
)
def test_a_prefill_ends_one_token_early(more, truncated):
    assert half().on_new_request(facts("p", TO_PREFILL, **more)) is truncated


def test_a_prefill_of_embeddings_is_not_handed_over():
    prefiller = half()
    assert not prefiller.on_new_request(RequestFacts("p", 40, None, TO_PREFILL))
    kept, params = prefiller.on_finished("p", 40, ([7], [4, 5, 6]))
    assert not kept
    assert params["hybridpd"]["tokens"] == 0


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": None}, {"other": 1}])
def test_other_requests_are_left_alone(params):
    scheduler = half()
    assert not scheduler.on_new_request(facts("r", params))
    assert scheduler.external_tokens("r", 0) == 0
    scheduler.on_allocated("r", (), 0)
    assert scheduler.on_finished("r", 41, ([7], [4])) == (False, None)
    orders = scheduler.build_orders()
    assert (orders.pins, orders.interests, orders.loads) == ((), (), ())


def test_the_answer_of_a_prefill():
    prefiller = half()
    prefiller.on_new_request(facts("p", TO_PREFILL))
    kept, params = prefiller.on_finished("p", 39, ([7], [4, 5, 6, 8]))
    assert kept
    assert json.loads(json.dumps(params))["remote_block_ids"] == [[7], [4, 5, 6]]
    assert params["hybridpd"]["tokens"] == 39
    assert params["remote_request_id"] == "p"
    assert [pin.request_id for pin in prefiller.build_orders().pins] == ["p"]
    assert prefiller.build_orders().pins == ()
    assert prefiller.prefill.pinned == 1
    prefiller.on_results({"p"}, (), (), {})
    assert prefiller.prefill.pinned == 0


def test_each_lease_has_its_own_sequence():
    prefiller = half()
    answers = [answer_of(prefiller, name) for name in ("a", "b", "c")]
    assert [item["hybridpd"]["sequence"] for item in answers] == [1, 2, 3]


@pytest.mark.parametrize("computed", [None, 38, 40])
def test_what_did_not_end_right_is_not_handed_over(computed):
    prefiller = half()
    prefiller.on_new_request(facts("p", TO_PREFILL))
    assert prefiller.on_finished("p", computed, ([7], [4, 5, 6])) == (False, None)
    assert prefiller.build_orders().pins == ()


def test_a_load_claims_all_but_the_last_token():
    decoder = half()
    decoder.on_new_request(facts("d", answer_of(half())))
    assert decoder.external_tokens("d", 0) == 39
    assert decoder.external_tokens("d", 39) == 0
    assert decoder.external_tokens("d", 32) == 7
    decoder.on_allocated("d", ([3], [9, 10, 11, 12]), 7)
    assert decoder.external_tokens("d", 0) == 0
    orders = decoder.build_orders()
    load = orders.loads[0]
    assert (load.block_ids, load.first_token, load.refusal) == (((3,), (9, 10, 11, 12)), 32, "")
    assert orders.interests[0].remote.tokens == 39


def test_orders_are_given_once_and_numbered():
    decoder = half()
    decoder.on_new_request(facts("d", answer_of(half())))
    first, second = decoder.build_orders(), decoder.build_orders()
    assert (first.step, len(first.interests)) == (1, 1)
    assert second is NO_ORDERS
    decoder.on_finished("d", None, ())
    third = decoder.build_orders()
    assert (third.step, third.interests, third.leaves) == (2, (), ("d",))
    assert decoder.build_orders() is NO_ORDERS


def test_no_orders_are_older_than_any_order():
    assert NO_ORDERS.step == 0
    assert not any(NO_ORDERS[1:])
    prefiller = half()
    answer_of(prefiller)
    orders = prefiller.build_orders()
    assert (orders.step, len(orders.pins)) == (1, 1)
    assert prefiller.build_orders() is NO_ORDERS


def test_blocks_that_cannot_take_the_state_refuse_the_load():
    decoder = half()
    decoder.on_new_request(facts("d", answer_of(half())))
    assert decoder.external_tokens("d", 0) == 39
    decoder.on_allocated("d", ([0], [9, 10, 11]), 39)
    assert decoder.build_orders().loads[0].refusal == "bad_blocks"


def test_a_request_that_may_not_use_a_cache_is_computed_here_and_counted():
    decoder = half()
    decoder.on_new_request(facts("d", answer_of(half()), reads_cache=False))
    assert decoder.external_tokens("d", 0) == 0
    decoder.on_allocated("d", (), 0)
    assert decoder.build_orders().leaves == ("d",)
    assert decoder.take_stats()["counts"] == {"recomputed_requests": 1}


@pytest.mark.parametrize(
    ("hit", "cached", "recomputed"),
    [(39, 32, 1), (39, 0, 1), (39, 39, 0), (39, None, 0), (16, 0, 0)],
)
def test_a_hit_whose_state_is_cached_for_less_is_counted(hit, cached, recomputed):
    """Attention may hit all N-1 tokens here while the state does not: vLLM computes the rest."""
    decoder = half()
    decoder.on_new_request(facts("d", answer_of(half())))
    claimed = decoder.external_tokens("d", hit)
    assert claimed == 39 - hit
    # Another connector beside this one may have won the load; then nothing is computed here.
    decoder.on_allocated("d", (), 0, cached)
    counts = (decoder.take_stats() or {"counts": {}})["counts"]
    assert counts.get("recomputed_requests", 0) == recomputed
    assert decoder.build_orders().leaves == ("d",)


def test_an_abort_that_vllm_reports_with_its_result_orders_nothing():
    """Policy "fail": the request is finished first, then its load is reported as failed."""
    decoder = half()
    decoder.on_new_request(facts("d", answer_of(half())))
    assert decoder.external_tokens("d", 0) == 39
    decoder.on_allocated("d", ([3], [9, 10, 11]), 39)
    decoder.build_orders()
    assert decoder.on_finished("d", None, ([3], [9, 10, 11])) == (False, None)
    decoder.on_results((), {"d"}, {"d"}, {"d": "read_failed"})
    assert decoder.build_orders().aborts == ()
    assert decoder.take_stats()["failures"] == {"read_failed": 1}


def test_an_abort_is_ordered_once_and_is_no_failure():
    decoder = half()
    decoder.on_new_request(facts("d", answer_of(half())))
    assert decoder.external_tokens("d", 0) == 39
    decoder.on_allocated("d", ([3], [9, 10, 11]), 39)
    decoder.on_finished("d", None, ([3], [9, 10, 11]))
    assert decoder.build_orders().aborts == ("d",)
    assert decoder.build_orders().aborts == ()
    decoder.on_results((), {"d"}, {"d"}, {"d": "aborted"})
    assert decoder.take_stats() is None


def test_results_of_unknown_requests_change_nothing():
    scheduler = half()
    scheduler.on_results({"x"}, {"y"}, {"y"}, {"y": "read_failed"})
    assert scheduler.take_stats() is None


def test_results_of_another_connector_change_nothing():
    """vLLM's MultiConnector shows every connector the results of all of them."""
    scheduler = half()
    scheduler.on_new_request(facts("d", answer_of(half())))
    scheduler.on_results((), {"d"}, {"d"}, {})
    assert scheduler.external_tokens("d", 0) == 39
    scheduler.on_allocated("d", (), 0)
    scheduler.on_new_request(facts("p", TO_PREFILL))
    for _ in range(2):
        scheduler.on_results({"p"}, {"d"}, (), {})
    assert scheduler.build_orders().leaves == ("d",)
    kept, _ = scheduler.on_finished("p", 39, ([7], [4, 5, 6]))
    assert kept
    assert scheduler.take_stats() == {**stats.empty(), "gauges": {"leases_held": 1}}


@pytest.mark.parametrize("granted", [1, 32, 38])
def test_a_claim_that_was_cut_is_not_loaded(granted):
    """A state stands for all its tokens. vLLM 0.33 may grant fewer than were claimed."""
    decoder = half()
    decoder.on_new_request(facts("d", answer_of(half())))
    assert decoder.external_tokens("d", 0) == 39
    decoder.on_allocated("d", ([3], [9, 10, 11]), granted)
    assert decoder.build_orders().loads[0].refusal == "claim_cut"


def test_what_the_side_channel_refused_is_counted():
    scheduler = half()
    scheduler.note_refused({})
    assert scheduler.take_stats() is None
    scheduler.note_refused({"wrong_key": 2})
    scheduler.note_refused({"wrong_key": 1, "unfinished": 4})
    assert scheduler.take_stats()["refused"] == {"wrong_key": 3, "unfinished": 4}
    assert scheduler.take_stats() is None
