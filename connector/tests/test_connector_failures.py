"""Failures: every reason has its sentence, every failed request its line, and no line a flood."""

import ast
import importlib
import logging
import pathlib
import re

import pytest
from connector_engines import LEASE_SECONDS, World
from test_connector_two_engines import all_free, loaded, prefilled

import hybridpd_connector
from hybridpd_connector import failure_log, failure_reasons
from hybridpd_connector.failure_log import BURST, WINDOW_SECONDS, FailureLog, LogBudget
from hybridpd_connector.failure_reasons import REASONS, join, known, split

PACKAGE = pathlib.Path(hybridpd_connector.__file__).parent
FAILING_CALLS = ("fail", "_fail", "_end")
REASON_MODULES = ("consumer", "decode_side", "transfers", "verifier", "wants")


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "hybridpd_connector")

    def told():
        return [
            record.getMessage() for record in caplog.records if record.name == failure_log.__name__
        ]

    return told


def constants(module):
    """Module-level names in capitals with a word as their value."""
    return {
        name: value
        for name, value in vars(importlib.import_module(f"hybridpd_connector.{module}")).items()
        if name.isupper() and isinstance(value, str) and value.isidentifier()
    }


def reasons_in_code():
    """Constants passed to anything that fails a load, in every module without vLLM."""
    found = {}
    for path in PACKAGE.glob("*.py"):
        if path.stem.startswith(("vllm_", "connector")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in FAILING_CALLS:
                    names = [a.id for a in node.args if isinstance(a, ast.Name) and a.id.isupper()]
                    if names:
                        module = importlib.import_module(f"hybridpd_connector.{path.stem}")
                        found.update({getattr(module, name): path.stem for name in names})
    return found


def test_every_reason_in_the_code_has_its_sentence():
    found = reasons_in_code()
    assert {"read_failed", "peer_unreachable", "deadline", "aborted"} <= set(found)
    assert set(found) <= set(REASONS)
    for module in REASON_MODULES:
        assert set(constants(module).values()) <= set(REASONS), module


def test_every_sentence_belongs_to_a_reason_in_the_code():
    used = set(reasons_in_code()) | {failure_reasons.UNKNOWN, failure_reasons.LEASE_EXPIRED}
    used |= {value for module in REASON_MODULES for value in constants(module).values()}
    assert set(REASONS) <= used


@pytest.mark.parametrize("reason", REASONS.values(), ids=list(REASONS))
def test_sentences_say_something(reason):
    assert len(reason.meaning.split()) >= 4
    assert len(reason.action.split()) >= 3
    assert not reason.meaning.endswith(".")
    assert not reason.action.endswith(".")
    assert reason.side in ("decode", "prefill")


def test_a_reason_travels_with_its_detail():
    assert split(join("read_failed", "rank 0: gone: for good")) == (
        "read_failed",
        "rank 0: gone: for good",
    )
    assert split(join("deadline", "")) == ("deadline", "")
    assert len(join("deadline", "x" * 5000)) < 700
    assert join("deadline", "a\nWARNING b") == "deadline: a?WARNING b"
    assert (known("deadline"), known("anything else")) == ("deadline", "unknown")


def test_a_failed_read_is_one_line_for_all_ranks(world, lines):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer", tp_size=2)
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    world.network.fail_reads(2)
    loaded(world, d, "d1")
    (line,) = lines()
    assert line.startswith("request d1 was not loaded from engine p at 10.0.0.1:5600: read_failed")
    # Of the rank that failed first: handshakes end in any order.
    assert re.search(r"\(rank [01] after 0\.0 s, p/0\)", line)
    assert REASONS["read_failed"].action in line
    assert d.half.take_stats()["failures"] == {"read_failed": 1}


def test_a_refused_load_says_what_was_expected_and_got(world, lines):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", [tokens[0] + 1, *tokens[1:]], answer)
    loaded(world, d, "d1")
    d.add("d2", [*tokens, 7], answer)
    loaded(world, d, "d2")
    d.add("d3", tokens, {**answer, "remote_port": "5600"})
    loaded(world, d, "d3")
    prompt, length, params = lines()
    assert "other_prompt (expected digest" in prompt
    assert "(expected the state of 40 tokens, got 39)" in length
    assert "from anywhere: bad_params (kv_transfer_params.remote_port: expected an int" in params


def test_engines_that_do_not_fit_are_told_with_their_difference(world, lines):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer", kv_dtype="float32")
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    (line,) = lines()
    assert "peer_refused (rank 0 after" in line
    assert "kv_dtype is float32 here" in line


def test_a_peer_that_never_answers_is_told_with_the_last_error(world, lines):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    world.responders.clear()
    d.add("d1", tokens, answer)
    d.schedule("d1")
    world.until(lambda: d.ranks[0].peers().get("backing_off"))
    world.now += 21
    world.until(lambda: "d1" in d.reasons)
    (line,) = lines()
    assert "peer_unreachable (rank 0 after 21.0 s, side channel: expected an answer" in line


def test_a_request_whose_client_left_is_no_failure(world, lines):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    d.schedule("d1")
    d.end("d1")
    world.until(lambda: all_free(d))
    assert lines() == []


@pytest.mark.parametrize("renewed", [False, True])
def test_an_expired_lease_is_one_line_and_one_count_for_all_ranks(world, lines, renewed):
    p = world.engine("p", "producer", tp_size=2)
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    p.step()
    assert p.half.take_stats()["gauges"] == {"leases_held": 1}
    if renewed:
        d.add("d1", tokens, answer)
        held = [rank._producer._leases._held["p1"] for rank in p.ranks]
        world.until(lambda: all(lease.seen_engines for lease in held))
    world.now += LEASE_SECONDS + 1
    p.step()
    (line,) = lines()
    assert line.startswith("prefill p1 was not read: lease_expired (held for 31.0 s, ")
    assert ("last renewed 31.0 s ago by d" if renewed else "no reader was heard of") in line
    told = p.half.take_stats()
    assert told["counts"] == {"leases_expired": 1}
    assert told["gauges"] == {"leases_held": 0}


def test_a_lease_that_ran_out_on_one_rank_alone_counts_as_expired(world):
    p = world.engine("p", "producer", tp_size=2)
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    deaf = p.ranks[1]._producer._pump
    deaf.take = list
    loaded(world, d, "d1")
    d.end("d1")
    world.until(lambda: p.ranks[0]._producer.held == 0)
    assert not all_free(p)
    world.now += LEASE_SECONDS + 1
    p.step()
    assert all_free(p)
    assert p.half.take_stats()["counts"] == {"leases_expired": 1}


def test_many_failures_of_one_kind_are_few_lines(caplog):
    now = 0.0
    log = FailureLog(lambda: now)
    caplog.set_level(logging.INFO, failure_log.__name__)
    for number in range(100):
        log.load_failed(f"r{number}", "p", "10.0.0.1:5600", "read_failed", "")
    log.load_failed("other", "p", "10.0.0.1:5600", "deadline", "")
    log.flush()
    assert len(caplog.messages) == BURST + 1
    now = WINDOW_SECONDS
    log.flush()
    assert caplog.messages[-1] == "92 more like it within 10 s: read_failed from engine p"
    log.load_failed("r100", "p", "10.0.0.1:5600", "read_failed", "")
    assert caplog.messages[-1].startswith("request r100 was not loaded")


def test_lines_beyond_the_kinds_that_are_kept_apart_are_counted(caplog, monkeypatch):
    """Names that are made up may crowd a real one out of the log, but not without a word."""
    monkeypatch.setattr(failure_log, "MAX_KINDS", 3)
    now = [0.0]
    log = FailureLog(lambda: now[0])
    for number in range(10):
        log.load_failed("r", f"p{number}", "h:1", "read_failed", "")
    assert len(caplog.messages) == 3
    now[0] = WINDOW_SECONDS
    log.flush()
    line = "7 more like it within 10 s: of other engines or for other reasons"
    assert caplog.messages[3:] == [line]
    now[0] = 2 * WINDOW_SECONDS
    log.flush()
    assert len(caplog.messages) == 4


def test_hostile_names_and_many_kinds_cost_little(caplog, monkeypatch):
    monkeypatch.setattr(failure_log, "MAX_KINDS", 3)
    log = FailureLog(lambda: 0.0)
    for number in range(10):
        log.load_failed("r\n" + "x" * 10_000, f"p{number}", "h:1", "no_such_reason", "")
    assert len(caplog.messages) == 3
    assert all(len(line) < 1000 and "\n" not in line for line in caplog.messages)
    budget = LogBudget()
    assert budget.idle
    assert budget.admit(("p", "deadline"), 0.0)
    assert not budget.idle
    assert budget.take_over(WINDOW_SECONDS) == [(("p", "deadline"), 0)]
    assert budget.idle
