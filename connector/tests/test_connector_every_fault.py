"""Whole engines: every state of a decode request x every fault, all cells.

After each cell the blocks of both engines are free within a lease time, no read, list or board cell
is left, and the next request is loaded and right.
"""

import itertools

import pytest
from connector_engines import LEASE_SECONDS, World
from test_connector_two_engines import all_free, loaded, prefilled

PORT = 7000
HERE = ("10.0.0.1", PORT)

STATES = ("arrived", "arrived, peer unknown", "waiting for the peer", "reading", "loaded")
FAULTS = (
    "nothing",
    "abort",
    "prefill dies",
    "prefill is replaced",
    "the lease ends",
    "a minute passes",
    "the read breaks",
    "a message is lost",
)
RIGHT, ABORTED = "", "aborted"
UNREACHABLE, REFUSED = "peer_unreachable", "peer_refused"
LATE, BROKEN, OVERDUE = "lease_ended", "read_failed", "deadline"
POST = "post_failed"
# How the load ends: RIGHT, ABORTED, or the reason that is counted.
CELLS = {
    "arrived": (RIGHT, ABORTED, POST, POST, LATE, RIGHT, BROKEN, RIGHT),
    "arrived, peer unknown": (
        RIGHT, ABORTED, UNREACHABLE, REFUSED, LATE, LATE, BROKEN, RIGHT,
    ),
    "waiting for the peer": (
        RIGHT, ABORTED, UNREACHABLE, REFUSED, UNREACHABLE, UNREACHABLE, BROKEN, RIGHT,
    ),
    "reading": (RIGHT, ABORTED, BROKEN, BROKEN, LATE, OVERDUE, BROKEN, RIGHT),
    "loaded": (RIGHT,) * 8,
}  # fmt: skip


class Scene:
    def __init__(self):
        self.world = World()
        self.p = self.world.engine("p", "producer", port=PORT)
        self.d = self.world.engine("d", "consumer")
        self.tokens, self.answer, self.made = prefilled(self.p, 40)
        self.dead = False

    def until(self, condition):
        engines = [engine for engine in self.world.engines if not (self.dead and engine is self.p)]
        self.world.until(condition, *engines)

    def status(self):
        return self.d.requests["d1"].status if "d1" in self.d.requests else "gone"

    def reach(self, state):
        self.channel = self.world.responders[HERE]
        if "peer" in state:
            del self.world.responders[HERE]
        self.d.add("d1", self.tokens, self.answer)
        if state == "arrived":
            self.until(lambda: self.d.ranks[0].peers()["ready"])
        elif state == "reading":
            self.until(lambda: self.d.ranks[0].peers()["ready"])
            self.world.network.hang_reads("p/0")
            self.d.schedule("d1")
            self.until(lambda: self.d.ranks[0].reading)
        elif state == "loaded":
            loaded(self.world, self.d, "d1")
        elif state == "waiting for the peer":
            self.d.schedule("d1")
            self.d.step()
        else:
            self.d.step()

    def play(self, fault):
        world = self.world
        if fault == "abort" and self.status() != "running":
            self.d.end("d1")
        elif fault in ("prefill dies", "prefill is replaced"):
            world.network.kill("p/0")
            world.responders.pop(HERE, None)
            self.dead = True
            if fault == "prefill is replaced":
                world.engine("p-again", "producer", port=PORT)
        elif fault == "the lease ends":
            # What D has sent by now has arrived; then P hears nothing for a lease time.
            self.p.step()
            world.now += LEASE_SECONDS + 1
            self.p.step()
        elif fault == "a minute passes":
            for _ in range(9):
                world.now += LEASE_SECONDS / 4
                self.d.step()
                self.p.step()
        elif fault == "the read breaks":
            world.network.fail_reads(1)
            if self.status() == "loading" and self.d.ranks[0].reading:
                world.network.kill("p/0")
                world.responders.pop(HERE, None)
                self.dead = True
        elif fault == "a message is lost":
            world.network.lose_notifications(1)

    def end(self):
        """Let everything go on; how the load of ``d1`` ended."""
        if not self.dead:
            self.world.responders.setdefault(HERE, self.channel)
        if self.status() == "waiting":
            self.d.schedule("d1")
        self.world.network.resume("p/0")
        self.world.now += 0.1
        for _ in range(3):
            if self.status() != "loading":
                break
            self.d.step()
            self.world.now += 3.0
        if self.status() == "loading" and self.dead and HERE not in self.world.responders:
            self.world.now += 21.0
        self.until(lambda: self.status() in ("running", "gone", "finished"))
        if self.status() == "running":
            assert self.d.pages_equal("d1", self.made, 39)
            self.d.end("d1")
            return RIGHT
        return self.d.reasons.get("d1", ABORTED)

    def require_clean(self):
        self.until(lambda: all_free(self.d))
        self.world.now += LEASE_SECONDS + 1
        if not self.dead:
            self.until(lambda: all_free(self.p))
        rank = self.d.ranks[0]
        assert not rank.reading

    def require_next_is_right(self):
        self.world.network.fail_reads(0)
        self.world.network.lose_notifications(0)
        source = self.p
        if self.dead:
            again = [engine for engine in self.world.engines if engine.name == "p-again"]
            source = again[0] if again else self.world.engine("p-next", "producer", port=PORT)
        self.world.now += 40.0  # longer than any pause after a failed handshake
        tokens, answer, made = prefilled(source, 40, "p2", seed=9)
        self.d.add("d2", tokens, answer)
        self.d.schedule("d2")
        self.until(lambda: self.d.requests["d2"].status == "running")
        assert self.d.pages_equal("d2", made, 39)


@pytest.mark.parametrize(("state", "fault"), list(itertools.product(STATES, FAULTS)))
def test_every_fault_in_every_state(state, fault):
    scene = Scene()
    try:
        scene.reach(state)
        scene.play(fault)
        assert scene.end() == CELLS[state][FAULTS.index(fault)]
        scene.require_clean()
        scene.require_next_is_right()
    finally:
        scene.world.close()


def test_no_cell_of_a_fault_is_left_out():
    assert set(CELLS) == set(STATES)
    assert {len(cells) for cells in CELLS.values()} == {len(FAULTS)}
