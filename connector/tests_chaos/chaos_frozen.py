"""Faults of an engine that is stopped and not dead: its sockets are open, and it says nothing."""

import contextlib
import signal
import time

from chaos_processes import LONG_ANSWER, right
from chaos_stage import ANSWER, ERROR, LEASE_SECONDS, ask

from hybridpd_testkit.pd_client import wait_until

HELD = "hybridpd_blocks_held"
BYSTANDERS = 6


@contextlib.contextmanager
def frozen(engine):
    engine.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        engine.send_signal(signal.SIGCONT)


def before_the_read(stage):
    """Shorter than a read may take: renewals wait in its mailbox, the read in its socket."""
    prompt, expected = stage.prompt(131)
    params = stage.prefilled(prompt)
    with frozen(stage.prefill):
        answer = stage.later(stage.load, prompt, params)
        time.sleep(LEASE_SECONDS + 2)
        assert not answer.done(), answer.result()
    return right(answer.result(), expected)


def before_the_handshake(stage):
    """Decode has never met it. Its kernel takes the connection, and nobody answers."""
    stage.kill("prefill")
    stage.start("prefill")
    prompt, _ = stage.prompt(132)
    params = stage.prefilled(prompt)
    with frozen(stage.prefill):
        return stage.load(prompt, params)


def past_the_read(policy, tp_size):
    """Longer than a read may take. The client need not wait, the blocks must: others run beside
    them, also while the late bytes arrive."""

    def fault(stage):
        stage.start("decode", policy=policy, tp_size=tp_size)
        prompt, expected = stage.prompt(133)
        others = [stage.prompt(140 + index, length=200)[0] for index in range(BYSTANDERS)]
        wanted = [ask(stage.prefill, other, None, max_tokens=LONG_ANSWER) for other in others]
        # They have met: what flows from here on is the read.
        assert stage.load(others[0], stage.prefilled(others[0])).what == ANSWER
        params = stage.prefilled(prompt)
        stop = lambda: stage.prefill.send_signal(signal.SIGSTOP)  # noqa: E731
        try:
            seen = stage.during_read(prompt, params, stop)
            assert stage.decode.metrics().total(HELD) > 0
            answers = [
                stage.later(ask, stage.decode, other, None, max_tokens=LONG_ANSWER)
                for other in others
            ]
            time.sleep(0.5)
        finally:
            stage.prefill.send_signal(signal.SIGCONT)
        wait_until(lambda: stage.decode.metrics().total(HELD) == 0, "the late read has ended")
        for answer, want in zip(answers, wanted, strict=True):
            assert answer.result().tokens == want.tokens
        stage.network.calm()
        stage.require_idle()
        assert seen.what == ERROR or seen.tokens == expected, seen
        return seen

    return fault
