"""A transfer agent belongs to the process that made it, and outlives copies of that process.

A forked child shares the agent's sockets and event sets with its parent. Where a child destroys its
copy, because nothing holds it there any more, UCX takes the connections down: the parent's too. It
then hears nobody, for good: reads of its memory stay in flight, and no message arrives. So in a
child nothing of an agent is ever destroyed; the child's end frees it.
"""

import ctypes
import os
import weakref
from typing import Any

_agents: "weakref.WeakSet[Any]" = weakref.WeakSet()


def outlive_forks(agent: Any) -> None:
    """From now on no child of this process destroys ``agent``, the transfer library's own."""
    _agents.add(agent)


def _keep() -> None:
    for agent in [*_agents]:
        # One use that nobody ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent))


os.register_at_fork(after_in_child=_keep)
