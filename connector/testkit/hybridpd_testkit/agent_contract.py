"""The contract of ``hybridpd_connector.agent_api`` as tests: one class, run on every agent.

A test file subclasses ``AgentContract`` and says how agents are made. Covered: memory, lifecycle,
failures of calls, merging of descriptors, notifications, threads, and the lease board on top. Left
out, because an agent in the same process cannot die: a lost peer, which each test file shows in
its own way.
"""

import ctypes
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from hybridpd_connector.agent_api import (
    Agent,
    Ids,
    Memory,
    MemoryRegion,
    Notification,
    PostedRead,
    ReadState,
    Rows,
)
from hybridpd_connector.errors import AgentError, StateError
from hybridpd_connector.lease_board import BoardReader, LeaseBoard

PAGE_BYTES = 4096
PAGES = 64
_MAX_POLLS = 2_000_000

_serial = itertools.count()


class Side:
    """One agent with ``PAGES`` pages of registered memory."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.memory = (ctypes.c_uint8 * (PAGE_BYTES * PAGES))()
        self.address = ctypes.addressof(self.memory)
        agent.register([MemoryRegion(self.address, PAGE_BYTES * PAGES)])

    def fill(self) -> None:
        """A different pattern in every page."""
        for page in range(PAGES):
            pattern = bytes((page * 7 + i * 13 + 1) % 251 for i in range(64))
            self.write(page, pattern * (PAGE_BYTES // 64))

    def write(self, page: int, content: bytes) -> None:
        ctypes.memmove(self.address + page * PAGE_BYTES, content, len(content))

    def page(self, page: int) -> bytes:
        return ctypes.string_at(self.address + page * PAGE_BYTES, PAGE_BYTES)

    def dense(self, first: int = 0, pages: int = PAGES) -> list[tuple[int, int, int, int, int]]:
        return [(self.address + first * PAGE_BYTES, PAGE_BYTES, 0, PAGE_BYTES, pages)]


class Pair:
    """A producer and a consumer that knows it."""

    def __init__(self, producer: Agent, consumer: Agent) -> None:
        self.producer = Side(producer)
        self.consumer = Side(consumer)
        self.arrived: list[Notification] = []
        self.producer.fill()
        self.peer = consumer.add_peer(producer.metadata())

    def post(
        self, local: Rows, local_ids: Ids, remote: Rows, remote_ids: Ids, notify: bytes = b""
    ) -> PostedRead:
        agent = self.consumer.agent
        here = agent.prepare(None, local, Memory.DRAM)
        there = agent.prepare(self.peer, remote, Memory.DRAM)
        return agent.post_read(here, local_ids, there, remote_ids, notify)

    def finish(self, read: PostedRead) -> ReadState:
        """Poll both sides until the read has ended."""
        for _ in range(_MAX_POLLS):
            state = self.consumer.agent.poll(read)
            if state is not ReadState.PENDING:
                return state
            self.arrived.extend(self.producer.agent.take_notifications())
        raise AssertionError("the read did not end")

    def wait_for(self, count: int) -> list[Notification]:
        """The first ``count`` notifications of the producer, both sides making progress."""
        for _ in range(_MAX_POLLS):
            self.consumer.agent.take_notifications()
            self.arrived.extend(self.producer.agent.take_notifications())
            if len(self.arrived) >= count:
                return self.arrived
        raise AssertionError(f"expected {count} notifications, got {len(self.arrived)}")


class AgentContract:
    """Subclass this as ``Test...`` and implement ``make_agent``."""

    def make_agent(self, name: str) -> Agent:
        raise AssertionError("the subclass makes the agent")

    @pytest.fixture
    def pair(self) -> Iterator[Pair]:
        serial = next(_serial)
        producer = self.make_agent(f"producer-{serial}")
        consumer = self.make_agent(f"consumer-{serial}")
        yield Pair(producer, consumer)
        consumer.close()
        producer.close()

    def test_a_read_moves_exactly_the_named_pages(self, pair: Pair) -> None:
        read = pair.post(pair.consumer.dense(), [3, 9], pair.producer.dense(), [5, 40])
        assert pair.finish(read) is ReadState.DONE
        for page in range(PAGES):
            source = {3: 5, 9: 40}.get(page)
            expected = bytes(PAGE_BYTES) if source is None else pair.producer.page(source)
            assert pair.consumer.page(page) == expected, page

    def test_strided_rows_number_their_pieces(self, pair: Pair) -> None:
        # Half pages: id i of the strided row is the first half of page 2i.
        half = PAGE_BYTES // 2
        remote = [(pair.producer.address, half, 0, 2 * PAGE_BYTES, PAGES // 2)]
        local = [(pair.consumer.address, half, 0, half, 2 * PAGES)]
        read = pair.post(local, [0, 1], remote, [3, 7])
        assert pair.finish(read) is ReadState.DONE
        assert pair.consumer.page(0) == pair.producer.page(6)[:half] + pair.producer.page(14)[:half]

    def test_ids_run_through_all_rows(self, pair: Pair) -> None:
        rows = pair.producer.dense(0, 10) + pair.producer.dense(50, 4)
        read = pair.post(pair.consumer.dense(), [0, 1], rows, [9, 10])
        assert pair.finish(read) is ReadState.DONE
        assert pair.consumer.page(0) == pair.producer.page(9)
        assert pair.consumer.page(1) == pair.producer.page(50)

    @pytest.mark.parametrize(
        ("local_ids", "remote_ids", "descriptors"),
        [
            ([0], [7], 1),
            ([0, 1, 2, 3], [10, 11, 12, 13], 1),
            ([0, 1, 2, 3], [10, 11, 20, 21], 2),
            ([0, 1, 3, 4], [10, 11, 12, 13], 2),
            ([3, 2, 1], [12, 11, 10], 3),
            ([0, 1, 2, 3], [30, 31, 32, 33], 2),
        ],
        ids=["one", "run", "gap there", "gap here", "backwards", "across rows"],
    )
    def test_neighbours_are_merged_and_counted(
        self, pair: Pair, local_ids: Sequence[int], remote_ids: Sequence[int], descriptors: int
    ) -> None:
        rows = pair.producer.dense(0, 32) + pair.producer.dense(32, 32)
        read = pair.post(pair.consumer.dense(), local_ids, rows, remote_ids)
        assert pair.finish(read) is ReadState.DONE
        counted = pair.consumer.agent.telemetry(read)
        assert counted.descriptors == descriptors
        assert counted.total_bytes == len(local_ids) * PAGE_BYTES
        assert counted.post_seconds >= 0
        assert counted.noticed_seconds >= 0

    def test_strided_pieces_are_not_merged(self, pair: Pair) -> None:
        remote = [(pair.producer.address, PAGE_BYTES, 0, 2 * PAGE_BYTES, PAGES // 2)]
        read = pair.post(pair.consumer.dense(), [0, 1, 2], remote, [0, 1, 2])
        assert pair.finish(read) is ReadState.DONE
        assert pair.consumer.agent.telemetry(read).descriptors == 3

    @pytest.mark.parametrize("made", [list, np.array])
    def test_ranges_move_exactly_what_they_name(self, pair: Pair, made: Any) -> None:
        """Each range is one descriptor, also when it ignores the pieces of the lists."""
        agent = pair.consumer.agent
        here = agent.prepare(None, pair.consumer.dense(), Memory.DRAM)
        there = agent.prepare(pair.peer, pair.producer.dense(), Memory.DRAM)
        ours, theirs = pair.consumer.address, pair.producer.address
        ranges = [
            (ours + 100, theirs + 3 * PAGE_BYTES + 7, 2 * PAGE_BYTES),
            (ours + 9 * PAGE_BYTES, theirs + PAGE_BYTES, 1),
        ]
        expected = bytearray(PAGE_BYTES * PAGES)
        for destination, source, size in ranges:
            at = destination - ours
            expected[at : at + size] = ctypes.string_at(source, size)
        read = agent.post_ranges(here, there, made(ranges))
        assert pair.finish(read) is ReadState.DONE
        assert bytes(pair.consumer.memory) == expected
        counted = agent.telemetry(read)
        assert (counted.descriptors, counted.total_bytes) == (2, 2 * PAGE_BYTES + 1)
        assert agent.release_read(read)
        agent.release_list(here)
        agent.release_list(there)

    @pytest.mark.parametrize("made", [list, np.array])
    def test_ranges_outside_registered_memory_are_refused(self, pair: Pair, made: Any) -> None:
        agent = pair.consumer.agent
        here = agent.prepare(None, pair.consumer.dense(), Memory.DRAM)
        there = agent.prepare(pair.peer, pair.producer.dense(), Memory.DRAM)
        ours, theirs = pair.consumer.address, pair.producer.address
        size = PAGE_BYTES * PAGES
        for ranges in (
            [(ours + 1, theirs, size)],
            [(ours, theirs + 1, size)],
            [(ours, theirs, 1), (ours, theirs - 1, 1)],
            [],
            [(ours, theirs)],
        ):
            with pytest.raises(AgentError):
                agent.post_ranges(here, there, made(ranges))
        agent.release_list(here)
        agent.release_list(there)

    def test_lists_of_a_read_of_ranges_stay_while_it_is_in_flight(self, pair: Pair) -> None:
        agent = pair.consumer.agent
        here = agent.prepare(None, pair.consumer.dense(), Memory.DRAM)
        there = agent.prepare(pair.peer, pair.producer.dense(), Memory.DRAM)
        ranges = [(pair.consumer.address, pair.producer.address, PAGE_BYTES)]
        read = agent.post_ranges(here, there, ranges)
        if not agent.release_read(read):
            with pytest.raises(AgentError, match="in flight"):
                agent.release_list(here)
        assert pair.finish(read) is ReadState.DONE
        assert read.released or agent.release_read(read)
        agent.release_list(here)
        agent.release_list(there)
        with pytest.raises(StateError):
            agent.post_ranges(here, there, ranges)

    def test_a_read_notifies_once_when_it_is_done(self, pair: Pair) -> None:
        read = pair.post(pair.consumer.dense(), [0], pair.producer.dense(), [1], b"read 1")
        assert pair.finish(read) is ReadState.DONE
        expected = [Notification(pair.consumer.agent.name, b"read 1")]
        assert pair.wait_for(1) == expected
        assert pair.producer.agent.take_notifications() == []

    def test_messages_arrive_whole_and_in_order(self, pair: Pair) -> None:
        sent = [bytes([number]) * (1 + 500 * number) for number in range(20)]
        for payload in sent:
            pair.consumer.agent.send_notification(pair.peer, payload)
        assert [notification.payload for notification in pair.wait_for(20)] == sent

    @pytest.mark.parametrize(
        ("local_ids", "remote_ids"),
        [([0, 1], [0]), ([PAGES], [0]), ([0], [PAGES]), ([-1], [0]), ([0], [-1]), ([], [])],
        ids=["unequal", "beyond here", "beyond there", "below here", "below there", "none"],
    )
    def test_bad_ids_are_refused(
        self, pair: Pair, local_ids: Sequence[int], remote_ids: Sequence[int]
    ) -> None:
        with pytest.raises(AgentError):
            pair.post(pair.consumer.dense(), local_ids, pair.producer.dense(), remote_ids)

    def test_pairs_of_unequal_length_are_refused(self, pair: Pair) -> None:
        half = [(pair.producer.address, PAGE_BYTES // 2, 0, PAGE_BYTES // 2, 4)]
        with pytest.raises(AgentError):
            pair.post(pair.consumer.dense(), [0], half, [0])

    def test_memory_that_is_not_registered_is_refused(self, pair: Pair) -> None:
        agent = pair.consumer.agent
        with pytest.raises(AgentError):
            agent.prepare(None, pair.consumer.dense(1, PAGES), Memory.DRAM)
        with pytest.raises(AgentError):
            agent.prepare(pair.peer, pair.producer.dense(1, PAGES), Memory.DRAM)
        with pytest.raises(AgentError):
            agent.prepare(None, pair.consumer.dense(), Memory.VRAM)

    @pytest.mark.parametrize("rows", [[], [(1, 2, 3)]], ids=["none", "three columns"])
    def test_malformed_rows_are_refused(self, pair: Pair, rows: Rows) -> None:
        with pytest.raises(AgentError):
            pair.consumer.agent.prepare(None, rows, Memory.DRAM)

    def test_unknown_peers_are_refused(self, pair: Pair) -> None:
        agent = pair.consumer.agent
        with pytest.raises(AgentError):
            agent.send_notification("nobody", b"hello")
        with pytest.raises(AgentError):
            agent.prepare("nobody", pair.producer.dense(), Memory.DRAM)
        with pytest.raises(AgentError):
            agent.add_peer(b"garbage" * 20)
        agent.remove_peer("nobody")

    def test_a_peer_added_twice_keeps_reads_in_flight(self, pair: Pair) -> None:
        read = pair.post(pair.consumer.dense(), [0], pair.producer.dense(), [1])
        assert pair.consumer.agent.add_peer(pair.producer.agent.metadata()) == pair.peer
        assert pair.finish(read) is ReadState.DONE
        assert pair.consumer.page(0) == pair.producer.page(1)

    def test_a_removed_peer_can_come_back(self, pair: Pair) -> None:
        read = pair.post(pair.consumer.dense(), [0], pair.producer.dense(), [1])
        assert pair.finish(read) is ReadState.DONE
        assert pair.consumer.agent.release_read(read)
        pair.consumer.agent.remove_peer(pair.peer)
        pair.peer = pair.consumer.agent.add_peer(pair.producer.agent.metadata())
        read = pair.post(pair.consumer.dense(), [2], pair.producer.dense(), [3])
        assert pair.finish(read) is ReadState.DONE
        assert pair.consumer.page(2) == pair.producer.page(3)

    def test_nothing_that_a_read_uses_can_be_given_back(self, pair: Pair) -> None:
        agent = pair.consumer.agent
        here = agent.prepare(None, pair.consumer.dense(), Memory.DRAM)
        there = agent.prepare(pair.peer, pair.producer.dense(), Memory.DRAM)
        # First contact needs the producer's side, which stands still: the read is in flight.
        read = agent.post_read(here, [0], there, [1])
        assert not agent.release_read(read)
        for prepared in (here, there):
            with pytest.raises(AgentError, match="in flight"):
                agent.release_list(prepared)
        with pytest.raises(AgentError, match="in flight"):
            agent.remove_peer(pair.peer)
        assert pair.finish(read) is ReadState.DONE
        assert agent.release_read(read)
        assert read.released
        agent.release_list(here)
        agent.release_list(there)
        agent.remove_peer(pair.peer)

    def test_a_handle_is_given_back_once(self, pair: Pair) -> None:
        agent = pair.consumer.agent
        prepared = agent.prepare(None, pair.consumer.dense(), Memory.DRAM)
        there = agent.prepare(pair.peer, pair.producer.dense(), Memory.DRAM)
        read = agent.post_read(prepared, [0], there, [1])
        assert pair.finish(read) is ReadState.DONE
        assert agent.release_read(read)
        with pytest.raises(StateError):
            agent.release_read(read)
        with pytest.raises(StateError):
            agent.telemetry(read)
        agent.release_list(prepared)
        with pytest.raises(StateError):
            agent.release_list(prepared)
        with pytest.raises(StateError):
            agent.post_read(prepared, [0], there, [1])

    def test_handles_of_something_else_are_refused(self, pair: Pair) -> None:
        with pytest.raises(StateError):
            pair.consumer.agent.release_list(object())  # type: ignore[arg-type]

    def test_threads_may_share_an_agent(self, pair: Pair) -> None:
        stop = threading.Event()
        errors: list[Exception] = []

        def look() -> None:
            while not stop.is_set():
                try:
                    pair.consumer.agent.take_notifications()
                    pair.producer.agent.take_notifications()
                except AgentError as error:
                    errors.append(error)

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for page in range(20):
                read = pair.post(pair.consumer.dense(), [page], pair.producer.dense(), [page + 1])
                assert pair.finish(read) is ReadState.DONE
                assert pair.consumer.page(page) == pair.producer.page(page + 1)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not errors

    def test_close_is_idempotent(self, pair: Pair) -> None:
        pair.consumer.agent.close()
        pair.consumer.agent.close()

    def test_the_lease_board_tells_held_from_ended(self, pair: Pair) -> None:
        board = LeaseBoard(slots=8)
        pair.producer.agent.register([board.region()])
        pair.consumer.agent.remove_peer(pair.peer)
        peer = pair.consumer.agent.add_peer(pair.producer.agent.metadata())
        reader = BoardReader(pair.consumer.agent, cells=2)
        view = reader.attach(peer, board.address, board.slots)

        def held(sequence: int) -> bool:
            probe = reader.start(view, [sequence])
            assert pair.finish(probe.read) is ReadState.DONE
            answer = not reader.ended(probe)
            assert reader.finish(probe)
            return answer

        assert held(5)
        board.end(5)
        assert not held(5)
        assert held(6)
        # Slot 5 again, by a later lease: the earlier one must not look held.
        assert held(13)
        board.end(13)
        assert not held(5)
        board.end(5)
        assert not held(13)
        assert reader.cells_used == 0
        reader.detach(view)
