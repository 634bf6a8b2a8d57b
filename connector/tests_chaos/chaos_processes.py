"""Faults of engines and of the link between them. Each returns what the client of decode saw."""

import signal
import time

from chaos_stage import ANSWER, ERROR, LEASE_SECONDS, Seen, ask

from hybridpd_testkit.pd_client import OpenRequest, leases_held, require_nothing_left, wait_until
from hybridpd_testkit.relay import Weather

LOADS = "hybridpd_loads_total"
EXPIRED = "hybridpd_leases_expired_total"
LONG_ANSWER = 400
DELAY_SECONDS, LOST = 0.2, 0.02


def prefill_killed_before_the_read(stage):
    prompt, _ = stage.prompt(101)
    params = stage.prefilled(prompt)
    stage.kill("prefill")
    return stage.load(prompt, params)


def prefill_killed_during_the_read(stage):
    prompt, _ = stage.prompt(102)
    params = stage.prefilled(prompt)
    return stage.during_read(prompt, params, lambda: stage.kill("prefill"))


def prefill_killed_after_the_read(stage):
    """What was loaded is decode's own: the answer goes on and is right."""
    prompt, _ = stage.prompt(103)
    expected = ask(stage.prefill, prompt, None, max_tokens=LONG_ANSWER).tokens
    params, before = stage.prefilled(prompt), stage.decode.metrics()
    answer = stage.later(stage.load, prompt, params, max_tokens=LONG_ANSWER)
    wait_until(lambda: stage.decode.metrics().since(before).total(LOADS) == 1, "it was loaded")
    stage.kill("prefill")
    seen = answer.result()
    assert seen.what != ANSWER or seen.tokens == expected
    return seen


def decode_killed_while_prefill_holds_blocks(stage):
    prompt, _ = stage.prompt(104)
    params = stage.prefilled(prompt)
    seen = stage.during_read(prompt, params, lambda: stage.kill("decode"))
    require_nothing_left(stage.prefill, timeout_seconds=LEASE_SECONDS + 5 + 20)
    return seen


def prefill_restarted_on_its_address(stage):
    """The router still has an answer of the engine that was there before."""
    prompt, _ = stage.prompt(105)
    params = stage.prefilled(prompt)
    stage.kill("prefill")
    stage.start("prefill")
    return stage.load(prompt, params)


def decode_restarted_on_its_address(stage):
    """Meanwhile the lease of the request ran out, as nobody renewed it."""
    prompt, _ = stage.prompt(106)
    params = stage.prefilled(prompt)
    stage.kill("decode")
    stage.start("decode")
    wait_until(lambda: leases_held(stage.prefill) == 0, "the lease has ended")
    return stage.load(prompt, params)


def both_restarted(stage):
    prompt, _ = stage.prompt(107)
    params = stage.prefilled(prompt)
    stage.kill("prefill", "decode")
    stage.start("prefill", "decode")
    return stage.load(prompt, params)


def prefill_frozen_during_the_read(stage):
    """A frozen engine cannot be told from a slow one: its reader waits, the others do not."""
    prompt, expected = stage.prompt(108)
    params = stage.prefilled(prompt)
    others = []

    def freeze():
        stage.prefill.send_signal(signal.SIGSTOP)
        try:
            others.append(ask(stage.decode, prompt[:50], None))
            time.sleep(LEASE_SECONDS + 2)
            others.append(ask(stage.decode, prompt[:50], None))
        finally:
            stage.prefill.send_signal(signal.SIGCONT)

    seen = stage.during_read(prompt, params, freeze)
    assert [other.what for other in others] == [ANSWER, ANSWER]
    return right(seen, expected)


def link_cut_for(seconds, *, reading):
    def fault(stage):
        prompt, expected = stage.prompt(120 + seconds + reading)
        params = stage.prefilled(prompt)

        def cut():
            stage.network.cut()
            stage.after(seconds, stage.network.mend)

        if reading:
            return right(stage.during_read(prompt, params, cut), expected)
        cut()
        return right(stage.load(prompt, params), expected)

    return fault


def link_long_and_lossy(stage):
    prompt, expected = stage.prompt(109)
    params = stage.prefilled(prompt)
    relay = stage.network.weather(Weather(DELAY_SECONDS, LOST, seed=1))
    seen = stage.load(prompt, params)
    assert relay.passed > 100
    assert relay.lost > 0
    return right(seen, expected)


def lease_expired_before_the_read(stage):
    prompt, _ = stage.prompt(110)
    before = stage.prefill.metrics()
    params = stage.prefilled(prompt)
    wait_for_expiry(stage, before)
    return stage.load(prompt, params)


def lease_expired_during_the_read(stage):
    """Renewals do not come through a cut link; the pages do, when it is whole again."""
    prompt, _ = stage.prompt(111)
    before = stage.prefill.metrics()
    params = stage.prefilled(prompt)

    def cut():
        stage.network.cut()
        wait_for_expiry(stage, before)
        stage.network.mend()

    return stage.during_read(prompt, params, cut)


def clocks_minutes_apart(stage):
    """Decode's steady clock is ten minutes ahead of prefill's. It is not compared with anything."""
    stage.start("decode", clock_ahead_seconds=600)
    prompt, expected = stage.prompt(113)
    params = stage.prefilled(prompt)
    time.sleep(1.0)
    return right(stage.load(prompt, params), expected)


def wait_for_expiry(stage, before):
    wait_until(
        lambda: stage.prefill.metrics().since(before).total(EXPIRED) == 1,
        "the lease has expired",
        LEASE_SECONDS + 25,
    )


def client_gone_during_the_load(stage):
    prompt, _ = stage.prompt(112)
    params = stage.prefilled(prompt)
    stage.network.throttle(2000)
    before = stage.network.bytes_to_decode()
    with OpenRequest(stage.decode, prompt, 8, kv_transfer_params=params):
        wait_until(lambda: stage.network.bytes_to_decode() - before > 50_000, "bytes flow")
    return Seen("gone")


def right(seen, expected):
    """An answer with other tokens than a single engine's is the one thing that never happens."""
    assert seen.what != ANSWER or seen.tokens == expected, (seen.tokens, expected)
    return seen


def both(first, second):
    """What two clients saw: an error when either did."""
    return max((first, second), key=lambda seen: (seen.what != ANSWER, seen.what != ERROR))
