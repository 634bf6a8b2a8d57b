"""A load that read other bytes than its plan foresaw: counted, and told with both numbers."""

import logging

import pytest
from connector_engines import World
from test_connector_two_engines import loaded, prefilled

from hybridpd_connector.agent_api import ReadTelemetry
from hybridpd_connector.mispredictions import MOST_LINES, Mispredictions


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


def test_a_library_that_cannot_say_what_it_read_is_no_misprediction(world, monkeypatch, caplog):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    monkeypatch.setattr(
        world.network.agents["d/0"], "telemetry", lambda read: ReadTelemetry(0, 0, 0.0, 0.0)
    )
    with caplog.at_level(logging.WARNING):
        loaded(world, d, "d1")
    data = d.ranks[0].take_stats()
    assert data["seconds"]["load_bytes"] == [0]
    assert "mispredicted_loads" not in data["counts"]
    assert not [record for record in caplog.records if "foreseen" in record.getMessage()]


@pytest.mark.parametrize("extra_bytes", [0, 8])
def test_a_load_of_other_bytes_than_foreseen_is_told_with_both(
    world, monkeypatch, caplog, extra_bytes
):
    p = world.engine("p", "producer")
    d = world.engine("d", "consumer")
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    agent = world.network.agents["d/0"]
    told = agent.telemetry

    def telemetry(read):
        found = told(read)
        return found._replace(total_bytes=found.total_bytes + extra_bytes)

    monkeypatch.setattr(agent, "telemetry", telemetry)
    with caplog.at_level(logging.WARNING):
        loaded(world, d, "d1")
    data = d.ranks[0].take_stats()
    measured, foreseen = data["seconds"]["load_bytes"], data["seconds"]["predicted_load_bytes"]
    assert [a - b for a, b in zip(measured, foreseen, strict=True)] == [extra_bytes]
    assert data["seconds"]["predicted_load_descriptors"] == data["seconds"]["load_descriptors"]
    assert data["counts"].get("mispredicted_loads", 0) == (1 if extra_bytes else 0)
    lines = [record.getMessage() for record in caplog.records if "foreseen" in record.getMessage()]
    assert len(lines) == (1 if extra_bytes else 0)
    for line in lines:
        descriptors = data["seconds"]["load_descriptors"][0]
        assert line.startswith(f"request d1 read {measured[0]} bytes in {descriptors} descriptors")
        assert f"{foreseen[0]} bytes in {descriptors} descriptors were foreseen" in line
        assert p.identity.engine_id in line


def test_a_plan_that_is_always_wrong_fills_no_log(caplog):
    mispredictions = Mispredictions()
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            mispredictions.tell(f"r{number}", "engine", (1, 1), (2, 1))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == MOST_LINES
    assert [line.endswith("only counted.") for line in lines] == [False] * 7 + [True]
