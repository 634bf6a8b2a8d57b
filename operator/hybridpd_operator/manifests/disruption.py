"""Disruption budgets: how many pods of a role a node drain may take at once."""

from hybridpd_operator import kinds, names
from hybridpd_operator.kinds import Manifest
from hybridpd_operator.manifests.context import Context, child


def budget(context: Context, role: str) -> Manifest:
    """One budget per role, across revisions: a drain counts pods, not revisions."""
    labels = names.role_labels(context.name, role)
    return {
        **child(context, kinds.DISRUPTION_BUDGET, names.per_role(context.name, role), labels),
        "spec": {
            "maxUnavailable": context.role(role).disruption_budget.max_unavailable,
            "selector": {"matchLabels": names.selector_labels(context.name, role)},
        },
    }


def router_budget(context: Context) -> Manifest:
    """Routers hold the clients' connections: one at a time."""
    labels = names.role_labels(context.name, names.ROUTER)
    name = names.per_role(context.name, names.ROUTER)
    return {
        **child(context, kinds.DISRUPTION_BUDGET, name, labels),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": names.selector_labels(context.name, names.ROUTER)},
        },
    }
