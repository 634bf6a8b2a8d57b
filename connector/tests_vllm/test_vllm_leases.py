"""P keeps a prefill as long as D renews it, and not longer. P's lease is short here."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

from hybridpd_testkit.expectations import MAX_TOKENS, random_prompt
from hybridpd_testkit.pd_client import (
    OpenRequest,
    complete,
    evidence,
    leases_held,
    refused,
    require_nothing_left,
    wait_until,
)

STEP_SECONDS = 25.0
BLOCKERS = 6
PROMPT = random_prompt(200, 55)
EXPIRED = "hybridpd_leases_expired_total"


def lease_seconds(engine):
    return engine.spec.extra_config["lease_seconds"]


def hold_in_queue(pair, params, during):
    """Send the decode while others occupy D, run ``during``, let D go on; the answer."""
    with ThreadPoolExecutor(1) as pool:
        with contextlib.ExitStack() as blockers:
            for _ in range(BLOCKERS):
                blockers.enter_context(OpenRequest(pair.decode, [9, 8, 7], 2000))
            waiting = "vllm:num_requests_waiting"
            wait_until(
                lambda: pair.decode.metrics().total(waiting) == BLOCKERS - 1, "D is occupied"
            )
            answer = pool.submit(pair.decode_only, PROMPT, params, MAX_TOKENS)
            during()
            assert not answer.done()
        return answer.result()


def check_loaded_late(pair, during):
    expected = complete(pair.prefill, PROMPT, MAX_TOKENS).tokens
    before_p, before_d = pair.prefill.metrics(), pair.decode.metrics()
    params = pair.prefill_only(PROMPT)
    answer = hold_in_queue(pair, params, during)
    assert answer.tokens == expected
    counted = evidence(pair.decode.metrics().since(before_d))
    assert (counted.loads, counted.failures, counted.recomputed) == (1, 0, 0)
    require_nothing_left(pair.prefill, pair.decode)
    assert pair.prefill.metrics().since(before_p).total(EXPIRED) == 0


def test_vllm_leases_last_while_d_queues_the_request(brief_queue):
    """D has no room for three leases; P keeps the blocks and the answer is right."""
    wait = 3 * lease_seconds(brief_queue.prefill) + 1
    check_loaded_late(brief_queue, lambda: time.sleep(wait))


def test_vllm_leases_last_through_a_p_step_of_25_seconds(pool, brief_queue):
    """P cannot look at its messages for four leases, and reads them before it expires anything."""
    orders = pool.orders(brief_queue.prefill)

    def stall():
        orders.stall(STEP_SECONDS)
        wait_until(lambda: orders.stall_taken, "P's step has begun")
        time.sleep(STEP_SECONDS)

    check_loaded_late(brief_queue, stall)


def test_vllm_leases_expire_without_a_reader_and_late_readers_fail(brief, brief_queue):
    """Nobody asks: P frees the blocks. Who comes later gets an error, never another's state."""
    before = brief.prefill.metrics()
    params = brief.prefill_only(PROMPT)
    wait_until(lambda: leases_held(brief.prefill) == 1, "P holds it")
    wait_until(
        lambda: brief.prefill.metrics().since(before).total(EXPIRED) == 1,
        "the lease has expired",
        3 * lease_seconds(brief.prefill),
    )
    counted = refused(brief.decode, lambda: brief.decode_only(PROMPT, params, MAX_TOKENS))
    assert (counted.loads, counted.failures) == (0, 1)
    expected = complete(brief.prefill, PROMPT, MAX_TOKENS).tokens
    assert brief_queue.decode_only(PROMPT, params, MAX_TOKENS).tokens == expected
    require_nothing_left(brief.prefill, brief.decode, brief_queue.decode)
