"""Steps of a decode engine out of traced lines: which count, and as what."""

import pytest

from hybridpd_testkit.decode_steps import (
    AFTER,
    FEW,
    FLYING,
    MANY,
    NONE,
    ONE,
    PAUSED,
    bucket,
    calls_table,
    durations,
    places_table,
    seen_in,
    steps_table,
)
from hybridpd_testkit.trace_lines import Lines, read_lines

ALWAYS = [(0.0, 1e9)]


def step(at, requests, reads=0, flying=0, goes_on=1, tokens=None):
    tokens = requests if tokens is None else tokens
    return ["step", at, requests, tokens, reads, flying, goes_on, 1e-5]


def found(lines, stretches=ALWAYS):
    rounded = {}
    for key, values in durations(seen_in(lines, stretches)).items():
        rounded[key] = [round(value, 6) for value in values]
    return rounded


def test_a_step_lasts_until_the_next_one_that_goes_on_with_it():
    lines = [step(1.0, 2), step(1.5, 2), step(9.0, 2, goes_on=0), step(9.25, 2)]
    assert found(lines) == {
        (NONE, 2): [0.5],
        (PAUSED, 2): [0.25],
    }, "the pause is no step, the last has no end"


def test_only_the_first_steps_behind_a_pause_are_told_apart():
    lines = [step(1.0, 1, goes_on=0), *(step(2.0 + index, 1) for index in range(10))]
    assert found(lines) == {(PAUSED, 1): [1.0] * 8, (NONE, 1): [1.0] * 2}


def test_steps_with_reads_are_told_apart():
    lines = [
        step(1.0, 3),
        step(2.0, 3, reads=1, flying=1),
        step(4.0, 3, flying=1),
        step(7.0, 3, flying=1),
        step(11.0, 3, reads=3, flying=4),
        step(16.0, 3, reads=5, flying=9),
        step(22.0, 3),
        step(29.0, 3),
        step(37.0, 3),
    ]
    assert found(lines) == {
        (NONE, 4): [1.0, 8.0],
        (ONE, 4): [2.0],
        (AFTER, 4): [3.0, 7.0],
        (FLYING, 4): [4.0],
        (FEW, 4): [5.0],
        (MANY, 4): [6.0],
    }


def test_steps_that_prefill_and_steps_without_requests_do_not_count():
    lines = [step(1.0, 2, tokens=65), step(2.0, 0, flying=1, goes_on=0), step(3.0, 1, goes_on=0)]
    assert found(lines) == {}


def test_stretches_are_kept_apart_and_other_lines_left_out():
    lines = [step(1.0, 1), step(2.0, 1), ["arrived", "d-1", 2.5], step(3.0, 1), step(5.0, 1)]
    assert found(lines, [(0.0, 2.0), (2.9, 6.0)]) == {(NONE, 1): [1.0, 2.0]}
    assert found(lines, [(7.0, 8.0)]) == {}


@pytest.mark.parametrize(("requests", "most"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (128, 128)])
def test_buckets(requests, most):
    assert bucket(requests) == most


def test_tables_have_both_connectors_and_their_ratio():
    def engine(seconds):
        steps = [step(1 + index * seconds, 3) for index in range(11)]
        return seen_in([*steps, ["calls", 2.0, 0, 1e-6, 2e-6, 3e-6]], ALWAYS)

    both = {"in-tree": engine(0.004), "hybridpd": engine(0.003)}
    lines = steps_table(both)
    assert len(lines) == 2
    assert lines[1].split() == [
        *["no", "read", "in", "flight,", "3-4", "requests"],
        *("4.00", "4.00", "10", "3.00", "3.00", "10", "0.750"),
    ]
    calls = {line[:42].strip(): line.split()[-1] for line in calls_table(both)}
    assert calls["worker, no read ordered"] == "1.000"
    assert "worker, reads ordered" not in calls


def test_lines_are_read_back_while_they_are_written_and_a_full_file_takes_no_more(tmp_path):
    lines = Lines(tmp_path, "A SCHEDULER", size=60)
    lines.write('["step",1]')
    assert dict(read_lines(tmp_path)) == {"A SCHEDULER": [["step", 1]]}
    for _ in range(10):
        lines.write('["step",2]')
    assert dict(read_lines(tmp_path)) == {"A SCHEDULER": [["step", 1], ["step", 2], ["step", 2]]}


def test_the_first_steps_behind_a_pause_are_told_by_place_with_the_calls_in_them():
    def engine(second):
        at = [1.0, 1.25, 1.25 + second, 2.25, 3.0]
        steps = [step(moment, 1, goes_on=place > 0) for place, moment in enumerate(at)]
        later = [step(moment + 9, 1, goes_on=place > 0) for place, moment in enumerate(at)]
        calls = [["calls", 1.26, 0, 0.125, 0.0625, 0.0], ["calls", 10.26, 0, 0.125, 0.0625, 0.0]]
        return seen_in([*steps, *later, *calls], ALWAYS)

    lines = places_table({"in-tree": engine(0.5), "hybridpd": engine(0.25)})
    rows = {line[:42].strip(): line[42:].split() for line in lines[1:]}
    assert rows["step 1"] == ["250.00", "250.00", "2", "250.00", "250.00", "2", "1.000"]
    assert rows["step 2"] == ["500.00", "500.00", "2", "250.00", "250.00", "2", "0.500"]
    assert rows["worker's calls in step 2"][0] == "187.50"
    assert rows["worker's calls in step 1"][0] == "0.00"
    assert "step 5" not in rows, "the last step has no end"
    assert places_table({"in-tree": seen_in([step(1.0, 1), step(2.0, 1)], ALWAYS)}) == []
