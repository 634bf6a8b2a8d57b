"""The test tools themselves: checkpoints, tokenizer, metrics, processes."""

import functools
import socket
import subprocess
import sys
import threading
import urllib.error

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from hybridpd_testkit.checkpoint_families import FAMILIES, VOCABULARY_SIZE
from hybridpd_testkit.checkpoints import write_checkpoint
from hybridpd_testkit.engines import base_environment
from hybridpd_testkit.expectations import ideal_bytes
from hybridpd_testkit.metrics import parse_metrics
from hybridpd_testkit.near_ties import TIE_NATS, Reference, fallen_ties
from hybridpd_testkit.processes import (
    PORTS_VARIABLE,
    end_sessions,
    free_port,
    http_get,
    log_tail,
    session_members,
)
from hybridpd_testkit.tokenizer import SPECIAL_TOKENS, tokenizer_documents


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_kit_checkpoints_are_the_same_bytes_again(tmp_path, family):
    first = write_checkpoint(family, tmp_path / "first")
    second = write_checkpoint(family, tmp_path / "second")
    other = write_checkpoint(family, tmp_path / "other", seed=99)
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(
        ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    )
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes()
        assert (first / name).stat().st_mode & 0o777 == 0o644
    weights = "model.safetensors"
    assert (first / weights).read_bytes() != (other / weights).read_bytes()


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "lm_head.weight"), ("lfm2", "model.embed_tokens.weight")]
)
def test_vllm_kit_special_tokens_never_win(tmp_path, family, name):
    path = write_checkpoint(family, tmp_path) / "model.safetensors"
    with safe_open(path, "numpy") as tensors:
        head = tensors.get_tensor(name)
    assert not head[: len(SPECIAL_TOKENS)].any()
    assert head[len(SPECIAL_TOKENS) :].any(axis=1).all()


def test_vllm_kit_tokenizer_round_trip(tmp_path):
    path = write_checkpoint("llama", tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE
    text = "The quick brown fox bako 12!\nnext line"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text)
    ordinary = range(len(SPECIAL_TOKENS), VOCABULARY_SIZE)
    assert all(tokenizer.decode([index]).isprintable() or index == 4 for index in ordinary)


def test_vllm_kit_tokenizer_too_small():
    with pytest.raises(ValueError, match=r"vocabulary_size: expected 100 or more, got 50"):
        tokenizer_documents(50, 100)


def test_vllm_kit_command_line(tmp_path):
    module = "hybridpd_testkit.checkpoints"
    command = [sys.executable, "-m", module, "--family", "llama", "--out", str(tmp_path / "x")]
    run = functools.partial(
        subprocess.run, env=base_environment(), check=True, capture_output=True, text=True
    )
    assert run(command).stdout.strip() == str(tmp_path / "x")
    assert (tmp_path / "x" / "config.json").exists()
    assert "example:" in run([*command[:3], "--help"]).stdout


def test_vllm_kit_metrics_growth():
    before = parse_metrics('a_total{k="x",e="0"} 1\na_total{k="y",e="0"} 5\n')
    after = parse_metrics('a_total{k="x",e="0"} 4\na_total{k="y",e="0"} 5\nb{e="0"} 2\n')
    growth = after.since(before)
    assert growth.total("a_total") == 3
    assert growth.total("a_total", k="y") == 0
    assert growth.total("b", e="0") == 2
    assert growth.total("missing") == 0


def test_vllm_kit_ideal_bytes():
    """Two ranks; per rank one state layer of 30 + 40 bytes and two attention layers."""
    state = {"kind": "state", "layers": ["s"], "shapes": [[5, 3], [4, 5]], "item_bytes": [2, 2]}
    attention = {
        "kind": "attention",
        "layers": ["a", "b"],
        "kv_heads": 1,
        "head_dim": 8,
        "item_bytes": 4,
        "isa": "vec",
    }
    report = {"groups": [state, attention]}
    # 17 tokens: K in two runs of 16 tokens, V as it is; 32 bytes per token and head.
    assert ideal_bytes([report, report], 17) == 2 * (30 + 40 + 2 * (32 + 17) * 32)
    assert ideal_bytes([report], 0) == 0
    # With AMX, V in runs of two tokens.
    report["groups"][1] = {**attention, "isa": "amx"}
    assert ideal_bytes([report], 17) == 30 + 40 + 2 * (32 + 18) * 32


def test_vllm_kit_a_difference_is_accepted_only_at_a_near_tie():
    reference = Reference((4, 5, 6), (0.9, TIE_NATS, 0.9))
    assert reference.agreement((4, 5, 6)) == 3
    assert reference.agreement((4, 9, 9)) == 1
    for wrong in ((9, 5, 6), (4, 5, 9)):
        with pytest.raises(ValueError, match=r"which leads by 0.900 nats, got 9"):
            reference.agreement(wrong)


def test_vllm_kit_the_comparison_goes_on_behind_a_near_tie():
    reference = Reference((4, 5, 6, 7), (0.9, TIE_NATS, 0.9, 0.0))
    answers = {(1,): (4, 9, 9, 9), (1, 4, 5): (6, 8)}
    asked = []

    def complete(prompt, max_tokens):
        asked.append((tuple(prompt), max_tokens))
        return answers[tuple(prompt)]

    assert fallen_ties(reference, [1], complete) == 2
    assert asked == [((1,), 4), ((1, 4, 5), 2)]
    answers[1, 4, 5] = (9, 7)
    with pytest.raises(ValueError, match=r"expected 6, which leads by 0.900 nats, got 9"):
        fallen_ties(reference, [1], complete)


def test_vllm_kit_ports_are_given_out_once(monkeypatch):
    monkeypatch.setenv(PORTS_VARIABLE, "20100-20109")
    with pytest.raises(OSError, match="no free port left"):  # noqa: PT012 - some may be in use
        given = [free_port()]
        while True:
            given.append(free_port())
            assert len(set(given)) == len(given) <= 10
            assert set(given) <= set(range(20100, 20110))


def test_vllm_kit_a_session_ends_with_its_grandchildren():
    """A child that ignores SIGTERM and has left its parent is ended too."""
    script = "trap '' TERM; (trap '' TERM; sleep 60) & sleep 60"
    leader = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    while len(list(session_members(leader.pid))) < 3:
        assert leader.poll() is None
    end_sessions([leader], grace_seconds=0.1)
    assert list(session_members(leader.pid)) == []
    assert leader.wait() != 0


def test_vllm_kit_log_tail_names_the_error(tmp_path):
    log = tmp_path / "log"
    lines = ["start", "ValueError: the cause", *(f"line {index}" for index in range(100))]
    log.write_text("\n".join(lines))
    tail = log_tail(log)
    assert "ValueError: the cause" in tail
    assert tail.endswith("line 99")
    assert "line 10\n" not in tail


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{",
        b"HTTP/1.1 500 Oh\r\nContent-Length: 9\r\n\r\n{",
        b"no HTTP at all\r\n\r\n",
    ],
)
def test_vllm_kit_an_answer_that_ends_early_is_no_answer(said):
    """Wherever a server is killed, its clients hear one kind of error."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def say_a_part():
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(said)

        server = threading.Thread(target=say_a_part)
        server.start()
        host, port = listening.getsockname()
        with pytest.raises((ConnectionError, urllib.error.URLError)):
            http_get(f"http://{host}:{port}/")
        server.join()
