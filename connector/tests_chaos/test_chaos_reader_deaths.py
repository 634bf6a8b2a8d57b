"""Links and readers that go while answers wait, without vLLM: the process that is read from lives.

What UCX does to it otherwise: ``connector/tests_vllm/test_vllm_reader_deaths.py``.
"""

import pytest

from hybridpd_connector.agent_api import ReadState
from hybridpd_testkit.pd_client import wait_until
from hybridpd_testkit.reader_deaths import Mends, Reader, Where, producer

CUTS = 2
SILENCE_SECONDS = 2
SLOW_KILOBITS = 20_000  # 16 MiB take 7 s


@pytest.fixture
def sides(wire):
    """Where a producer and a reader are, with the wire between them."""
    ucx = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "data0"}
    yield Where(wire.prefill.namespace, ucx), Where(wire.decode.namespace, ucx)
    wire.calm()


def read_over_a_slow_link(wire, reader):
    """Requests are sent, a few answers have come, and most wait."""
    wire.throttle(SLOW_KILOBITS)
    before = wire.bytes_to_decode()
    reader.post()
    wait_until(lambda: wire.bytes_to_decode() - before > 200_000, "answers are on their way")


def require_a_right_read(made, there):
    reader = Reader(made, there)
    reader.post()
    assert reader.finish()[0] is ReadState.DONE


@pytest.mark.parametrize("kills", [False, True], ids=["reader_lives", "reader_dies"])
def test_chaos_a_cut_link_ends_no_producer(wire, sides, kills):
    """The link is cut while answers wait, until the producer has given the connection up. Its
    reader lives on the other side, or dies there unheard."""
    here, there = sides
    with producer(Mends(silence_seconds=SILENCE_SECONDS), here) as made:
        files = made.files()
        for _ in range(CUTS):
            reader = Reader(made, there)
            read_over_a_slow_link(wire, reader)
            wire.cut()
            if kills:
                reader.kill()
            assert made.settle(2 * SILENCE_SECONDS + 2) is None
            wire.calm()
            if not kills:
                # What it asks is answered by a host that knows its connection no more.
                assert reader.finish()[0] is ReadState.FAILED
            require_a_right_read(made, there)
        wait_until(lambda: made.files() <= files + 2, "connections are closed")
        assert made.close() == 0


def test_chaos_a_reader_killed_on_a_slow_link_ends_no_producer(wire, sides):
    here, there = sides
    with producer(where=here) as made:
        for _ in range(CUTS):
            reader = Reader(made, there)
            read_over_a_slow_link(wire, reader)
            reader.kill()
            assert made.settle(1.0) is None
            wire.calm()
        require_a_right_read(made, there)
        assert made.close() == 0
