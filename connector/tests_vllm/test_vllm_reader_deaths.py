"""A process that answers readers over TCP outlives them; and what ends it without our mends."""

import signal
import types

import pytest

from hybridpd_connector.agent_api import ReadState
from hybridpd_testkit.reader_deaths import (
    PIECE_BYTES,
    PIECES,
    Mends,
    Reader,
    die_during_a_read,
    die_with_unread_requests,
    die_with_waiting_answers,
    producer,
)

DEATHS = [die_with_unread_requests, die_with_waiting_answers, die_during_a_read]
NOTICES_SECONDS = 0.5
TRIES = 8


def require_a_right_read(made):
    reader = Reader(made)
    reader.post()
    state, arrived = reader.finish()
    assert state is ReadState.DONE
    # Every second piece, and the one that woke the link up.
    assert arrived == (PIECES // 2 + 1) * PIECE_BYTES


@pytest.mark.parametrize("die", DEATHS)
def test_the_producer_outlives_its_readers_and_answers_the_next(die):
    with producer() as made:
        for _ in range(2):
            die(made)
            assert made.settle(NOTICES_SECONDS) is None
        require_a_right_read(made)
        assert made.close() == 0


def ended_by(mends, die):
    """Exit code of a producer with these mends only, after at most ``TRIES`` deaths."""
    with producer(mends) as made:
        for _ in range(TRIES):
            die(made)
            if made.settle(NOTICES_SECONDS) is not None:
                break
        return made.exit_code


def test_resets_end_a_producer_that_hears_them():
    assert ended_by(Mends(resets=False), die_with_unread_requests) == -signal.SIGABRT


def test_waiting_answers_end_a_producer_that_gives_back_what_they_never_had():
    ended = ended_by(Mends(resets=False, deregistration=False), die_with_waiting_answers)
    assert ended == -signal.SIGSEGV


def test_nothing_of_dead_readers_stays():
    with producer(Mends(silence_seconds=2)) as made:
        require_a_right_read(made)
        before = made.files(), made.resident_bytes()
        for _ in range(3):
            for die in DEATHS:
                die(made)
        assert made.settle(15) is None
        require_a_right_read(made)
        assert made.files() <= before[0] + 2
        # UCX keeps 320 bytes for each answer that waited: up to 3 x 3 x 1,024 here.
        assert made.resident_bytes() - before[1] < 24 << 20
        assert made.close() == 0


class MadeError(Exception):
    """Far enough."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch, while it is imported
@pytest.mark.parametrize(
    ("extra", "outlives"),
    [
        ({}, 180),
        ({"outlive_readers": True, "lease_seconds": 90}, 240),
        ({"lease_seconds": 3600}, 7260),
        ({"outlive_readers": False, "lease_seconds": 90}, 0),
    ],
)
def test_ucx_bears_silence_longer_than_reads_may_take_or_is_left_alone(
    monkeypatch, extra, outlives
):
    from hybridpd_connector import vllm_engine

    told = {}

    def make(*arguments, **settings):
        told.update(settings)
        raise MadeError

    monkeypatch.setattr(vllm_engine, "NixlAgent", make)
    for name in ("get_tensor_model_parallel_rank", "get_conv_state_layout", "read_cache"):
        monkeypatch.setattr(vllm_engine, name, lambda *arguments: 0)
    transfer = types.SimpleNamespace(get_from_extra_config=extra.get)
    config = types.SimpleNamespace(kv_transfer_config=transfer)
    settings = types.SimpleNamespace(engine_id="p", role="producer", version="0.32.0")
    with pytest.raises(MadeError):
        vllm_engine.build_worker(config, None, {}, settings)
    assert told == {"progress_thread": True, "outlives": outlives}
