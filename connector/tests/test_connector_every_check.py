"""Every state x every event of a load whose bytes are here and whose checksums are compared.

``begun``: neither side's sums are here; ``ours``, ``theirs``: one side's are; ``reading``: ours
are, and the read of prefill's slot is stuck; ``ended``: the verdict is given.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
from connector_engines import World
from test_connector_two_engines import all_free, prefilled

from hybridpd_connector.sum_board import MARK, seal_of
from hybridpd_connector.verifier import CHECK_SECONDS, PROOF_SECONDS

STATES = ("begun", "ours", "theirs", "reading", "ended")
EVENTS = (
    "our sums",
    "their sums",
    "other sums",
    "sums of a later prefill",
    "prefill dies",
    "the check takes too long",
    "abort",
)
# (result at once, result once both sides' sums have come); "" while there is none.
CELLS = {
    ("begun", "our sums"): ("", "ok"),
    ("begun", "their sums"): ("", "ok"),
    ("begun", "other sums"): ("", "different"),
    ("begun", "sums of a later prefill"): ("unchecked", "unchecked"),
    ("begun", "prefill dies"): ("unchecked", "unchecked"),
    ("begun", "the check takes too long"): ("unchecked", "unchecked"),
    ("begun", "abort"): ("", "ok"),
    ("ours", "our sums"): ("", "ok"),
    ("ours", "their sums"): ("ok", "ok"),
    ("ours", "other sums"): ("different", "different"),
    ("ours", "sums of a later prefill"): ("unchecked", "unchecked"),
    ("ours", "prefill dies"): ("unchecked", "unchecked"),
    ("ours", "the check takes too long"): ("unchecked", "unchecked"),
    ("ours", "abort"): ("", "ok"),
    # What has been read of the slot stays: it was sealed, and later writes are other prefills'.
    ("theirs", "our sums"): ("ok", "ok"),
    ("theirs", "their sums"): ("", "ok"),
    ("theirs", "other sums"): ("", "ok"),
    ("theirs", "sums of a later prefill"): ("", "ok"),
    ("theirs", "prefill dies"): ("", "ok"),
    ("theirs", "the check takes too long"): ("unchecked", "unchecked"),
    ("theirs", "abort"): ("", "ok"),
    ("reading", "our sums"): ("", "ok"),
    ("reading", "their sums"): ("", "ok"),
    ("reading", "other sums"): ("", "different"),
    ("reading", "sums of a later prefill"): ("", "unchecked"),
    ("reading", "prefill dies"): ("unchecked", "unchecked"),
    ("reading", "the check takes too long"): ("unchecked", "unchecked"),
    ("reading", "abort"): ("", "ok"),
    **{("ended", event): ("ok", "ok") for event in EVENTS},
}


class OneCheck:
    """One load of one pair, up to the state; then one event."""

    def __init__(self, world, state, required):
        self.world = world
        self.p = world.engine("p", "producer", checksum_every=1)
        self.d = world.engine("d", "consumer", checksum_every=1, checksum_required=required)
        self.patience_seconds = PROOF_SECONDS if required else CHECK_SECONDS
        (self.theirs,), (self.ours,) = self.p.summers, self.d.summers
        self.results, self.counts = Counter(), Counter()
        self.theirs.held = state not in ("theirs", "ended")
        self.ours.held = state in ("begun", "theirs")
        tokens, answer, _ = prefilled(self.p, 40)
        self.p.step()
        self.d.add("d1", tokens, answer)
        self.d.schedule("d1")
        world.until(lambda: self.look()["read_bytes"] > 0)
        if state == "reading":
            world.network.hang_reads("p/0")
        self.steps()

    def look(self):
        data = self.d.ranks[0].take_stats() or {}
        self.results.update(data.get("checksums", {}))
        self.counts.update(data.get("counts", {}))
        return self.counts

    def steps(self):
        for _ in range(6):
            self.d.step()
            self.p.step()
        self.look()

    def change_slot(self, sequence=0, first_sum=0):
        """Prefill's sums arrive, other than they were made, and sealed as prefill would."""
        self.theirs.let_go()
        for board in self.theirs._boards:
            for at in np.flatnonzero(board == MARK):
                length = int(board[at + 2])
                board[at + 1] += np.uint64(sequence)
                board[at + 4] ^= np.uint64(first_sum)
                row = [int(word) for word in board[at + 4 : at + 4 + length]]
                board[at + 3] = seal_of(int(board[at + 1]), row)

    def play(self, event):
        match event:
            case "our sums":
                self.ours.held = False
            case "their sums":
                self.theirs.let_go()
            case "other sums":
                self.change_slot(first_sum=1)
            case "sums of a later prefill":
                self.change_slot(sequence=1)
            case "prefill dies":
                self.world.network.kill("p/0")
            case "the check takes too long":
                self.world.now += self.patience_seconds
            case "abort":
                self.d.end("d1")
        self.steps()

    def bring_the_rest(self):
        self.ours.held = False
        self.theirs.let_go()
        self.world.network.resume("p/0")
        self.steps()

    @property
    def result(self):
        (result,) = self.results or ("",)
        assert sum(self.results.values()) <= 1
        return result


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS)
def test_check_cell(world, state, event, required):
    """``required``: what cannot be compared is not used."""
    check = OneCheck(world, state, required)
    d, request = check.d, check.d.requests["d1"]
    assert (check.result, request.status) == (
        ("ok", "running") if state == "ended" else ("", "loading")
    )
    at_once, at_last = CELLS[state, event]
    check.play(event)
    assert check.result == at_once
    aborted = event == "abort"
    if not at_once:
        assert request.status == ("finished" if aborted else "loading")
        assert not all_free(d), "sums are being made of these blocks"
        assert d.ranks[0].reading
    check.bring_the_rest()
    assert check.result == at_last
    failed = {"different": "checksum_mismatch"}
    if required:
        failed["unchecked"] = "checksum_missing"
    failed = failed.get(at_last)
    if not aborted:
        assert request.status == ("finished" if failed else "running")
        assert d.reasons == ({"d1": failed} if failed else {})
        if not failed:
            d.end("d1")
            check.steps()
    assert all_free(d)
    assert not d.ranks[0].reading
    assert world.network.agents["d/0"].open_reads == 0


def test_no_cell_of_a_check_is_left_out():
    assert set(CELLS) == set(itertools.product(STATES, EVENTS))
