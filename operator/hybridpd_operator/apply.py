"""Makes the cluster hold what a plan wants: the last of gather, decide, act.

Writes only where something differs. Objects of others are never taken over by force of a name.
"""

import logging
from dataclasses import dataclass
from typing import Final

from hybridpd_operator import drift, names
from hybridpd_operator.cluster_api import (
    Cluster,
    ClusterError,
    ConflictError,
    NotFoundError,
    RefusedError,
)
from hybridpd_operator.kinds import Manifest, kind_named, kind_of
from hybridpd_operator.metrics import Metrics
from hybridpd_operator.observed import Child, Observed, Ref, child_from, controller_uid
from hybridpd_operator.plan import Plan

_log: Final = logging.getLogger(__name__)

NAME_CONFLICT: Final = "NameConflict"
APPLY_REFUSED: Final = "ApplyRefused"
DELETE_REFUSED: Final = "DeleteRefused"


@dataclass(frozen=True)
class Trouble:
    """A child that could not be made so; no retry helps until somebody changes something."""

    reason: str
    message: str


@dataclass(frozen=True)
class Outcome:
    """What a pass wrote. ``waiting``: names that are held by objects on their way out.

    ``failure`` ended the pass's writes early: the next one goes on from there.
    """

    applied: tuple[Ref, ...] = ()
    removed: tuple[Ref, ...] = ()
    waiting: tuple[Ref, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    failure: ClusterError | None = None


def act(cluster: Cluster, plan: Plan, observed: Observed, metrics: Metrics) -> Outcome:
    """Remove, then apply. Raises ClusterError where the server did not answer or was ahead of us.

    A server that answers with an error (a webhook is down) is an outcome: it has to be told.
    """
    applied: list[Ref] = []
    waiting: list[Ref] = []
    troubles: list[Trouble] = []
    removed: list[Ref] = []
    try:
        for child in plan.removals:
            _remove(cluster, child, observed.namespace, metrics)
            removed.append(child.ref)
    except RefusedError as error:
        troubles.append(Trouble(DELETE_REFUSED, f"{error.what}: {error.message}"))
    except ClusterError as error:
        return Outcome(removed=tuple(removed), failure=_told(error))
    failure: ClusterError | None = None
    for manifest in plan.objects:
        ref = Ref(manifest["kind"], manifest["metadata"]["name"])
        live = observed.child(ref) or _unlabelled(cluster, manifest)
        verdict = _claim(live, observed)
        if verdict is _WAIT:
            waiting.append(ref)
        elif isinstance(verdict, Trouble):
            troubles.append(verdict)
        elif why := _needs_apply(manifest, live, metrics):
            _log.info("applying %s %s: %s", ref.kind, ref.name, why)
            try:
                cluster.apply(manifest)
            except RefusedError as error:
                text = f"{ref.kind} {ref.name}: {error.message}"
                troubles.append(Trouble(APPLY_REFUSED, text))
                continue
            except ClusterError as error:
                failure = _told(error)
                break
            metrics.add("hybridpd_operator_writes_total", verb="apply", kind=ref.kind)
            applied.append(ref)
    return Outcome(tuple(applied), tuple(removed), tuple(waiting), tuple(troubles), failure)


def _remove(cluster: Cluster, child: Child, namespace: str, metrics: Metrics) -> None:
    _log.info("removing %s %s", child.ref.kind, child.ref.name)
    cluster.delete(kind_named(child.ref.kind), namespace, child.ref.name, child.uid)
    metrics.add("hybridpd_operator_writes_total", verb="delete", kind=child.ref.kind)


def _told(error: ClusterError) -> ClusterError:
    """``error`` when the status can tell it; raised when no status could be written now either."""
    if isinstance(error, ConflictError | NotFoundError) or not error.status:
        raise error
    return error


_WAIT: Final = object()


def _unlabelled(cluster: Cluster, manifest: Manifest) -> Child | None:
    """Look a name up that our labels did not show: free, foreign, or ours with its labels lost."""
    metadata = manifest["metadata"]
    try:
        live = cluster.get(kind_of(manifest), metadata["namespace"], metadata["name"])
    except NotFoundError:
        return None
    return child_from(live)


def _claim(child: Child | None, observed: Observed) -> object:
    """None: the name is free or ours. Otherwise wait for it, or say whose it is."""
    if child is None:
        return None
    owner = controller_uid(child.manifest)
    if child.deleting or _is_predecessors(child, observed, owner):
        return _WAIT
    if owner == observed.uid:
        return None
    ours = child.labels.get(names.LABEL_SERVICE) == observed.name
    if owner is None and ours and child.labels.get(names.LABEL_MANAGED_BY) == names.MANAGED_BY:
        # Left behind when a service of this name was deleted without its children.
        return None
    return Trouble(
        NAME_CONFLICT,
        f"{child.ref.kind} {child.ref.name} exists and belongs to somebody else; "
        "rename it or this service",
    )


def _is_predecessors(child: Child, observed: Observed, owner: str | None) -> bool:
    """True when an earlier service of the same name owns it: the garbage collector is coming."""
    if owner is None or owner == observed.uid:
        return False
    return any(
        one.get("kind") == names.KIND and one.get("name") == observed.name
        for one in child.manifest["metadata"].get("ownerReferences") or ()
    )


def _needs_apply(manifest: Manifest, child: Child | None, metrics: Metrics) -> str | None:
    if child is None:
        return "it does not exist"
    why = drift.difference(manifest, child.manifest)
    if why and why != drift.NEW:
        metrics.add("hybridpd_operator_reverts_total")
    return why
