"""Engines' counters: read from the text form, judged against what was recorded before."""

from typing import Any

import pytest

from hybridpd_operator.observed import EngineSample
from hybridpd_operator.verify import Transfer, judge, parse_sample

TEXT = """\
# HELP hybridpd_loads_total Loads.
# TYPE hybridpd_loads_total counter
hybridpd_loads_total{engine="0",model_name="nano"} 7.0
hybridpd_loads_total{engine="1",model_name="nano"} 1.0
hybridpd_loads_created{engine="0",model_name="nano"} 1.7e+09
hybridpd_load_failures_total{engine="0",model_name="nano",reason="lease_expired"} 2.0
hybridpd_load_failures_total{engine="0",model_name="nano",reason="odd, \\"quoted\\" } one"} 1.0
hybridpd_load_failures_total{engine="0",model_name="nano",reason="never"} 0.0
hybridpd_read_bytes_total{engine="0",model_name="nano"} 4.9082368e+07
hybridpd_predicted_bytes_total 49082368 1700000000000
hybridpd_leases_expired_total{engine="0"} 4.0
hybridpd_recomputed_requests_total{engine="0"} NaN
hybridpd_until_noticed_seconds_bucket{le="+Inf"} 8.0
vllm:num_requests_running{engine="0"} 3.0
hybridpd_loads_total
hybridpd_loads_total{engine="0" 5
"""


def test_counters_are_read_and_summed_over_labels() -> None:
    sample = parse_sample("pod", "decode", TEXT)
    assert sample == EngineSample(
        pod="pod",
        role="decode",
        loads=8,
        load_failures=3,
        read_bytes=49082368,
        predicted_bytes=49082368,
        leases_expired=4,
        failures_by_reason=(("lease_expired", 2), ('odd, "quoted" } one', 1)),
    )


def test_text_without_our_series_is_all_zero() -> None:
    assert parse_sample("p", "decode", "nothing here\n\x00{}\n") == EngineSample("p", "decode")


def sample(**counters: Any) -> EngineSample:
    return EngineSample("p", "decode", **counters)


TRUE = {"status": "True", "reason": "Transferred", "message": "decode reads prefill's KV memory"}
FALSE = {"status": "False", "reason": "LoadsFailed", "message": "1 loads failed (x: 1)"}


@pytest.mark.parametrize(
    ("samples", "last", "condition", "status", "reason"),
    [
        pytest.param(None, Transfer(), None, "Unknown", "NoTraffic", id="not asked yet"),
        pytest.param([sample()], Transfer(), None, "Unknown", "NoTraffic", id="no traffic"),
        pytest.param([sample(loads=1)], Transfer(), None, "True", "Transferred", id="first load"),
        pytest.param([sample(loads=9)], Transfer(loads=9), TRUE, "True", "Transferred", id="idle"),
        pytest.param(None, Transfer(loads=9), TRUE, "True", "Transferred", id="no answer"),
        pytest.param(
            [sample(loads=9, load_failures=1, failures_by_reason=(("x", 1),))],
            Transfer(loads=8),
            TRUE,
            "False",
            "LoadsFailed",
            id="a failure beside loads",
        ),
        pytest.param(
            [sample(recomputed_requests=1)], Transfer(), None, "False", "Recomputed", id="recompute"
        ),
        pytest.param(
            [sample(loads=5, load_failures=1)],
            Transfer(loads=5, load_failures=1),
            FALSE,
            "False",
            "LoadsFailed",
            id="a failure is not forgotten without traffic",
        ),
        pytest.param(
            [sample(loads=20, load_failures=1)],
            Transfer(loads=5, load_failures=1),
            FALSE,
            "True",
            "Transferred",
            id="loads after a failure",
        ),
        pytest.param(
            [sample(loads=2)],
            Transfer(loads=100, load_failures=3),
            FALSE,
            "True",
            "Transferred",
            id="engine restarted",
        ),
        pytest.param(
            [sample(load_failures=1, failures_by_reason=(("x", 1),))],
            Transfer(loads=100, load_failures=3),
            TRUE,
            "False",
            "LoadsFailed",
            id="engine restarted and fails",
        ),
    ],
)
def test_verdicts(
    samples: list[EngineSample] | None,
    last: Transfer,
    condition: dict[str, str] | None,
    status: str,
    reason: str,
) -> None:
    verdict = judge(samples, last, condition)
    assert (verdict.status, verdict.reason) == (status, reason)
    assert verdict.message


def test_constant_traffic_is_recorded_ever_more_rarely() -> None:
    last, condition, written = Transfer(), None, 0
    for loads in range(1, 10_001):
        verdict = judge([sample(loads=loads, read_bytes=loads * 10)], last, condition)
        if verdict.transfer != last:
            written += 1
        last = verdict.transfer
        condition = {
            "status": verdict.status,
            "reason": verdict.reason,
            "message": verdict.message,
        }
    assert last.loads > 9000
    assert written < 100


def test_bytes_that_are_seen_after_their_load_are_recorded() -> None:
    verdict = judge([sample(loads=1, read_bytes=9)], Transfer(loads=1), TRUE)
    assert (verdict.status, verdict.transfer.read_bytes) == ("True", 9)


def test_an_engine_that_comes_back_brings_no_new_failures() -> None:
    a, b = sample(loads=100), EngineSample("q", "decode", loads=100, load_failures=5)
    seen = {"p": a, "q": b}
    whole = judge([a, b], Transfer(loads=200, load_failures=5), TRUE, seen)
    without = judge([a], whole.transfer, TRUE, seen)
    again = judge([a, b], without.transfer, TRUE, seen)
    assert [one.status for one in (whole, without, again)] == ["True"] * 3
    newer = EngineSample("q", "decode", loads=101, load_failures=6)
    assert judge([a, newer], again.transfer, TRUE, seen).reason == "LoadsFailed"


def test_an_engine_that_began_anew_and_fails_is_told_whatever_the_others_count() -> None:
    """The sum still grows: only the engine's own numbers show that these failures are new."""
    seen = {"p": sample(loads=50), "q": EngineSample("q", "decode", loads=9, load_failures=3)}
    now = [sample(loads=100), EngineSample("q", "decode", loads=1, load_failures=2)]
    last = Transfer(loads=59, load_failures=3)
    assert judge(now, last, TRUE, seen).reason == "LoadsFailed"


def test_a_failure_stays_told_while_its_engine_is_away() -> None:
    a, b = sample(loads=100), EngineSample("q", "decode", loads=1, load_failures=5)
    verdict = judge([a], Transfer(loads=101, load_failures=5), FALSE, {"p": a, "q": b})
    assert (verdict.status, verdict.reason) == ("False", "LoadsFailed")


def test_bytes_of_all_engines_are_added() -> None:
    verdict = judge(
        [sample(loads=1, read_bytes=5), sample(loads=2, read_bytes=7)], Transfer(), None
    )
    assert (verdict.transfer.loads, verdict.transfer.read_bytes) == (3, 12)


def test_numbers_survive_the_status() -> None:
    transfer = Transfer(1, 2, 3, 4, 5, 6)
    assert Transfer.from_status(transfer.to_status()) == transfer
