"""Pods that hold up a replacement and will not go by themselves. Pure; the time is an argument.

With ``Recreate`` nothing starts beside a pod of an old revision, also not beside one that a dead
node, a finalizer or an orphaning delete keeps for ever. Only a person can end that wait, so the
pods are named.
"""

from collections.abc import Iterator
from typing import Final

from hybridpd_operator.observed import Observed, Pod
from hybridpd_operator.plan import Plan
from hybridpd_operator.rollout import Phase
from hybridpd_operator.status import Stall

STUCK_PODS: Final = "PodsOfOldRevisionStuck"
_NAMED: Final = 5
_STOPPING: Final = (Phase.STOPPING_ROUTER, Phase.STOPPING_ENGINES)


def stall(observed: Observed, plan: Plan | None, overdue_since: str) -> Stall | None:
    """Which pods of old revisions keep ``plan`` from going on, and what to do; None: it goes on."""
    if plan is None or plan.decision.phase not in _STOPPING:
        return None
    old = [pod for pod in observed.pods if pod.revision and pod.revision != plan.revision]
    told = list(_told(old, overdue_since))
    if not told:
        return None
    more = f" and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
    return Stall(
        STUCK_PODS,
        f"revision {plan.revision} waits for {'; '.join(told[:_NAMED])}{more}",
    )


def _told(pods: list[Pod], overdue_since: str) -> Iterator[str]:
    for pod in sorted(pods, key=lambda one: one.name):
        if pod.is_overdue(overdue_since):
            yield (
                f"pod {pod.name}, which should have ended by {pod.gone_by}: see to its node and "
                "finalizers, or delete it by force"
            )
        elif not pod.deleting and not pod.has_owner:
            yield f"pod {pod.name}, which nothing owns: delete it"
