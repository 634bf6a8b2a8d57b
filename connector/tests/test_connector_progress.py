"""The pump takes what arrives whatever its owner does, in order, and survives errors."""

import threading

import pytest

from hybridpd_connector import progress
from hybridpd_connector.agent_fake import FakeAgent, FakeNetwork
from hybridpd_connector.errors import AgentError
from hybridpd_connector.progress import Pump


@pytest.fixture
def agents():
    network = FakeNetwork()
    producer, consumer = FakeAgent("p", network), FakeAgent("d", network)
    consumer.add_peer(producer.metadata())
    return producer, consumer


def test_messages_are_taken_off_the_agent_while_the_owner_does_nothing(agents):
    producer, consumer = agents
    pump = Pump(producer, interval_seconds=0.001)
    pause = threading.Event()
    for number in range(50):
        consumer.send_notification("p", bytes([number]))
    for _ in range(1000):
        if not producer.inbox:
            break
        pause.wait(0.01)
    assert producer.inbox == []
    assert [n.payload for n in pump.take()] == [bytes([number]) for number in range(50)]
    assert pump.take() == []
    pump.close()
    pump.close()
    assert repr(pump) == "Pump(closed, waiting=0)"


def test_taking_also_looks(agents):
    producer, consumer = agents
    pump = Pump(producer, interval_seconds=60.0)
    consumer.send_notification("p", b"now")
    assert [n.payload for n in pump.take()] == [b"now"]
    pump.close()


def test_an_error_of_the_agent_does_not_reach_the_thread_that_takes(agents):
    """It is the engine's: vLLM ends with any error raised there."""
    producer, consumer = agents
    pump = Pump(producer, interval_seconds=60.0)
    consumer.send_notification("p", b"before")
    pump._look()
    good = producer.take_notifications

    def fail():
        raise AgentError("agent p", "to take notifications", "a fault")

    producer.take_notifications = fail
    assert [n.payload for n in pump.take()] == [b"before"]
    assert pump.take() == []
    producer.take_notifications = good
    consumer.send_notification("p", b"after")
    assert [n.payload for n in pump.take()] == [b"after"]
    pump.close()


def test_an_error_of_the_agent_does_not_end_the_pump(agents, monkeypatch, caplog):
    monkeypatch.setattr(progress, "_PAUSE_AFTER_ERROR_SECONDS", 0.001)
    producer, consumer = agents
    good = producer.take_notifications
    failed = threading.Event()

    def fail():
        failed.set()
        raise AgentError("agent p", "to take notifications", "a fault")

    producer.take_notifications = fail
    pump = Pump(producer, interval_seconds=0.001)
    assert failed.wait(10)
    producer.take_notifications = good
    consumer.send_notification("p", b"after")
    assert [n.payload for n in pump.take()] == [b"after"]
    pump.close()
    assert "a fault" in caplog.text
