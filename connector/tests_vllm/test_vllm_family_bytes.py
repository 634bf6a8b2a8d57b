"""Every family's bytes between real NIXL agents, also of families that no CPU engine computes.

The same class runs on the in-memory agent in ``connector/tests``. P's agents make progress by
themselves, as in an engine.
"""

import multiprocessing

import pytest
from family_bytes import FamilyBytes, Rank, layout, load, request_between
from geometry_reads import wrong_sections
from geometry_reference import make_state

from hybridpd_connector.agent import NixlAgent
from hybridpd_connector.agent_api import Agent


class TestNixlFamilyBytes(FamilyBytes):
    def make_agent(self, name: str) -> Agent:
        return NixlAgent(name, progress_thread=name.startswith("p"))


def _producer(name, connection):
    """One rank of P in a process of its own, until the other end says that it has read."""
    source, destination = layout(name, 1, 1, 1), layout(name, 2, 1, 1)
    request = request_between(source, destination)
    rank = Rank(source, 0, request.tokens, NixlAgent("p-alone", progress_thread=True))
    made = make_state(source, request.tokens, seed=1)
    rank.memory.write_request(made, request.source)
    connection.send(rank.told())
    connection.recv()
    rank.agent.close()


@pytest.mark.parametrize("name", ["mamba1", "kda, latent", "latent"])
def test_sections_from_another_process(name):
    """The families without an engine on a CPU, TP 1 to TP 2."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    producer = context.Process(target=_producer, args=(name, theirs))
    producer.start()
    told = ours.recv()
    destination = layout(name, 2, 1, 1)
    request = request_between(told.layout, destination)
    made = make_state(told.layout, request.tokens, seed=1)
    for number in range(2):
        agent = NixlAgent(f"d-alone-{number}")
        rank = Rank(destination, number, request.tokens, agent)
        assert load(rank, [told], request, agent.take_notifications) > 0
        assert wrong_sections(rank.memory, made, request.destination) == []
        agent.close()
    ours.send("read")
    producer.join()
    assert producer.exitcode == 0
