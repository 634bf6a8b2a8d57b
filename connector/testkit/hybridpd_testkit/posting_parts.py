"""Where the time of posting goes: the parts of the call in which the shipped connector posts reads.

The shipped code has no hooks for this. For the length of one call, methods of its objects are
wrapped by ones that take the time, and locks by ones that take how long they are waited for; then
everything is as it was. Other threads that come through a wrapper meanwhile are not measured.

A part's time is its own: without the parts that it calls, so that all parts add up to the call,
together with what no part has (``REST``). Beside the time passed stands the thread's own CPU time:
where that is much smaller, the thread has waited, for a lock, for the interpreter or for a core.

A method that does not exist (any more) is left out and named by ``missing``.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

ALL = "all of it"
REST = "the rest: steps between the parts"
LOCK = "(lock)"

Parts = Mapping[str, tuple[float, float]]
"""Part -> (seconds, CPU seconds of this thread), of one call. ``ALL`` holds the whole call."""


class Place(NamedTuple):
    """``owner``: attributes from the worker's half on, or a module's (and a class's) name after
    "@". ``name``: the method, or ``LOCK`` when the owner itself is a lock."""

    part: str
    owner: str
    name: str


PLACES = (
    Place("orders taken", "", "absorb"),
    Place("waiting for the reader's lock", "_consumer._lock", LOCK),
    Place("what handshakes brought", "_consumer", "_collect"),
    Place("peer looked up", "_consumer._peers", "want"),
    Place("seal checked", "@hybridpd_connector.consumer", "is_sealed"),
    Place("ranges made", "@hybridpd_connector.request_ranges:RequestRanges", "of"),
    Place("load noted", "_consumer._transfers", "submit"),
    Place("agent's own code", "_agent", "post_ranges"),
    Place("waiting for the agent's lock", "_agent._lock", LOCK),
    Place("NIXL: descriptors", "_agent._nixl", "get_xfer_descs"),
    Place("NIXL: initialize_xfer", "_agent._nixl", "initialize_xfer"),
    Place("NIXL: transfer", "_agent._nixl", "transfer"),
    Place("statistics", "_consumer._stats", "observe"),
    Place("tails found", "_consumer._tail_zeros", "of"),
    Place("tails zeroed", "_consumer._local", "zero"),
    Place("left prefills dropped", "_consumer._wants", "drop_left"),
)
_NOTHING = object()


class _Watch:
    """The parts of one call, on one thread."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {}
        self._thread = threading.get_ident()
        # What the parts have taken that the part now running has called: seconds, CPU seconds.
        self._inside = [0.0, 0.0]

    def run(self, part: str, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``work``, as a part where it is this thread's."""
        if threading.get_ident() != self._thread:
            return work(*args, **kwargs)
        outside, self._inside = self._inside, [0.0, 0.0]
        cpu, begun = time.thread_time(), time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            seconds, spent = time.perf_counter() - begun, time.thread_time() - cpu
            own = self.parts.setdefault(part, [0.0, 0.0])
            own[0] += seconds - self._inside[0]
            own[1] += spent - self._inside[1]
            self._inside = [outside[0] + seconds, outside[1] + spent]


class _TimedLock:
    """A lock, with the time it is waited for."""

    def __init__(self, watch: _Watch, part: str, lock: Any) -> None:
        self._watch, self._part, self._lock = watch, part, lock

    def __enter__(self) -> bool:
        return bool(self._watch.run(self._part, self._lock.__enter__))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.__exit__(kind, error, trace)


class PostingParts:
    """Measures calls of one worker's half. See the module."""

    def __init__(self, worker: Any, places: Sequence[Place] = PLACES) -> None:
        self._spots: list[tuple[str, Any, str, bool]] = []
        self.missing: list[str] = []
        for place in places:
            try:
                self._spots.append(_spot(worker, place))
            except (AttributeError, ImportError):
                self.missing.append(place.part)

    def measure(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Parts:
        """Make the call; its parts."""
        watch = _Watch()
        with contextlib.ExitStack() as undo:
            for part, owner, name, is_lock in self._spots:
                undo.enter_context(_wrapped(watch, part, owner, name, is_lock))
            watch.run(ALL, call, *args, **kwargs)
        own = watch.parts.pop(ALL)
        found = {part: (seconds, cpu) for part, (seconds, cpu) in watch.parts.items()}
        columns = zip(*found.values(), own, strict=True)
        seconds, cpu = (sum(column) for column in columns)
        return {**found, REST: (own[0], own[1]), ALL: (seconds, cpu)}


def _spot(worker: Any, place: Place) -> tuple[str, Any, str, bool]:
    if place.owner.startswith("@"):
        module, _, name = place.owner[1:].partition(":")
        owner: Any = importlib.import_module(module)
        path = [name] if name else []
    else:
        owner, path = worker, [name for name in place.owner.split(".") if name]
    is_lock = place.name == LOCK
    name = path.pop() if is_lock else place.name
    for step in path:
        owner = getattr(owner, step)
    getattr(owner, name)
    return place.part, owner, name, is_lock


@contextlib.contextmanager
def _wrapped(watch: _Watch, part: str, owner: Any, name: str, is_lock: bool) -> Iterator[None]:
    """The attribute is another one inside the block. Frozen objects are wrapped too."""
    plain = isinstance(owner, type | ModuleType)
    put = setattr if plain else object.__setattr__
    before, inner = vars(owner).get(name, _NOTHING), getattr(owner, name)
    if is_lock:
        put(owner, name, _TimedLock(watch, part, inner))
    elif isinstance(owner, type):
        # A plain function again, so that it is bound to whatever object it is called on.
        put(owner, name, lambda *args, **kwargs: watch.run(part, inner, *args, **kwargs))
    else:

        def timed(*args: Any, **kwargs: Any) -> Any:
            return watch.run(part, inner, *args, **kwargs)

        put(owner, name, timed)
    try:
        yield
    finally:
        if before is _NOTHING:
            object.__delattr__(owner, name)
        else:
            put(owner, name, before)


def cost_of_a_part(rounds: int = 50, parts: int = 40) -> float:
    """Seconds that taking the time adds for each part, here and now: median of some rounds."""
    watch, seconds = _Watch(), []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(parts):
            watch.run("nothing", int)
        seconds.append((time.perf_counter() - begun) / parts)
    return statistics.median(seconds)


def parts_table(calls: Sequence[Parts]) -> list[str]:
    """A line for each part, the dearest first: milliseconds, CPU milliseconds, calls that have it.

    A call without a part counts as 0 for it.
    """
    names = {name for parts in calls for name in parts}
    rows = []
    for name in names:
        seconds = sorted(parts.get(name, (0.0, 0.0))[0] for parts in calls)
        cpu = statistics.median(parts.get(name, (0.0, 0.0))[1] for parts in calls)
        p99 = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
        seen = sum(name in parts for parts in calls)
        rows.append((statistics.median(seconds), name, p99, cpu, seen))
    lines = [f"  {'part of posting':<42}{'p50 ms':>9}{'p99 ms':>9}{'CPU p50':>9}{'seen':>6}"]
    rows.sort(key=lambda row: (row[1] == ALL, -row[0]))
    return lines + [
        f"  {name:<42}{1e3 * p50:>9.3f}{1e3 * p99:>9.3f}{1e3 * cpu:>9.3f}{seen:>6}"
        for p50, name, p99, cpu, seen in rows
    ]
