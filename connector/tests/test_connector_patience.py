"""A step waits for its own reads while that pays, and stops when it does not."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpd_connector.patience import MISSES, RETRY, Patience

BOUND = 0.5


def took(patience, seconds, key="p"):
    watch = patience.begin(key, 10.0)
    patience.end(watch, 10.0 + seconds)
    return watch.worth


def test_what_ends_in_time_is_waited_for_again():
    patience = Patience(BOUND)
    assert all(took(patience, 0.4) for _ in range(100))


def test_a_wait_lasts_until_its_bound():
    patience = Patience(BOUND)
    watch = patience.begin("p", 10.0)
    assert patience.lasts(watch, 10.49)
    assert not patience.lasts(watch, 10.5)


def test_slow_reads_are_waited_for_now_and_then_only():
    patience = Patience(BOUND)
    waits = [took(patience, 3.0) for _ in range(MISSES + 10 * RETRY)]
    assert waits[:MISSES] == [True] * MISSES
    assert sum(waits[MISSES:]) == 10


def test_one_that_ends_in_time_brings_the_waiting_back():
    patience = Patience(BOUND)
    for _ in range(50):
        took(patience, 3.0)
    took(patience, 0.1)
    assert took(patience, 3.0)


def test_keys_do_not_disturb_each_other():
    patience = Patience(BOUND)
    for _ in range(MISSES):
        took(patience, 3.0, "slow")
    assert not took(patience, 3.0, "slow")
    assert took(patience, 0.1, "fast")


def test_a_bound_of_nothing_never_waits():
    patience = Patience(0.0)
    watch = patience.begin("p", 10.0)
    assert not watch.worth
    assert not patience.lasts(watch, 10.0)


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 10.0), max_size=300))
def test_waits_in_vain_stay_rare(durations):
    """Between two that end in time at most MISSES + a RETRYth of the waits are in vain."""
    patience = Patience(BOUND)
    vain = since_hit = 0
    for seconds in durations:
        worth = took(patience, seconds)
        if seconds <= BOUND:
            vain = since_hit = 0
        else:
            since_hit += 1
            vain += worth
            assert vain <= MISSES + since_hit // RETRY
