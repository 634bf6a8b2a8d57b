"""The failure table, executed: see ``chaos_table``."""

import pytest
from chaos_stage import ANSWER, ERROR, HUNG, LENGTH
from chaos_table import ROWS

from hybridpd_testkit.pd_client import wait_until

FILES_MORE = 32
"""Open files that an engine may have more than at its start: keep-alive connections of clients."""


@pytest.fixture
def settled(stage):
    """Both engines run, have met, and hold nothing."""
    stage.calm()
    check_next_request(stage, 1)
    stage.require_idle()
    return stage


def check_next_request(stage, seed):
    """A fresh prompt goes through both engines: loaded, and right."""
    prompt, expected = stage.prompt(seed, length=LENGTH // 4)
    before = stage.decode.metrics()
    seen = stage.load(prompt, stage.prefilled(prompt))
    counted = stage.counted(before)
    assert (seen.what, seen.tokens, counted.loads) == (ANSWER, expected, 1), seen


def test_chaos_reads_cross_the_wire(settled):
    """What the faults are done to is what the bytes go through, by the kernel's own counter."""
    prompt, expected = settled.prompt(3)
    params, before = settled.prefilled(prompt), settled.decode.metrics()
    wire = settled.network.bytes_to_decode()
    assert settled.load(prompt, params).tokens == expected
    read_bytes = settled.counted(before).read_bytes
    assert read_bytes > 500_000
    assert settled.network.bytes_to_decode() - wire > read_bytes


@pytest.mark.parametrize("row", ROWS, ids=[row.name.replace(" ", "_") for row in ROWS])
def test_chaos_row(settled, row):
    stage = settled
    held, before, decode = stage.held(), stage.decode.metrics(), stage.decode
    seen = row.fault(stage)
    assert seen.what != HUNG
    assert seen.what in row.sees, seen
    assert seen.seconds <= row.within_seconds, seen
    if stage.runs("decode"):
        earlier = before if stage.decode is decode else None
        if seen.what == ERROR and row.reasons:
            # What the client saw is a failed load, and not a request that was wrong in itself.
            wait_until(lambda: stage.reasons(earlier), f"decode counts {seen}")
        assert stage.reasons(earlier) <= set(row.reasons)
    stage.calm()
    idle = stage.require_idle()
    check_next_request(stage, 2)
    stage.require_idle()
    grown = stage.grown_since(held, FILES_MORE)
    assert not grown
    stage.report(f"{row.name:<42} {seen.what:<7} {seen.seconds:6.1f} s, idle after {idle:.1f} s")
