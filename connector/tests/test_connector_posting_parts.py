"""The test kit's look at the parts of a post: each is found, and the code is left as it was."""

import threading

import pytest
from connector_engines import World
from test_connector_two_engines import loaded, prefilled

from hybridpd_testkit.posting_parts import ALL, LOCK, PLACES, REST, Place, PostingParts, parts_table

NIXL = {place.part for place in PLACES if "_nixl" in place.owner or place.name == LOCK}


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def test_every_part_but_the_librarys_is_found_on_a_rank_and_seen_in_a_post(world):
    p, d = world.engine("p", "producer"), world.engine("d", "consumer")
    rank = d.ranks[0]
    parts = PostingParts(rank)
    # The in-memory agent has no library behind it and no lock of its own.
    assert set(parts.missing) <= NIXL
    calls = []
    post = rank.start_loads
    rank.start_loads = lambda: calls.append(parts.measure(post))
    tokens, answer, made = prefilled(p, 33)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    assert d.pages_equal("d1", made, 32)
    posted = [call for call in calls if "ranges made" in call]
    assert len(posted) == 1
    expected = {place.part for place in PLACES} - NIXL - {"orders taken"}
    assert expected <= set(posted[0])


class Kitchen:
    def __init__(self):
        self.lock = threading.RLock()
        self.dishes = []

    def cook(self):
        with self.lock:
            self.wash()
            self.serve()

    def wash(self):
        self.dishes.append("washed")

    def serve(self):
        self.wash()
        self.dishes.append("served")


PLACES_HERE = (
    Place("washing", "", "wash"),
    Place("serving", "", "serve"),
    Place("waiting", "lock", LOCK),
    Place("gone", "", "bake"),
)


def test_parts_add_up_and_nothing_stays_wrapped():
    kitchen = Kitchen()
    before = dict(vars(kitchen))
    parts = PostingParts(kitchen, PLACES_HERE)
    assert parts.missing == ["gone"]
    found = parts.measure(kitchen.cook)
    assert kitchen.dishes == ["washed", "washed", "served"]
    assert set(found) == {"washing", "serving", "waiting", REST, ALL}
    for column in (0, 1):
        total = sum(own[column] for part, own in found.items() if part != ALL)
        assert total == pytest.approx(found[ALL][column])
    assert vars(kitchen) == before
    assert "wash" not in vars(kitchen)


def test_an_error_goes_through_and_nothing_stays_wrapped():
    kitchen = Kitchen()
    kitchen.dishes = None
    with pytest.raises(AttributeError):
        PostingParts(kitchen, PLACES_HERE).measure(kitchen.cook)
    assert "wash" not in vars(kitchen)


def test_other_threads_are_not_measured():
    kitchen = Kitchen()

    def elsewhere():
        thread = threading.Thread(target=kitchen.wash)
        thread.start()
        thread.join()

    found = PostingParts(kitchen, PLACES_HERE).measure(elsewhere)
    assert kitchen.dishes == ["washed"]
    assert "washing" not in found


def test_a_call_without_a_part_counts_as_nothing_for_it():
    calls = [{"a": (0.001, 0.001), ALL: (0.002, 0.001)}, {ALL: (0.004, 0.003)}]
    lines = [line.split() for line in parts_table(calls)]
    assert [line[0] for line in lines] == ["part", "a", "all"]
    assert lines[1][1:] == ["0.500", "1.000", "0.500", "1"]
    assert lines[2][-4:] == ["3.000", "4.000", "2.000", "2"]
