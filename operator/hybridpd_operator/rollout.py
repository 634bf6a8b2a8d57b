"""Which revision may run, and what has to go first. Pure: presence in, decision out.

A revision is a pair (prefill and decode StatefulSets with their headless Services) and the router
that feeds it. Engines of two revisions cannot exchange state, so

* a router's selectors always name one revision, and
* with ``Recreate`` nothing of the new revision starts while anything of an old one is left.

The order of an old revision's end follows the requests: its router goes first (it holds the
clients' connections and needs both engines to finish them), then its engines, then the new
revision starts. Each pass decides from what is there, so an operator that was restarted half-way,
or a spec that was edited again meanwhile, continues from the same table.

``STRATEGIES`` is where another strategy plugs in: it may ``start`` the desired revision while it
keeps ``serving`` an old one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from hybridpd_operator import names
from hybridpd_operator.observed import Child, Pod


class Phase(StrEnum):
    """What a pass is doing; the value is the reason shown in the Reconciling condition."""

    STARTED = "Started"
    STOPPING_ROUTER = "StoppingOldRouter"
    STOPPING_ENGINES = "StoppingOldEngines"
    BLOCKED = "Blocked"


@dataclass(frozen=True)
class Presence:
    """What is left of one revision: objects or pods, also those that are terminating."""

    revision: str
    router: bool
    engines: bool


@dataclass(frozen=True)
class Removal:
    """Remove the children of ``roles`` at ``revision``."""

    revision: str
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Decision:
    """What this pass may do.

    ``start``: render and apply the desired revision. ``serving``: the revision the stable Service
    selects. Revisions not named in ``removals`` are left alone.
    """

    phase: Phase
    start: bool
    serving: str
    removals: tuple[Removal, ...] = ()
    message: str = ""


Strategy = Callable[[str, Sequence[Presence]], Decision]


def presence(children: Iterable[Child], pods: Iterable[Pod]) -> tuple[Presence, ...]:
    """Sum up what is left of each revision, ordered by revision."""
    seen: dict[str, set[str]] = {}
    for revision, role in (
        *((child.revision, child.role) for child in children),
        *((pod.revision, pod.role) for pod in pods),
    ):
        if revision:
            seen.setdefault(revision, set()).add(role)
    return tuple(
        Presence(revision, names.ROUTER in roles, not roles.isdisjoint(names.ENGINE_ROLES))
        for revision, roles in sorted(seen.items())
    )


def decide(
    strategy: str, desired: str, present: Sequence[Presence], *, may_start: bool
) -> Decision:
    """Decide one pass. ``may_start`` is False while the pair is known not to work."""
    if not may_start:
        return _blocked(desired, present)
    return STRATEGIES[strategy](desired, present)


def _blocked(desired: str, present: Sequence[Presence]) -> Decision:
    """Start nothing and take nothing away: a pair that serves goes on serving."""
    serving = next((old.revision for old in present if old.router), desired)
    kept = ", ".join(old.revision for old in present)
    message = f"revision {kept} is kept as it is" if kept else "nothing was started"
    return Decision(Phase.BLOCKED, start=False, serving=serving, message=message)


def recreate(desired: str, present: Sequence[Presence]) -> Decision:
    """Old router, old engines, new revision, in this order."""
    old = [one for one in present if one.revision != desired]
    with_router = [one.revision for one in old if one.router]
    if with_router:
        return Decision(
            Phase.STOPPING_ROUTER,
            start=False,
            serving=with_router[0],
            removals=tuple(Removal(revision, (names.ROUTER,)) for revision in with_router),
            message=f"router of revision {', '.join(with_router)} is finishing its requests; "
            f"revision {desired} starts when the old pair is gone",
        )
    with_engines = [one.revision for one in old if one.engines]
    if with_engines:
        return Decision(
            Phase.STOPPING_ENGINES,
            start=False,
            serving=desired,
            removals=tuple(Removal(revision, names.ENGINE_ROLES) for revision in with_engines),
            message=f"engines of revision {', '.join(with_engines)} are stopping; "
            f"revision {desired} starts when they are gone",
        )
    return Decision(Phase.STARTED, start=True, serving=desired)


STRATEGIES: Final[Mapping[str, Strategy]] = {"Recreate": recreate}
