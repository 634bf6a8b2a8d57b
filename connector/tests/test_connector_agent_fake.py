"""The in-memory agent keeps the agent contract, and misbehaves as it is told.

The same contract class runs on the real agent in ``connector/tests_vllm/test_vllm_agent_real.py``.
"""

import pytest

from hybridpd_connector.agent_api import Agent, ReadState
from hybridpd_connector.agent_fake import FakeAgent, FakeNetwork
from hybridpd_connector.errors import AgentError, PeerLostError
from hybridpd_testkit.agent_contract import AgentContract, Pair


class TestFakeAgent(AgentContract):
    network = FakeNetwork()

    def make_agent(self, name: str) -> Agent:
        return FakeAgent(name, self.network)


@pytest.fixture
def network():
    return FakeNetwork()


@pytest.fixture
def pair(network):
    return Pair(FakeAgent("p", network), FakeAgent("d", network))


def post(pair, notify=b""):
    return pair.post(pair.consumer.dense(), [0, 1], pair.producer.dense(), [5, 9], notify)


def test_a_delayed_read_moves_nothing_before_it_ends(network, pair):
    network.delay_reads(3)
    read = post(pair)
    for _ in range(2):
        assert pair.consumer.agent.poll(read) is ReadState.PENDING
        assert not any(pair.consumer.page(0))
    assert pair.consumer.agent.poll(read) is ReadState.DONE
    assert pair.consumer.page(0) == pair.producer.page(5)


def test_a_failed_read_leaves_half_of_it_and_no_message(network, pair):
    network.fail_reads(1)
    read = post(pair, b"done")
    assert pair.consumer.agent.poll(read) is ReadState.FAILED
    assert pair.consumer.page(0) == pair.producer.page(5)
    assert not any(pair.consumer.page(1))
    assert pair.producer.agent.take_notifications() == []
    assert pair.finish(post(pair)) is ReadState.DONE


def test_a_hanging_read_ends_when_its_peer_resumes(network, pair):
    network.hang_reads("p")
    read = post(pair)
    assert all(pair.consumer.agent.poll(read) is ReadState.PENDING for _ in range(50))
    network.resume("p")
    assert pair.consumer.agent.poll(read) is ReadState.DONE


def test_a_killed_peer_fails_reads_posts_and_messages(network, pair):
    read = post(pair)
    network.kill("p")
    assert pair.consumer.agent.poll(read) is ReadState.FAILED
    with pytest.raises(PeerLostError):
        post(pair)
    with pytest.raises(PeerLostError):
        pair.consumer.agent.send_notification("p", b"hello")
    with pytest.raises(PeerLostError):
        pair.consumer.agent.add_peer(pair.producer.agent.metadata())


def test_lost_messages_and_refused_posts_are_counted_down(network, pair):
    network.lose_notifications(1)
    for payload in (b"lost", b"kept"):
        pair.consumer.agent.send_notification("p", payload)
    assert [n.payload for n in pair.producer.agent.take_notifications()] == [b"kept"]
    network.refuse_posts(1)
    with pytest.raises(AgentError):
        post(pair)
    assert pair.finish(post(pair)) is ReadState.DONE
