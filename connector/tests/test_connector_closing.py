"""An engine that shuts down ends: no question, no probe and no transfer library holds it up."""

import socket
import threading

import pytest
from connector_engines import World
from test_connector_two_engines import prefilled

from hybridpd_connector import closing
from hybridpd_connector.closing import close_within
from hybridpd_connector.errors import SideChannelError
from hybridpd_connector.side_channel_client import Client

NEVER = 3600.0


def test_what_closes_is_waited_for():
    done = []
    assert close_within(lambda: done.append(1))
    assert done == [1]


def test_what_never_closes_is_left_alone(caplog):
    gate, ended = threading.Event(), threading.Event()

    def hang():
        gate.wait()
        ended.set()

    assert not close_within(hang, 0.01)
    assert "not done" in caplog.text
    gate.set()
    assert ended.wait(30)


def test_closing_never_raises(caplog):
    def broken():
        raise OSError("gone")

    assert close_within(broken)
    assert "closing failed" in caplog.text


def test_an_interpreter_that_ends_gives_no_thread(monkeypatch):
    class NoThread:
        def __init__(self, **_):
            pass

        def start(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(closing.threading, "Thread", NoThread)
    done = []
    assert close_within(lambda: done.append(1))
    assert done == [1]


@pytest.fixture
def silent():
    """Takes connections and says nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    yield listener.getsockname()[1]
    listener.close()


def test_a_question_on_its_way_ends_when_the_client_hangs_up(silent):
    client, ended = Client(), []

    def ask():
        with pytest.raises(SideChannelError):
            client.ask("127.0.0.1", silent, b"?", NEVER)
        ended.append(1)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(0.2)
    assert asking.is_alive()
    client.hang_up()
    asking.join(30)
    assert ended == [1]
    with pytest.raises(SideChannelError):
        client.ask("127.0.0.1", silent, b"?", NEVER)
    client.hang_up()


def test_a_rank_closes_while_its_handshake_waits_for_an_answer():
    world = World()
    p, d = world.engine("p", "producer"), world.engine("d", "consumer")
    asked, hung_up = threading.Event(), threading.Event()

    def ask(host, port, question, timeout_seconds):
        asked.set()
        hung_up.wait()
        raise SideChannelError("side channel", "an answer", "nobody asks any more")

    world.ask, world.hang_up = ask, hung_up.set
    tokens, answer, _ = prefilled(p, 40)
    d.add("d1", tokens, answer)
    d.schedule("d1")
    d.step()
    assert asked.wait(30)
    closed = threading.Thread(target=d.ranks[0].close, daemon=True)
    closed.start()
    closed.join(30)
    assert not closed.is_alive()
    world.close()
