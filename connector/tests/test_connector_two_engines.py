"""A prefill engine and a decode engine in one process: bytes arrive where they must, and nothing
stays behind, whatever happens in between."""

import pytest
from connector_engines import DENSE, HYBRID, LEASE_SECONDS, ONE_GROUP, TO_PREFILL, World
from geometry_reference import make_state

from hybridpd_connector.seals import sealed
from hybridpd_connector.transfer_params import answer as make_answer
from hybridpd_connector.transfer_params import parse_decode


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def prompt(length, seed=0):
    return [(seed * 131 + i * 7) % 500 for i in range(length)]


def prefilled(p, length, request_id="p1", seed=0):
    """A prompt of ``length`` tokens, prefilled on ``p``. (tokens, answer, what the state is)."""
    tokens = prompt(length, seed)
    made = make_state(p.layout, length - 1, seed=length + seed)
    p.add(request_id, tokens, dict(TO_PREFILL))
    return tokens, p.prefill(request_id, made), made


def loaded(world, d, request_id):
    """Schedule a load on ``d`` and step everybody until it has ended."""
    d.schedule(request_id)
    world.until(lambda: request_id not in d.requests or d.requests[request_id].status == "running")


def all_free(engine, blocks=24):
    return not engine.requests and sorted(engine.free) == list(range(1, blocks))


MODELS = [HYBRID, ONE_GROUP, DENSE]
TP_PAIRS = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (1, 4)]


@pytest.mark.parametrize(("p_tp", "d_tp"), TP_PAIRS)
@pytest.mark.parametrize("model", MODELS, ids=["two-groups", "one-group", "dense"])
@pytest.mark.parametrize("length", [2, 17, 33, 64, 100])
def test_every_rank_holds_what_one_engine_would_hold(world, model, p_tp, d_tp, length):
    if model is HYBRID and 4 in (p_tp, d_tp):
        model = ONE_GROUP  # two groups cannot be split over four ranks
    p = world.engine("p", "producer", model=model, tp_size=p_tp)
    d = world.engine("d", "consumer", model=model, tp_size=d_tp)
    tokens, answer, made = prefilled(p, length)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    assert d.requests["d1"].computed == length - 1
    assert d.pages_equal("d1", made, length - 1)
    d.end("d1")
    world.until(lambda: all_free(p) and all_free(d))


@pytest.mark.parametrize("packing", ["token", "cpu_vec"])
def test_other_block_sizes_on_the_two_sides(world, packing):
    p = world.engine("p", "producer", packing=packing, block_size=32)
    d = world.engine("d", "consumer", packing=packing, block_size=96)
    assert p.layout.block_tokens != d.layout.block_tokens
    tokens, answer, made = prefilled(p, 90)
    d.add("d1", tokens, answer)
    loaded(world, d, "d1")
    assert d.pages_equal("d1", made, 89)


def test_a_prompt_of_one_token_moves_nothing_and_strands_nothing(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    request = p.add("p1", [5], dict(TO_PREFILL))
    assert request.facts.prompt_tokens == 1
    answer = p.prefill("p1", make_state(p.layout, 1, seed=1))
    assert answer["hybridpd"]["tokens"] == 0
    assert all_free(p)
    d.add("d1", [5], answer)
    d.schedule("d1")
    assert d.requests["d1"].status == "running"
    assert d.half.build_orders().interests == ()


def test_sixteen_requests_at_once(world):
    p = world.engine("p", "producer", blocks=200)
    d = world.engine("d", "consumer", tp_size=2, blocks=200)
    batch = {}
    for index in range(16):
        batch[f"d{index}"] = prefilled(p, 20 + 5 * index, f"p{index}", seed=index)
        d.add(f"d{index}", batch[f"d{index}"][0], batch[f"d{index}"][1])
    for request_id in batch:
        d.schedule(request_id)
    world.until(lambda: all(item.status == "running" for item in d.requests.values()))
    for request_id, (tokens, _, made) in batch.items():
        assert d.pages_equal(request_id, made, len(tokens) - 1), request_id
        d.end(request_id)
    world.until(lambda: all_free(p, 200) and all_free(d, 200))


def test_what_the_local_prefix_cache_has_is_not_read_again(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    block = d.layout.block_tokens
    tokens, answer, made = prefilled(p, 2 * block + 10)
    d.add("d1", tokens, answer)
    d.schedule("d1", computed=block)
    before = [memory.bytes.copy() for memory in d.memories]
    world.until(lambda: d.requests["d1"].status == "running")
    for memory, old in zip(d.memories, before, strict=True):
        for layer in d.layout.layers:
            if layer.kind == "attention":
                at = memory.page_at(layer, d.requests["d1"].blocks[layer.group][0])
                untouched = slice(at, at + d.layout.page_bytes)
                assert (memory.bytes[untouched] == old[untouched]).all()
                at = memory.page_at(layer, d.requests["d1"].blocks[layer.group][1])
                page = memory.expected_page(made, layer, 1)
                assert (memory.bytes[at : at + len(page)] == page).all()


def test_a_full_local_hit_only_releases(world):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, d.layout.block_tokens + 1)
    d.add("d1", tokens, answer)
    d.schedule("d1", computed=d.layout.block_tokens)
    assert d.requests["d1"].status == "running"
    world.until(lambda: all_free(p))
    assert d.half.take_stats() is None


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("change", ["tokens", "length", "lora", "salt", "multimodal"])
def test_a_load_that_is_not_for_this_prompt_fails(world, policy, change):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer", policy=policy)
    tokens, answer, _ = prefilled(p, 40)
    more = {
        "lora": {"lora": "other"},
        "salt": {"cache_salt": "x"},
        "multimodal": {"multimodal": ("h",)},
    }
    if change == "tokens":
        tokens = [tokens[0] + 1, *tokens[1:]]
    if change == "length":
        tokens = [*tokens, 1]
    d.add("d1", tokens, answer, **more.get(change, {}))
    loaded(world, d, "d1")
    assert d.reasons["d1"] == "other_prompt"
    if policy == "fail":
        assert all_free(d)
    else:
        assert d.requests["d1"].recomputed
        d.end("d1")
    world.until(lambda: all_free(p) and all_free(d))


def test_the_last_prompt_token_may_differ(world):
    """Its state is not part of what is handed over."""
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, made = prefilled(p, 40)
    d.add("d1", [*tokens[:-1], 499], answer)
    loaded(world, d, "d1")
    assert d.pages_equal("d1", made, 39)


def test_two_prompts_in_one_call_get_the_first_ones_params(world):
    """vLLM answers with one set of params; a second prompt must not load the first one's state."""
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    first, answer, made = prefilled(p, 40, "p1", seed=1)
    second, _, _ = prefilled(p, 40, "p2", seed=2)
    d.add("d1", first, answer)
    d.add("d2", second, answer)
    loaded(world, d, "d2")
    loaded(world, d, "d1")
    assert d.reasons == {"d2": "other_prompt"}
    assert d.pages_equal("d1", made, 39)
    world.until(lambda: "p1" not in p.requests)
    world.now += LEASE_SECONDS + 1
    world.until(lambda: all_free(p))


@pytest.mark.parametrize(
    "damage",
    [
        {"remote_block_ids": "x"},
        {"hybridpd": None},
        {"remote_port": 0},
        {"do_remote_prefill": "yes"},
        {"do_remote_decode": True},
    ],
)
def test_damaged_params_fail_the_load_and_nothing_else(world, damage):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, {**answer, **damage})
    loaded(world, d, "d1")
    assert d.reasons["d1"] == "bad_params"
    assert all_free(d)


@pytest.mark.parametrize("blocks", [[[1]], [[10**6], [1], [2], [3]], [[1], [1], [1], []]])
def test_block_ids_of_a_peer_are_checked(world, blocks):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    offer = parse_decode({**answer, "remote_block_ids": blocks})
    d.add("d1", tokens, make_answer(sealed(b"", offer)))
    loaded(world, d, "d1")
    assert d.reasons["d1"] == "bad_blocks"
    world.until(lambda: all_free(d) and all_free(p))


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": [[3], [5], [6], [7]]},
        {"remote_request_id": "p2"},
        {"tp_size": 2},
        {"lease_seconds": 3600},
        {"sequence": 2},
        {"seal": "0" * 64},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_was_changed_on_the_way_is_not_read(world, change):
    """Nobody between the engines chooses which blocks are read, not even valid ones."""
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    ours = {key: change[key] for key in change if key in answer["hybridpd"]}
    outer = {key: change[key] for key in change if key not in ours}
    d.add("d1", tokens, {**answer, **outer, "hybridpd": {**answer["hybridpd"], **ours}})
    loaded(world, d, "d1")
    assert d.reasons["d1"] == "changed_params"
    assert d.ranks[0].take_stats()["counts"].get("read_bytes", 0) == 0
    p.step()  # a renewal that has arrived counts from when it is seen
    world.now += LEASE_SECONDS + 1
    world.until(lambda: all_free(d) and all_free(p))


def test_a_consumer_only_engine_does_not_prefill_for_others(world):
    d = world.engine("d", "consumer")
    request = d.add("d1", prompt(20), dict(TO_PREFILL))
    assert request.facts.prompt_tokens == 20
    assert d.prefill("d1", make_state(d.layout, 20, seed=0)) is None
    assert all_free(d)


def test_a_producer_only_engine_refuses_to_load(world):
    p = world.engine("p", "producer")
    other = world.engine("q", "producer")
    tokens, answer, _ = prefilled(p, 20)
    other.add("q1", tokens, answer)
    loaded(world, other, "q1")
    assert other.reasons["q1"] == "wrong_role"


def test_both_roles_in_both_directions(world):
    a = world.engine("a", "both")
    b = world.engine("b", "both", tp_size=2)
    for source, target in ((a, b), (b, a)):
        tokens, answer, made = prefilled(source, 50, f"from-{source.name}")
        request_id = f"to-{target.name}"
        target.add(request_id, tokens, answer)
        loaded(world, target, request_id)
        assert target.pages_equal(request_id, made, 49)
        target.end(request_id)
    world.until(lambda: all_free(a) and all_free(b))
