"""Custom resource -> Kubernetes objects. One file per kind of child; pure functions."""

from hybridpd_operator import names
from hybridpd_operator.kinds import Manifest
from hybridpd_operator.manifests import access, disruption, router, services, statefulset
from hybridpd_operator.manifests.context import Context

__all__ = ["Context", "of_revision", "shared"]


def shared(context: Context) -> tuple[Manifest, ...]:
    """What outlives revisions: accounts and rights, the stable Service, disruption budgets."""
    objects = [access.engine_account(context)]
    objects += [disruption.budget(context, role) for role in names.ENGINE_ROLES]
    if context.spec.router.is_rendered:
        objects += access.router_access(context)
        objects += [services.stable(context), disruption.router_budget(context)]
    return tuple(objects)


def of_revision(context: Context) -> tuple[Manifest, ...]:
    """What belongs to one revision: engines, their headless Services and the router."""
    objects: list[Manifest] = []
    for role in names.ENGINE_ROLES:
        objects += [services.headless(context, role), statefulset.engines(context, role)]
    if context.spec.router.is_rendered:
        objects.append(router.deployment(context))
    return tuple(objects)
