"""The threads that shake hands. Few, since a handshake waits most of its time; ``handshake_queue``
says whose turn it is."""

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

from hybridpd_connector.errors import RefusedError, SideChannelError, VersionError
from hybridpd_connector.handshake_queue import HandshakeQueue, Turn

MAX_SEARCHES = 16
"""How often per step the line is searched for somebody to give way: hundreds of loads may ask."""

V = TypeVar("V")
A = TypeVar("A", bound=tuple[str, int])


class Ended(NamedTuple, Generic[V]):
    """How a handshake ended: with a value or with an error."""

    engine_id: str
    attempt: int
    value: V | None
    error: Exception | None


class HandshakePool(Generic[V, A]):
    """Runs ``handshake(engine_id, address)``. All methods are for the owner's thread; none waits
    but ``close``."""

    def __init__(self, handshake: Callable[[str, A], V], workers: int) -> None:
        self._handshake = handshake
        # A quarter of the threads is for engines that are known.
        self.queue: HandshakeQueue[A] = HandshakeQueue(strangers=workers - workers // 4)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="hybridpd-handshake")
        self._ended: queue.SimpleQueue[Ended[V]] = queue.SimpleQueue()
        self._searches = 0
        self.running = 0

    def start(self, engine_id: str, address: A, attempt: int) -> None:
        self.running += 1
        self.queue.put(engine_id, address, attempt)
        self._threads.submit(self._work)

    def make_room(self, engine_id: str, address: A) -> Ended[V] | None:
        """Too many wait: how the handshake ended that gives its place up to this engine, None when
        none does. The place is free at once."""
        if self._searches >= MAX_SEARCHES or not self.queue.may_come_first(engine_id, address):
            return None
        self._searches += 1
        turn = self.queue.give_way(engine_id, address)
        if turn is None:
            return None
        error = SideChannelError("handshake", "a turn", f"{self.running} others")
        self.running -= 1
        return Ended(turn.engine_id, turn.attempt, None, error)

    def take_ended(self) -> list[Ended[V]]:
        self._searches = 0
        ended: list[Ended[V]] = []
        while not self._ended.empty():
            self.running -= 1
            ended.append(self._ended.get_nowait())
        return ended

    def close(self) -> list[V]:
        """Wait for handshakes that run (bounded by their timeouts); what they still brought."""
        self.queue.clear()
        self._threads.shutdown(wait=True, cancel_futures=True)
        return [ended.value for ended in self.take_ended() if ended.value is not None]

    def _work(self) -> None:
        # More than one: another thread may have left a turn alone because this one's address was
        # being asked, or because too many strangers were.
        while (turn := self.queue.take()) is not None:
            self._shake_hands(turn)

    def _shake_hands(self, turn: "Turn[A]") -> None:
        value, problem, answered = None, None, True
        try:
            value = self._handshake(turn.engine_id, turn.address)
        except Exception as error:
            problem, answered = error, isinstance(error, RefusedError | VersionError)
        self.queue.done(turn, answered=answered, succeeded=problem is None)
        self._ended.put(Ended(turn.engine_id, turn.attempt, value, problem))
