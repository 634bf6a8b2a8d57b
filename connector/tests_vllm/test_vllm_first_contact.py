"""The first request of a pair, when the two engines have never spoken and P has other things to do.

These need decode engines that have not met anybody: they are started anew.
"""

import signal
import time

from hybridpd_testkit.expectations import MAX_TOKENS, prompts, reference_tokens
from hybridpd_testkit.pd_client import (
    OpenRequest,
    Pair,
    complete,
    measured,
    require_nothing_left,
    wait_until,
)

STALL_SECONDS = 4.0
PROMPT = 6


def has_met_nobody(engine):
    return engine.metrics().total("hybridpd_peers") == 0


def test_vllm_first_contact_while_p_is_in_a_long_step(pool):
    """The handshake and the read go on while P's engine is inside one step."""
    (prefill,) = pool.engines("nemotron-h", "p1")
    pair = Pair(prefill, pool.fresh("nemotron-h", "d1"))
    expected = reference_tokens(pair.prefill)[PROMPT]
    assert has_met_nobody(pair.decode)
    params = pair.prefill_only(prompts()[PROMPT])
    orders = pool.orders(pair.prefill)
    orders.stall(STALL_SECONDS)
    wait_until(lambda: orders.stall_taken, "P's step has begun")
    answer, counted = measured(
        pair.decode, lambda: pair.decode_only(prompts()[PROMPT], params, MAX_TOKENS)
    )
    assert answer.tokens == expected
    assert (counted.loads, counted.failures, counted.recomputed) == (1, 0, 0)
    require_link_was_probed(pair.decode)
    require_nothing_left(pair.prefill, pair.decode)


def require_link_was_probed(decode):
    """Woken up and measured before the first read: shown as a metric, told once, not as slow."""
    metric = "hybridpd_link_bytes_per_second"
    shown = {key: value for key, value in decode.metrics().samples.items() if key[0] == metric}
    (((_, labels), bytes_per_second),) = shown.items()
    path, peer = dict(labels)["path"], dict(labels)["peer"]
    assert path in ("shm", "unknown")
    assert bytes_per_second > 1e6
    log = decode.log_path.read_text(errors="replace")
    assert log.count(f"at {peer}: {path}, ") == 1
    assert "is slow" not in log


def test_vllm_first_contact_abandoned_while_p_is_frozen(pool):
    """A client leaves while the handshake hangs: both sides end empty, and the pair works later."""
    (prefill,) = pool.engines("nemotron-h", "p1")
    decode = pool.fresh("nemotron-h", "e2")
    pair = Pair(prefill, decode)
    assert has_met_nobody(decode)
    params = pair.prefill_only(prompts()[PROMPT])
    prefill.send_signal(signal.SIGSTOP)
    try:
        with OpenRequest(decode, prompts()[PROMPT], MAX_TOKENS, kv_transfer_params=params):
            waiting = "vllm:num_requests_waiting"
            wait_until(lambda: decode.metrics().total(waiting) > 0, "D waits for the load")
        time.sleep(1.0)  # the abort happens while P is still frozen
    finally:
        prefill.send_signal(signal.SIGCONT)
    require_nothing_left(decode, prefill, timeout_seconds=60.0)
    expected = reference_tokens(prefill)[PROMPT]
    answer, counted = measured(decode, lambda: pair.complete(prompts()[PROMPT], MAX_TOKENS))
    assert answer.tokens == expected
    assert (counted.loads, counted.failures) == (1, 0)


def test_vllm_first_contact_plain_request_needs_no_peer(pool):
    """An engine with the connector serves a request without transfer parameters by itself."""
    _, decode = pool.engines("nemotron-h", "p1", "d1")
    answer, counted = measured(decode, lambda: complete(decode, prompts()[PROMPT], MAX_TOKENS))
    prefill, _ = pool.engines("nemotron-h", "p1", "d1")
    assert answer.tokens == reference_tokens(prefill)[PROMPT]
    assert (counted.external_tokens, counted.loads, counted.read_bytes) == (0, 0, 0)
