"""What whoever may send ``kv_transfer_params`` to D could do to the requests of others.

Left out: damaged parameters (``test_connector_two_engines``), and decoders (the fuzz tests).
"""

import itertools
import threading
import time

import pytest
from connector_engines import World
from test_connector_two_engines import all_free, loaded, prefilled, prompt

from hybridpd_connector.notifications import MAX_SEQUENCE
from hybridpd_connector.peer_state import PeerState
from hybridpd_connector.peers import Address, PeerBook, PeerLimits, PeerManager
from hybridpd_connector.seals import sealed
from hybridpd_connector.transfer_params import MAX_LEASE_SECONDS, MAX_TOKENS, parse_decode
from hybridpd_connector.transfer_params import answer as make_answer
from hybridpd_connector.wants import MAX_OWED_ENGINES, OWED_SECONDS

BAD_SEAL = "0" * 64


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def wants_of(d):
    return d.ranks[0]._consumer._wants


def made_up(answer, number, **changes):
    """Parameters that fit the prompt of ``answer``, for an engine that does not exist."""
    name, host = f"made-up-{number}", f"10.9.{number}"
    return make_answer(parse_decode(answer)._replace(engine_id=name, host=host, **changes))


@pytest.mark.parametrize("shaken", [True, False], ids=["ready", "not-met"])
def test_a_forged_offer_does_not_release_the_prefill_of_another(world, shaken):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, made = prefilled(p, 40)
    if shaken:
        other, more, _ = prefilled(p, 20, "p2", seed=3)
        d.add("first", other, more)
        loaded(world, d, "first")
        d.end("first")
    forged = make_answer(parse_decode(answer)._replace(tokens=9, seal=BAD_SEAL))
    d.add("thief", prompt(12), forged)
    if not shaken:
        d.end("thief")
    else:
        d.schedule("thief")
        world.until(lambda: "thief" not in d.requests)
    for _ in range(20):
        d.step()
        p.step()
    assert "p1" in p.requests, "somebody else's blocks were freed"
    d.add("owner", tokens, answer)
    loaded(world, d, "owner")
    assert d.pages_equal("owner", made, 39)
    d.end("owner")
    world.until(lambda: all_free(p) and all_free(d))


def test_a_sequence_that_was_guessed_does_not_use_up_the_offer(world):
    """Same prefill, right sequence, other blocks: no part of it may stick to the right offer."""
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, made = prefilled(p, 40)
    offer = parse_decode(answer)
    forged = offer._replace(block_ids=((1,),) * len(offer.block_ids), seal=BAD_SEAL)
    d.add("thief", tokens, make_answer(forged))
    loaded(world, d, "thief")
    assert d.reasons == {"thief": "changed_params"}
    d.add("owner", tokens, answer)
    loaded(world, d, "owner")
    assert d.pages_equal("owner", made, 39)


@pytest.mark.parametrize("thieves", [1, 12])
def test_an_engine_that_does_not_live_where_an_offer_says_is_loaded_from_where_it_does(
    world, thieves
):
    """Each address has another engine, which refuses: that is final for those who named it."""
    p = world.engine("p", "producer")
    elsewhere = [world.engine(f"other{number}", "producer") for number in range(thieves)]
    d = world.engine("d", "consumer", blocks=100)
    tokens, answer, made = prefilled(p, 40)
    for number, other in enumerate(elsewhere):
        forged = parse_decode(answer)._replace(port=other.identity.port, sequence=7 + number)
        d.add(f"thief{number}", tokens, make_answer(forged))
    d.add("owner", tokens, answer)
    for request_id in [*d.requests]:
        d.schedule(request_id)
    world.until(lambda: [*d.requests] == ["owner"] and d.requests["owner"].status == "running", d)
    assert set(d.reasons.values()) <= {"peer_refused", "changed_params"}
    assert d.pages_equal("owner", made, 39)
    d.end("owner")
    world.until(lambda: all_free(p) and all_free(d, 100))
    assert wants_of(d)._unsent == {}


def test_engines_that_do_not_exist_leave_nothing_behind(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    for number in range(20):
        d.add(f"d{number}", tokens, made_up(answer, number))
    for _ in range(3):
        d.step()
    for number in range(20):
        d.end(f"d{number}")
    d.step()
    world.now += parse_decode(answer).lease_seconds + 1
    d.step()
    wants = wants_of(d)
    assert repr(wants) == "Wants(requests=0, leases=0, owed=0, lingering=0)"
    assert wants._unsent == {}


def test_releases_for_engines_that_do_not_exist_are_few_and_short_lived(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    count = MAX_OWED_ENGINES + 40
    for number in range(count):
        changed = made_up(
            answer, number, lease_seconds=MAX_LEASE_SECONDS, sequence=MAX_SEQUENCE - number
        )
        d.add(f"d{number}", tokens, changed)
        d.step()
        d.end(f"d{number}")
        d.step()
    assert len(wants_of(d)._owed) == MAX_OWED_ENGINES
    world.now += OWED_SECONDS
    d.step()
    assert wants_of(d)._owed == {}


def test_many_made_up_engines_do_not_push_a_good_one_out():
    book = PeerBook(PeerLimits(max_peers=8))
    good = book.want("good", Address("10.0.0.1", 5600), 0.0)
    book.succeeded("good", good.attempt, "link")
    for number, now in enumerate(itertools.islice(itertools.count(1.0), 40)):
        verdict = book.want(f"made-up-{number}", Address(f"10.9.0.{number}", 1), now)
        if number % 2:
            book.failed(f"made-up-{number}", verdict.attempt, "no route", now)
    assert book.ready() == {"good": "link"}
    assert sum(book.counts().values()) - book.evicted == 8


def test_handshakes_that_wait_for_a_thread_are_bounded():
    """Made-up engines push each other out of the book; their handshakes are queued all the same."""
    limits = PeerLimits(max_peers=4, max_handshakes=6)
    begun, silent = set(), threading.Event()

    def shake_hands(engine_id, address):
        begun.add(engine_id)
        silent.wait(10)

    manager = PeerManager(shake_hands, lambda _: True, limits, workers=1)
    for turn in range(10):
        for number in range(10):
            verdict = manager.want(f"e{number}", Address(f"10.9.0.{number}", 1), float(turn))
    assert f"handshakes_running={limits.max_handshakes}, " in repr(manager)
    silent.set()
    time.sleep(0.1)
    manager.close()
    assert 1 <= len(begun) <= limits.max_handshakes
    assert verdict.state is PeerState.BACKING_OFF
    assert "handshakes" in verdict.reason


@pytest.mark.parametrize("tokens", [39, MAX_TOKENS], ids=["right", "huge"])
def test_no_more_block_ids_are_looked_at_than_a_prompt_can_have(world, tokens):
    """A million ids take the engine's thread half a second, in every step that shows them."""
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    prompt_ids, answer, _ = prefilled(p, 40)
    looked_at = []

    class Ids(list):
        def __iter__(self):
            looked_at.append(len(self))
            return super().__iter__()

    answer["remote_block_ids"] = [Ids([1] * (1 << 20)) for _ in answer["remote_block_ids"]]
    answer["hybridpd"]["tokens"] = tokens
    d.add("d1", prompt_ids, answer)
    loaded(world, d, "d1")
    assert d.reasons == {"d1": "bad_params"}
    assert looked_at == []


def test_what_was_made_for_another_prompt_is_told_apart_from_damage(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    _, answer, _ = prefilled(p, 100)
    d.add("d1", prompt(3), answer)
    loaded(world, d, "d1")
    assert d.reasons == {"d1": "other_prompt"}


def test_sealed_offers_are_still_released(world):
    """The other way round: what was offered is released also when its load is refused here."""
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    _, answer, _ = prefilled(p, 40)
    offer = parse_decode(answer)
    assert sealed(b"", offer) == offer
    d.add("d1", prompt(40, seed=5), answer)
    loaded(world, d, "d1")
    world.until(lambda: all_free(p))


@pytest.mark.parametrize("first", ["thief", "owner"])
@pytest.mark.parametrize("change", [{"host": "10.9.9.9"}, {"engine_id": "made-up"}], ids=str)
def test_a_wrong_address_or_name_disturbs_nobody_else(world, first, change):
    """A right name at a wrong address, or a wrong name at a right address, all the time."""
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, made = prefilled(p, 40)
    thief = make_answer(parse_decode(answer)._replace(seal=BAD_SEAL, **change))
    for request_id in (first, "owner" if first == "thief" else "thief"):
        d.add(request_id, tokens, thief if request_id == "thief" else answer)
        d.schedule(request_id)
    for number in range(200):
        d.step()
        if d.requests["owner"].status == "running":
            break
        if "thief" not in d.requests:
            d.add("thief", prompt(40, seed=number), thief)
            d.schedule("thief")
        time.sleep(0.001)
    assert d.requests["owner"].status == "running"
    assert d.pages_equal("owner", made, 39)
    assert set(wants_of(d)._peers.ready()) == {"p"}
