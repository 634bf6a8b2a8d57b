"""Does this engine get on? Leases of one that does not are renewed no longer.

A thread renews what the requests of D want, whatever the engine does, and a step may take long. But
who never goes on must not hold another engine's blocks without end:

- an engine that takes no step: it hangs, or was paused while requests queue in it. P's own pause
  waits for the blocks it holds, and whoever pauses both waits for P.
- an engine of both roles that holds prefills for others, begins no load and ends no request: its
  queue waits for blocks that others hold, and their queues may wait for the blocks it holds.

No clock in here. The engine's thread tells, the ticker's thread asks: both see single numbers.
"""


class Progress:
    """When the engine last got on. ``patience_seconds``: how long it may do nothing."""

    def __init__(self, patience_seconds: float, now: float) -> None:
        self._patience_seconds = patience_seconds
        self._stepped_at = self._moved_at = now

    def stepped(self, now: float, *, moved: bool) -> None:
        """The engine takes a step, or ends one. ``moved``: it has begun a load, or has ended a
        request, be it a prefill for somebody else."""
        self._stepped_at = now
        if moved:
            self._moved_at = now

    def stall(self, now: float, *, holding: bool) -> str:
        """Why nothing is to be renewed, "" while the engine gets on. ``holding``: it holds prefills
        that others are to read."""
        silent, idle = now - self._stepped_at, now - self._moved_at
        if silent >= self._patience_seconds:
            return f"this engine has taken no step for {silent:.0f} s"
        if holding and idle >= self._patience_seconds:
            return f"this engine holds prefills, and has begun or ended nothing for {idle:.0f} s"
        return ""
