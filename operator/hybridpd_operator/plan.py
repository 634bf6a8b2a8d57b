"""What a pass wants to be true: objects to hold and children to remove. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hybridpd_operator import drift, manifests, names, rollout
from hybridpd_operator.kinds import CHILD_KINDS, STATEFULSET, Manifest
from hybridpd_operator.manifests import Context
from hybridpd_operator.observed import Child, Observed, Ref
from hybridpd_operator.revision import revision_of
from hybridpd_operator.rollout import Decision, Phase
from hybridpd_operator.settings import Images
from hybridpd_operator.spec import Service

_ORDER = {kind.name: position for position, kind in enumerate(CHILD_KINDS)}


@dataclass(frozen=True)
class Plan:
    """One pass. ``objects`` are stamped and in the order of application."""

    revision: str
    decision: Decision
    objects: tuple[Manifest, ...] = ()
    removals: tuple[Child, ...] = ()


def make_plan(service: Service, observed: Observed, images: Images, *, may_start: bool) -> Plan:
    """Decide one pass over ``service``.

    A blocked service is left as it is, wholly: whatever serves was proven by an earlier spec.
    """
    revision = revision_of(service.spec)
    owned = [
        child for child in observed.children if child.owned_by(observed.uid) or child.left_behind
    ]
    decision = rollout.decide(
        service.spec.rollout.strategy,
        revision,
        rollout.presence(owned, observed.pods),
        may_start=may_start,
    )
    if decision.phase is Phase.BLOCKED:
        return Plan(revision, decision)
    context = _context(service, revision, decision, images, owned)
    objects = render(context, with_revision=decision.start)
    wanted = {Ref(one["kind"], one["metadata"]["name"]) for one in objects}
    removals = tuple(
        child for child in owned if _goes(child, wanted, revision, decision) and not child.deleting
    )
    return Plan(revision, decision, objects, removals)


def render(context: Context, *, with_revision: bool = True) -> tuple[Manifest, ...]:
    """Every child of a service as it is applied, in the order of application."""
    objects = manifests.shared(context)
    if with_revision:
        objects += manifests.of_revision(context)
    ordered = sorted(objects, key=lambda one: _ORDER[one["kind"]])
    return tuple(drift.stamped(one) for one in ordered)


def _goes(child: Child, wanted: set[Ref], revision: str, decision: Decision) -> bool:
    """True for a child that this pass has to remove."""
    if child.ref in wanted:
        return False
    if not child.revision:
        return True
    if child.revision == revision:
        return decision.start
    return any(
        child.revision == removal.revision and child.role in removal.roles
        for removal in decision.removals
    )


def _context(
    service: Service,
    revision: str,
    decision: Decision,
    images: Images,
    children: Iterable[Child],
) -> Context:
    """A revision keeps what it began with: the images that the spec leaves to the operator, and
    no setting that its connector image does not know."""
    for child in children:
        if child.ref.kind == STATEFULSET.name and child.revision == revision:
            began_with = child.annotations
            pinned = replace(
                images,
                engine=began_with.get(names.ANNOTATION_ENGINE_IMAGE, images.engine),
                connector=began_with.get(names.ANNOTATION_CONNECTOR_IMAGE, images.connector),
            )
            tells_peers = names.ANNOTATION_PREFILL_PEERS in began_with
            return Context(service, revision, decision.serving, pinned, tells_peers)
    return Context(service, revision, decision.serving, images)
