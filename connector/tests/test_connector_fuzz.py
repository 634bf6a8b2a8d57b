"""Readers of what strangers wrote: arbitrary bytes, hostile neighbours of good ones, the corpus.

The same functions are fuzzed with coverage by ``make fuzz``; what that found is in
connector/fuzz/corpus and is read here again.
"""

import pickle
import random
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridpd_connector.lease_board import LeaseBoard
from hybridpd_connector.leases import ProducerLeases
from hybridpd_connector.notifications import Release, Renew
from hybridpd_testkit.fuzz_targets import TARGETS, mutate

CORPUS = Path(__file__).resolve().parents[1] / "fuzz" / "corpus"
NAMES = sorted(TARGETS)
DEEP = 100_000

documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)


@pytest.mark.parametrize("name", NAMES)
def test_good_inputs_are_taken(name):
    target = TARGETS[name]
    assert target.seeds
    assert all(target.run(seed) for seed in target.seeds)


@pytest.mark.parametrize("name", NAMES)
@relaxed
@given(raw=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_with_our_errors(name, raw):
    target = TARGETS[name]
    header = target.seeds[0][: max(target.header_bytes, 0)]
    target.run(raw)
    target.run(header + raw)


@pytest.mark.parametrize("name", NAMES)
@relaxed
@given(document=documents)
def test_arbitrary_objects_are_refused_with_our_errors(name, document):
    target = TARGETS[name]
    header = target.seeds[0][: max(target.header_bytes, 0)]
    target.run(header + msgspec.msgpack.encode(document))


@pytest.mark.parametrize("name", NAMES)
def test_hostile_neighbours_of_good_inputs_are_refused_with_our_errors(name):
    target = TARGETS[name]
    taken = 0
    for seed in range(300):
        raw = random.Random(seed).choice(target.seeds)
        taken += target.run(mutate(raw, target.header_bytes, seed))
    if target.header_bytes >= 0:
        assert 0 < taken < 300, "all alike: the neighbours are too far, or no change at all"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_deep_is_refused_with_our_errors(name):
    target = TARGETS[name]
    header = target.seeds[0][: max(target.header_bytes, 0)]
    for opening in (b"\x91", b"\x81\xa1a", b"\x91\x81\xa0"):
        assert not target.run(header + opening * DEEP)
        assert not target.run(header + opening * DEEP + b"\xc0")


@pytest.mark.parametrize("name", NAMES)
def test_what_claims_to_be_huge_costs_nothing(name):
    """Lengths of four gigabytes, with nothing behind them."""
    target = TARGETS[name]
    header = target.seeds[0][: max(target.header_bytes, 0)]
    tracemalloc.start()
    for claim in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        assert not target.run(header + claim)
        assert not target.run(header + b"\x93" + claim)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20


@pytest.mark.parametrize("name", NAMES)
def test_the_corpus_is_read_again(name):
    files = sorted((CORPUS / name).glob("*"))
    assert files, f"make fuzz keeps what it finds in {CORPUS / name}"
    for path in files:
        TARGETS[name].run(path.read_bytes())


def test_the_corpus_has_no_folder_that_nothing_reads():
    assert sorted(path.name for path in CORPUS.iterdir()) == NAMES


@relaxed
@given(st.lists(st.integers(1, 2**53 - 1), max_size=30), st.integers(1, 8))
def test_a_lease_board_never_forgets_an_end_and_never_grows(ended, slots):
    board = LeaseBoard(slots)
    region = board.region()
    for sequence in ended:
        board.end(sequence)
    assert all(board.ended(sequence) for sequence in ended)
    assert board.region() == region


def test_leases_keep_a_bounded_memory_of_what_readers_say():
    """A reader that has the key, and makes up engines and requests without end."""
    leases = ProducerLeases(30.0, LeaseBoard(16))
    leases.pin("p", 1, 0.0)

    def size():
        return len(pickle.dumps(leases._early)) + len(pickle.dumps(leases._held["p"]))

    def lie(rounds):
        for number in rounds:
            leases.tick([Renew(f"engine-{number}", ("p", f"p-{number}"))], 1.0)
            leases.tick([Release("p", 1, f"engine-{number}", "d", 0, 2)], 1.0)
            for reader in range(3):
                leases.tick([Release(f"early-{number}", 1, f"e-{reader}", "d", 0, 2)], 1.0)

    lie(range(8000))
    full = size()
    lie(range(8000, 16000))
    assert size() < 1.1 * full
    assert full < 4 << 20
    # And an honest reader of another lease is heard.
    leases.pin("q", 2, 1.0)
    assert leases.tick([Release("q", 2, "d", "d", 0, 1)], 1.0).released == ("q",)
