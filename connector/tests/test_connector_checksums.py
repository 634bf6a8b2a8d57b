"""Checksums between two engines in one process: right loads pass, wrong bytes never do."""

import logging
import re
from collections import Counter

import pytest
from connector_engines import DENSE, HYBRID, ONE_GROUP, TO_PREFILL, World
from geometry_reference import make_state
from test_connector_two_engines import all_free, loaded, prefilled, prompt

from hybridpd_connector.seals import sealed
from hybridpd_connector.sum_board import SumReader
from hybridpd_connector.transfer_params import answer as make_answer
from hybridpd_connector.transfer_params import parse_decode


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def pair_of(world, p_every=1, d_every=1, policy="fail", **d_settings):
    p = world.engine("p", "producer", checksum_every=p_every)
    d = world.engine("d", "consumer", checksum_every=d_every, policy=policy, **d_settings)
    return p, d


def look(engine):
    """Note what the ranks have counted since the last look."""
    seen = engine.__dict__.setdefault("seen", {"checksums": Counter(), "counts": Counter()})
    for rank in engine.ranks:
        data = rank.take_stats() or {}
        for part, total in seen.items():
            total.update(data.get(part, {}))
    return seen


def results(engine):
    """Checksum results of all ranks so far."""
    return dict(look(engine)["checksums"])


def until_read(world, d):
    """Until the bytes of a load more are here; its sums may not be."""
    before = look(d)["counts"]["read_bytes"]
    world.until(lambda: look(d)["counts"]["read_bytes"] > before)


def load(world, p, d, number, length=40):
    tokens, answer, made = prefilled(p, length, f"p{number}", seed=number)
    d.add(f"d{number}", tokens, answer)
    loaded(world, d, f"d{number}")
    return made


TP_PAIRS = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (1, 4), (4, 1)]


@pytest.mark.parametrize(("p_tp", "d_tp"), TP_PAIRS)
@pytest.mark.parametrize("model", [HYBRID, ONE_GROUP, DENSE], ids=["groups", "group", "dense"])
@pytest.mark.parametrize("length", [2, 70])
def test_right_loads_are_compared_and_pass(world, model, p_tp, d_tp, length):
    if model is HYBRID and 4 in (p_tp, d_tp):
        model = ONE_GROUP  # two groups cannot be split over four ranks
    p = world.engine("p", "producer", model=model, tp_size=p_tp, checksum_every=1)
    d = world.engine("d", "consumer", model=model, tp_size=d_tp, checksum_every=1)
    made = load(world, p, d, 1, length)
    assert d.reasons == {}
    assert d.pages_equal("d1", made, length - 1)
    assert results(d) == {"ok": d_tp}
    d.end("d1")
    world.until(lambda: all_free(p) and all_free(d))


@pytest.mark.parametrize("packing", ["token", "cpu_vec"])
def test_right_loads_between_other_block_sizes_pass(world, packing):
    p = world.engine("p", "producer", packing=packing, block_size=32, checksum_every=1)
    d = world.engine("d", "consumer", packing=packing, block_size=96, checksum_every=1)
    load(world, p, d, 1, 90)
    assert results(d) == {"ok": 1}


def test_what_the_local_prefix_cache_had_is_not_compared(world):
    p, d = pair_of(world)
    block = d.layout.block_tokens
    tokens, answer, _ = prefilled(p, 2 * block + 10)
    d.add("d1", tokens, answer)
    d.schedule("d1", computed=block)
    world.until(lambda: d.requests["d1"].status == "running")
    assert results(d) == {"ok": 1}


def test_sixteen_loads_at_once_pass(world):
    p = world.engine("p", "producer", blocks=200, checksum_every=1)
    d = world.engine("d", "consumer", tp_size=2, blocks=200, checksum_every=1)
    for number in range(16):
        tokens, answer, _ = prefilled(p, 20 + 5 * number, f"p{number}", seed=number)
        d.add(f"d{number}", tokens, answer)
    for number in range(16):
        d.schedule(f"d{number}")
    world.until(lambda: all(item.status == "running" for item in d.requests.values()))
    assert results(d) == {"ok": 32}


def damage(p, layer_name, offset=0, request_id="p1", block=0, rank=0):
    """Change one byte of a pinned page, after it was summed."""
    p.step()
    layer = p.layout.by_name[layer_name]
    memory = p.memories[rank]
    at = memory.page_at(layer, p.requests[request_id].blocks[layer.group][block])
    memory.bytes[at + offset] ^= 1


def of_kind(layout, kind):
    return [layer for layer in layout.layers if layer.kind == kind]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("kind", ["state", "attention"])
@pytest.mark.parametrize("d_tp", [1, 2])
def test_a_byte_that_changed_is_a_failed_load(world, policy, kind, d_tp, caplog):
    p, d = pair_of(world, policy=policy, tp_size=d_tp)
    tokens, answer, _ = prefilled(p, 40)
    layer = of_kind(p.layout, kind)[1]
    damage(p, layer.name)
    d.add("d1", tokens, answer)
    with caplog.at_level(logging.WARNING):
        loaded(world, d, "d1")
    assert d.reasons == {"d1": "checksum_mismatch"}
    assert d.half.take_stats()["failures"] == {"checksum_mismatch": 1}
    assert results(d) == {"different": 1, **({"ok": 1} if d_tp == 2 else {})}
    (line,) = [record.getMessage() for record in caplog.records]
    section = "x" if kind == "state" else "kv"
    region = d.memories[0].placement.layer_region[layer.name]
    assert f"after 0.0 s, region {region} ({layer.name}), block " in line
    assert re.search(rf"block \d+, section {section} units 0-\d", line)
    assert (" tokens 0-15: " in line) == (kind == "attention")
    expected, got = re.search(r"expected ([0-9a-f]{16}), got ([0-9a-f]{16}); 1 sums", line).groups()
    assert expected != got
    if policy == "fail":
        assert all_free(d)
    else:
        assert d.requests["d1"].recomputed
        d.end("d1")
    world.until(lambda: all_free(p) and all_free(d))


def test_blocks_of_another_request_are_a_failed_load(world):
    """Prefill itself, by a mistake, names blocks that hold something else."""
    p, d = pair_of(world)
    tokens, answer, _ = prefilled(p, 40, "p1", seed=1)
    _, other, _ = prefilled(p, 40, "p2", seed=2)
    for group in range(len(p.layout.group_kinds)):
        blocks = list(answer["remote_block_ids"])
        blocks[group] = other["remote_block_ids"][group]
        offer = parse_decode({**answer, "remote_block_ids": blocks})
        d.add(f"d{group}", tokens, make_answer(sealed(b"", offer)))
        loaded(world, d, f"d{group}")
        assert d.reasons[f"d{group}"] in ("checksum_mismatch", "lease_ended")
        world.until(lambda: True)  # the release leaves in D's next step
    assert results(d) == {"different": 1}


def test_a_load_waits_for_the_sums_of_both_sides(world):
    p, d = pair_of(world)
    (theirs,), (ours,) = p.summers, d.summers
    theirs.held = ours.held = True
    tokens, answer, made = prefilled(p, 40)
    p.step()
    d.add("d1", tokens, answer)
    d.schedule("d1")
    until_read(world, d)
    for _ in range(5):
        world.until(lambda: True)
    assert d.requests["d1"].status == "loading"
    assert d.ranks[0].reading
    theirs.let_go(words=9)
    for _ in range(5):
        world.until(lambda: True)
    assert d.requests["d1"].status == "loading"
    ours.held = False
    for _ in range(5):
        world.until(lambda: True)
    assert d.requests["d1"].status == "loading", "half a slot is no proof of a wrong byte"
    theirs.let_go()
    world.until(lambda: d.requests["d1"].status == "running")
    assert d.pages_equal("d1", made, 39)
    assert results(d) == {"ok": 1}
    assert not d.ranks[0].reading


@pytest.mark.parametrize(("polls", "steps"), [(4, 0), (40, None)])
def test_a_check_that_ends_soon_ends_in_the_step_of_its_load(world, polls, steps):
    """Read, lease board and slot take so many looks each; a step may wait for 2 ms of 0.1 ms."""
    p, d = pair_of(world, step_wait_seconds=0.002)
    world.tick = 0.0001
    load(world, p, d, 1)
    world.network.delay_reads(polls)
    tokens, answer, _ = prefilled(p, 40, "p2", seed=2)
    p.step()
    d.add("d2", tokens, answer)
    d.schedule("d2")
    d.step()
    assert (d.requests["d2"].status == "running") == (steps == 0)
    world.until(lambda: d.requests["d2"].status == "running", d)
    assert results(d) == {"ok": 2}


def test_a_slot_that_is_not_written_is_read_once_a_step(world, monkeypatch):
    p, d = pair_of(world, step_wait_seconds=0.002)
    world.tick = 0.0001
    p.summers[0].held = True
    posts = []
    start = SumReader.start
    monkeypatch.setattr(SumReader, "start", lambda *given: posts.append(1) or start(*given))
    tokens, answer, _ = prefilled(p, 40)
    p.step()
    d.add("d1", tokens, answer)
    d.schedule("d1")
    until_read(world, d)
    for _ in range(5):
        posts.clear()
        d.step()
        assert len(posts) <= 1
    p.summers[0].let_go()
    world.until(lambda: d.requests["d1"].status == "running", d)


@pytest.mark.parametrize("late", ["p", "d"])
def test_sums_that_never_come_do_not_fail_a_load(world, late, caplog):
    p, d = pair_of(world)
    (p if late == "p" else d).summers[0].held = True
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            tokens, answer, made = prefilled(p, 40, f"p{number}", seed=number)
            p.step()
            d.add(f"d{number}", tokens, answer)
            d.schedule(f"d{number}")
            until_read(world, d)
            for _ in range(10):
                d.step()
            world.now += 2.5
            world.until(lambda n=number: d.requests[f"d{n}"].status == "running")
            assert d.pages_equal(f"d{number}", made, 39)
    assert results(d) == {"unchecked": 2}
    assert len([r for r in caplog.records if "no sums within 2 s" in r.getMessage()]) == 1


def test_a_slot_that_hangs_is_left_behind_and_taken_care_of(world):
    p, d = pair_of(world)
    d.summers[0].held = True
    p.summers[0].held = True
    tokens, answer, _ = prefilled(p, 40)
    p.step()
    d.add("d1", tokens, answer)
    d.schedule("d1")
    agent = world.network.agents["d/0"]
    until_read(world, d)
    world.network.hang_reads("p/0")
    for _ in range(5):
        d.step()
    world.now += 2.5
    world.until(lambda: d.requests["d1"].status == "running", d)
    assert results(d) == {"unchecked": 1}
    assert agent.open_reads == 1
    world.network.resume("p/0")
    for _ in range(5):
        d.step()
    assert agent.open_reads == 0


def test_an_engine_that_states_nothing_is_told_once(world, caplog):
    p, d = pair_of(world, p_every=0)
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            load(world, p, d, number)
    assert results(d) == {"unchecked": 2}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "checksum" in line
    assert "off" in line


def test_each_side_has_its_own_rate(world):
    p, d = pair_of(world, p_every=2, d_every=1)
    for number in (1, 2, 3, 4):
        load(world, p, d, number)
    assert results(d) == {"unchecked": 2, "ok": 2}


def test_a_sampling_reader_counts_only_its_sample(world):
    p, d = pair_of(world, p_every=1, d_every=3)
    for number in (1, 2, 3, 4):
        load(world, p, d, number)
    assert results(d) == {"ok": 1}


def test_a_reader_with_checksums_off_reads_none(world):
    p, d = pair_of(world, p_every=1, d_every=0)
    load(world, p, d, 1)
    assert results(d) == {}


@pytest.mark.parametrize("broken", ["p", "d"])
def test_a_device_that_cannot_sum_fails_nothing(world, broken):
    p, d = pair_of(world)
    (p if broken == "p" else d).summers[0].broken = True
    tokens, answer, made = prefilled(p, 40)
    p.step()
    d.add("d1", tokens, answer)
    d.schedule("d1")
    until_read(world, d)
    world.now += 2.5
    world.until(lambda: d.requests["d1"].status == "running")
    assert d.pages_equal("d1", made, 39)
    assert results(d) == {"unchecked": 1}


@pytest.mark.parametrize(
    ("word", "value", "cause"),
    [
        (0, 7, "sums in another way"),
        (1, 9, "sums of a later prefill"),
        (2, 1, "another number of sums"),
        (2, (1 << 64) - 1, "another number of sums"),
    ],
)
def test_a_slot_is_not_trusted(world, word, value, cause, caplog):
    p, d = pair_of(world)
    tokens, answer, _ = prefilled(p, 40)
    p.step()
    d.add("d1", tokens, answer)
    p.summers[0].overwrite(word, value)
    with caplog.at_level(logging.WARNING):
        loaded(world, d, "d1")
    assert results(d) == {"unchecked": 1}
    assert any(cause in record.getMessage() for record in caplog.records)


def test_a_slot_that_cannot_be_read_fails_nothing(world):
    p, d = pair_of(world)
    p.summers[0].held = True
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    d.schedule("d1")
    until_read(world, d)
    world.network.kill("p/0")
    world.until(lambda: d.requests["d1"].status == "running", d)
    assert results(d) == {"unchecked": 1}


def test_only_prefills_that_are_summed_carry_their_blocks(world):
    p = world.engine("p", "producer", checksum_every=2)
    for number in (1, 2):
        tokens = prompt(40, number)
        p.add(f"p{number}", tokens, dict(TO_PREFILL))
        p.prefill(f"p{number}", make_state(p.layout, 39, seed=number))
    first, second = p.half.build_orders().pins
    assert (first.tokens, first.block_ids) == (0, ())
    assert second.tokens == 39
    assert [len(ids) for ids in second.block_ids] == [len(g) for g in p.requests["p2"].blocks]
