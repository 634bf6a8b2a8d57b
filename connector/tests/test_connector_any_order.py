"""Prefills, loads, aborts, faults and time in any order: what a request gets is right, what ends is
free again, and nothing that vLLM would trip over is ever reported."""

import random
import time

import pytest
from connector_engines import LEASE_SECONDS, TO_PREFILL, World
from geometry_reference import make_state
from test_connector_two_engines import all_free, prompt

SEEDS = 24
MOVES = 120
BLOCKS = 60
ROOM = 20
PAUSES_SECONDS = (0.5, 3.0, 10.0, LEASE_SECONDS + 1.0, 61.0)  # the last: longer than a read


class Play:
    """Some engines, and one random move after another."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.world = World()
        prefill_tp, decode_tp = self.random.choice([(1, 1), (1, 2), (2, 1), (2, 2)])
        self.prefillers = [
            self.world.engine(name, "both", tp_size=prefill_tp, blocks=BLOCKS)
            for name in ("p0", "p1")
        ]
        self.decoders = [
            self.world.engine(name, "consumer", tp_size=decode_tp, blocks=BLOCKS, policy=policy)
            for name, policy in (("d0", "fail"), ("d1", "recompute"))
        ]
        self.answers = []
        self.expected = {}  # (engine, request id) → (prompt, state); no state: must not be loaded
        self.number = 0
        self.checked = 0

    def move(self):
        moves = (self.prefill, self.abort, self.pause, self.break_something, self.step)
        self.random.choice((*moves, *(self.arrive,) * 2, *(self.schedule,) * 3))()
        self.check_loaded()
        if self.random.random() < 0.7:
            self.step()

    def prefill(self):
        engine = self.random.choice(self.prefillers)
        if len(engine.free) < ROOM:
            return
        self.number += 1
        tokens = prompt(self.random.choice([1, 2, 20, 33, 50]), self.number)
        made = make_state(engine.layout, max(1, len(tokens) - 1), seed=self.number)
        request_id = self.random.choice([f"p{self.number}", f"{self.number % 2}_p{self.number}"])
        engine.add(request_id, tokens, dict(TO_PREFILL))
        self.answers.append((tokens, engine.prefill(request_id, made), made))

    def arrive(self):
        engine = self.random.choice(self.decoders)
        self.number += 1
        request_id = self.random.choice([f"{self.number % 3}_d{self.number // 3}", "same"])
        if not self.answers or request_id in engine.requests:
            return
        tokens, answer, made = self.random.choice(self.answers[-4:])
        if self.random.random() < 0.15:
            tokens, made = [tokens[0] + 1, *tokens[1:]], None
        engine.add(request_id, tokens, answer)
        self.expected[engine.name, request_id] = (tokens, made)

    def schedule(self):
        engine = self.random.choice(self.decoders)
        waiting = [name for name, item in engine.requests.items() if item.status == "waiting"]
        if waiting and len(engine.free) >= ROOM:
            engine.schedule(self.random.choice(waiting))

    def abort(self):
        engine = self.random.choice(self.decoders)
        open_ids = [name for name, item in engine.requests.items() if item.status != "finished"]
        if open_ids:
            engine.end(self.random.choice(open_ids))

    def pause(self):
        self.world.now += self.random.choice(PAUSES_SECONDS)
        for engine in self.decoders:
            for rank in engine.ranks:
                rank.renew()

    def break_something(self):
        network = self.world.network
        peer = f"{self.random.choice(self.prefillers).name}/0"
        self.random.choice([
            lambda: network.fail_reads(1),
            lambda: network.refuse_posts(1),
            lambda: network.lose_notifications(1),
            lambda: network.delay_reads(self.random.choice([1, 3])),
            lambda: network.hang_reads(peer),
            lambda: network.resume(peer),
        ])()  # fmt: skip

    def step(self):
        for engine in self.world.engines:
            engine.step()

    def check_loaded(self):
        """Every request that runs on a loaded state holds exactly what one engine would hold."""
        for engine in self.decoders:
            for request_id, request in engine.requests.items():
                found = self.expected.get((engine.name, request_id))
                if request.status != "running" or request.computed == 0 or found is None:
                    continue
                tokens, made = self.expected.pop((engine.name, request_id))
                assert made is not None, f"{request_id} was loaded with another prompt's state"
                assert engine.pages_equal(request_id, made, len(tokens) - 1)
                self.checked += 1

    def finish(self):
        """The end of all faults and requests: every block comes free."""
        network = self.world.network
        for mend in (network.fail_reads, network.refuse_posts, network.lose_notifications):
            mend(0)
        for engine in self.prefillers:
            network.resume(f"{engine.name}/0")
        for engine in self.decoders:
            for request_id, request in list(engine.requests.items()):
                if request.status != "finished":
                    engine.end(request_id)
        for _ in range(400):
            self.step()
            if all(all_free(engine, BLOCKS) for engine in self.world.engines):
                return
            self.world.now += 0.5
            time.sleep(0.0003)  # handshakes run on threads
        raise AssertionError([(item.name, list(item.requests)) for item in self.world.engines])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_order(seed):
    play = Play(seed)
    try:
        for _ in range(MOVES):
            play.move()
        play.finish()
    finally:
        play.world.close()
