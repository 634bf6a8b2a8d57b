"""Whatever engines, names and links have done: in the end those are met that live, and no others.

Engines begin, die, move and are replaced, names lead to others or to nobody, links break, requests
come for whom they like, in a random order by a seed; then all is quiet. The town is that of
``test_connector_meetings``.
"""

import collections
import random

import pytest
from test_connector_meetings import LIMITS, Town

from hybridpd_connector.errors import RefusedError
from hybridpd_connector.named_peers import parse_names
from hybridpd_connector.peers import Address

HOSTS = [f"10.0.0.{i}" for i in range(5)]
ADDRESSES = [Address(host, port) for host in HOSTS for port in (5600, 5601)]
NAMES = ("p:5600-5601", "q:5600")
QUIET_SECONDS = LIMITS.idle_seconds + 120
EVENTS = 60


class Play(Town):
    """The town with its events; counts what is made and given back of each engine."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.at_work = collections.Counter()
        self.made = collections.Counter()
        self.begun = 0
        super().__init__(*NAMES)
        self.names = {"p": [], "q": []}
        self.lives = {}

    def _shake_hands(self, engine_id, address):
        self.at_work[engine_id] += 1
        assert self.at_work[engine_id] == 1, "one handshake of an engine at a time"
        try:
            link = super()._shake_hands(engine_id, address)
            self.made[link] += 1
            return link
        finally:
            self.at_work[engine_id] -= 1

    def begins(self):
        self.begun += 1
        engine_id = f"e{self.begun}"
        if self.random.random() < 1 / 5:
            self.fits[engine_id] = RefusedError("tp_size", "1", 3)
        self.lives[self.random.choice(ADDRESSES)] = engine_id

    def dies(self):
        if self.lives:
            del self.lives[self.random.choice(list(self.lives))]

    def moves(self):
        """To another address, as one process has two when its pod has two."""
        if self.lives:
            engine_id = self.random.choice(list(self.lives.values()))
            self.lives[self.random.choice(ADDRESSES)] = engine_id

    def is_named(self):
        some = self.random.sample(HOSTS, self.random.randrange(len(HOSTS) + 1))
        self.names[self.random.choice("pq")] = some

    def is_not_looked_up(self):
        self.names[self.random.choice("pq")] = OSError("no name server")

    def link_breaks(self):
        if ready := list(self.ready()):
            self.book.lost(self.random.choice(ready), "a read failed")

    def is_wanted(self):
        """By a request, at its address or a wrong one."""
        engine_id = f"e{self.random.randint(1, self.begun + 1)}"
        self.book.count_request(engine_id)
        self.book.want(engine_id, self.random.choice(ADDRESSES), self.now)

    def time_passes(self):
        self.wait(self.random.choice((0.5, 2.0, 7.0, 40.0)), step=2.0)

    def named(self):
        """All addresses that names lead to."""
        ports = {"p": (5600, 5601), "q": (5600,)}
        found = [(host, ports[name]) for name, hosts in self.names.items() for host in hosts]
        return {Address(host, port) for host, some in found for port in some}


@pytest.mark.parametrize("seed", range(8))
def test_those_that_live_are_met_in_the_end_and_no_others(seed):
    town = Play(seed)
    events = [
        town.begins, town.begins, town.dies, town.moves, town.is_named, town.is_not_looked_up,
        town.link_breaks, town.is_wanted, town.time_passes, town.time_passes,
    ]  # fmt: skip
    try:
        for _ in range(EVENTS):
            town.random.choice(events)()
            town.settle()
        town.names = {n: [] if isinstance(f, OSError) else f for n, f in town.names.items()}
        town.wait(60.0, step=2.0)
        town.dies()  # where its name still leads
        town.wait(QUIET_SECONDS, step=2.0)
        living = {town.lives[address] for address in town.named() if address in town.lives}
        assert set(town.ready()) == living - set(town.fits)
        held = collections.Counter(town.ready().values())
        assert held + collections.Counter(town.given_back) == town.made
    finally:
        town.meetings.close()
        town.book.close()


def test_the_play_knows_all_names():
    ports = {(name.host, port) for name in parse_names(list(NAMES)) for port in name.ports}
    assert ports == {("p", 5600), ("p", 5601), ("q", 5600)}
