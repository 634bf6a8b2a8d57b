"""Real engines that meet before the first request: D is up first, P comes, goes, and comes again.

When whom is asked is tested in connector/tests, with a clock of their own.
"""

import dataclasses

from hybridpd_testkit.engines import Place
from hybridpd_testkit.expectations import MAX_TOKENS, prompts, reference_tokens
from hybridpd_testkit.pd_client import Pair, measured, require_nothing_left, wait_until
from hybridpd_testkit.processes import free_port

PROMPT = 6
RANKS = 2
MET, HANDSHAKE = "is met ahead of requests", "ready to read from"


def specs(pool):
    """P on a port that is known before it starts; D is told a host name with two addresses, of
    which P has one."""
    port = free_port()
    prefill, decode = pool.spec("nemotron-h", "p1"), pool.spec("nemotron-h", "d1")
    return (
        dataclasses.replace(prefill, name="met-p", place=Place(side_channel_port=port)),
        dataclasses.replace(
            decode,
            name="met-d",
            tp_size=RANKS,
            extra_config={"prefill_peers": [f"localhost:{port}"]},
        ),
    )


def first_request_is_warm(pair, before):
    """P has been met by every rank of D; its first request loads, and nobody shakes hands again."""

    def times(text):
        return pair.decode.log_path.read_text(errors="replace").count(text)

    wait_until(lambda: times(MET) == before + RANKS, "every rank of D has met P", 90.0)
    assert times(HANDSHAKE) == before + RANKS
    expected = reference_tokens(pair.prefill)[PROMPT]
    answer, counted = measured(pair.decode, lambda: pair.complete(prompts()[PROMPT], MAX_TOKENS))
    assert answer.tokens == expected
    assert (counted.loads, counted.failures, counted.recomputed) == (1, 0, 0)
    assert times(HANDSHAKE) == before + RANKS, "the request made a handshake of its own"
    assert pair.decode.metrics().total("hybridpd_peers", state="ready") == 1
    require_nothing_left(pair.prefill, pair.decode)


def test_vllm_met_ahead_the_first_request_finds_p_ready_also_after_its_restart(pool):
    prefill_spec, decode_spec = specs(pool)
    with pool.own(decode_spec) as (decode,):
        with pool.own(prefill_spec) as (prefill,):
            first_request_is_warm(Pair(prefill, decode), before=0)
        with pool.own(prefill_spec) as (prefill,):
            first_request_is_warm(Pair(prefill, decode), before=RANKS)
        assert decode.metrics().total("hybridpd_peers", state="evicted") >= 1
        log = decode.log_path.read_text(errors="replace")
        told = [line for line in log.splitlines() if "prefill_peers" in line]
        assert not [line for line in told if "WARNING" in line], "D was up first: that is normal"
        assert len(told) <= 2 * RANKS, "one line per rank and address"
