"""What a peer says of itself in its metadata must not touch a peer that is known.

A stand-in for NIXL that keeps what matters here: metadata is loaded under the name in it. The real
one is in ``connector/tests_vllm``.
"""

import types

import pytest

from hybridpd_connector import agent
from hybridpd_connector.errors import AgentError


class Nixl:
    def __init__(self, name, config):
        self.backends = {"UCX": object()}
        self.loaded = {}

    def add_remote_agent(self, metadata):
        name = metadata.split(b"|")[1]
        self.loaded[name.decode("utf-8", "replace")] = metadata
        return name

    def remove_remote_agent(self, name):
        del self.loaded[name]

    def get_new_notifs(self):
        return {b"\xff\xfe": [b"x"], "d/0": [b"y"]}


@pytest.fixture
def reader(monkeypatch):
    api = types.SimpleNamespace(
        nixlBind=types.SimpleNamespace(nixlAgent=None),
        nixl_agent_config=lambda **settings: settings,
        nixl_agent=Nixl,
    )
    monkeypatch.setattr(agent, "load_nixl", lambda: api)
    return agent.NixlAgent("d/0-0123456789ab")


GOOD = b"head|p/0-aaaaaaaaaaaa|memory of p"
FORGED = b"head|p/0-aaaaaaaaaaaa|memory of somebody else"


def test_an_agent_that_takes_the_name_of_another_is_refused_before_it_is_loaded(reader):
    name = reader.add_peer(GOOD)
    with pytest.raises(AgentError, match="a name of its own"):
        reader.add_peer(FORGED)
    assert reader._nixl.loaded == {name: GOOD}
    assert reader.add_peer(GOOD) == name
    other = reader.add_peer(b"head|p/1-bbbbbbbbbbbb|memory of p")
    reader.remove_peer(name)
    assert set(reader._nixl.loaded) == {other}
    assert reader.add_peer(FORGED) == name, "the name is free again"


def test_a_short_name_in_the_bytes_of_another_agent_is_chance(reader):
    assert reader.add_peer(b"head|p1|memory") == "p1"
    assert reader.add_peer(b"head|p10|memory of p1") == "p10"


def test_names_that_are_no_text_are_refused_or_shown(reader):
    """Messages are taken on the engine's thread: nothing may be raised there."""
    with pytest.raises(AgentError):
        reader.add_peer(b"head|\xff\xfe|memory")
    senders = [notification.sender for notification in reader.take_notifications()]
    assert senders == ["\ufffd\ufffd", "d/0"]
