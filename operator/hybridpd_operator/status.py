"""Status of a service: conditions, counts, numbers. Pure; the time is an argument.

Conditions follow kstatus: ``Ready`` tells people, ``Reconciling`` and ``Stalled`` tell tools.
``lastTransitionTime`` moves only when ``status`` does, and lists keep one order, so that an
unchanged world gives an equal status and no write.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hybridpd_operator import names
from hybridpd_operator.assessment import Assessment
from hybridpd_operator.cluster_api import ClusterError
from hybridpd_operator.kinds import Manifest
from hybridpd_operator.observed import Observed, Pod, Ref
from hybridpd_operator.plan import Plan
from hybridpd_operator.problems import COMPATIBLE, NO_FACTS, Problem
from hybridpd_operator.rollout import Phase
from hybridpd_operator.verify import Transfer, Verified

TYPES: Final = (
    "Ready",
    "Accepted",
    "Compatible",
    "PrefillReady",
    "DecodeReady",
    "RouterReady",
    "KVTransferVerified",
    "Reconciling",
    "Stalled",
)
_ROLE_CONDITIONS: Final = {
    names.PREFILL: "PrefillReady",
    names.DECODE: "DecodeReady",
    names.ROUTER: "RouterReady",
}
SCALED_TO_ZERO: Final = "ScaledToZero"
#: Reason of ``Reconciling`` while the API server answers a write with an error of its own.
RETRYING: Final = "Retrying"
#: Reason of ``Reconciling`` while something that is being deleted has a child's name.
WAITING: Final = "WaitingForDeletion"
_SHOWN_PROBLEMS: Final = 16
_MOST_PROBLEMS: Final = 64
_MESSAGE_CHARACTERS: Final = 4096


@dataclass(frozen=True)
class Stall:
    """Why no later pass will get further without a change from outside."""

    reason: str
    message: str


@dataclass(frozen=True)
class Pass:
    """Everything a pass found out. ``plan`` is None when the resource could not be read.

    ``failure`` is the answer that ended the writes early; they are tried again. Pods whose grace
    ended before ``overdue_since`` will not go by themselves. ``waiting`` are names that objects on
    their way out still hold.
    """

    observed: Observed
    assessment: Assessment
    plan: Plan | None
    verified: Verified | None
    stall: Stall | None
    now: str
    failure: ClusterError | None = None
    overdue_since: str = ""
    waiting: tuple[Ref, ...] = ()


@dataclass(frozen=True)
class RoleCount:
    """Pods of one role at the shown revision. ``desired`` None: the role is not rendered."""

    desired: int | None
    existing: int
    ready: int
    trouble: str = ""

    @property
    def is_ready(self) -> bool:
        """All wanted pods answer, and some are wanted."""
        return self.desired is None or (self.desired > 0 and self.ready >= self.desired)

    def to_status(self) -> Manifest:
        """As ``status.prefill`` and its siblings."""
        desired = self.desired or 0
        counts: Manifest = {
            "replicas": self.existing,
            "readyReplicas": self.ready,
            "desiredReplicas": desired,
            "ready": f"{self.ready}/{desired}",
        }
        return {**counts, "message": self.trouble} if self.trouble else counts


@dataclass(frozen=True)
class _Condition:
    status: str
    reason: str
    message: str


def shown_revision(observed: Observed, plan: Plan | None) -> str:
    """The revision that counts and numbers are about: the one that runs, or that was started."""
    if plan is not None and plan.decision.start:
        return plan.revision
    return str(observed.status.get("revision", ""))


def build(one: Pass) -> Manifest:
    """The whole status after a pass."""
    observed, service = one.observed, one.assessment.service
    revision = shown_revision(observed, one.plan)
    counts = _counts(one, revision)
    status: Manifest = {
        "observedGeneration": observed.resource["metadata"].get("generation", 0),
        "conditions": _with_times(one, _conditions(one, counts)),
    }
    if revision:
        status["revision"] = revision
        status["selector"] = names.selector_text(
            {names.LABEL_SERVICE: observed.name, names.LABEL_REVISION: revision}
        )
    if service is not None:
        if service.spec.router.is_rendered:
            host = f"{names.router_service(service.name)}.{service.namespace}.svc"
            status["endpoint"] = f"http://{host}:{names.HTTP_PORT}"
        for role, count in counts.items():
            if count.desired is not None:
                status[role] = count.to_status()
    if one.assessment.geometry:
        status["geometry"] = dict(one.assessment.geometry)
    if one.assessment.problems:
        status["problems"] = [
            {"reason": problem.reason, "field": problem.field, "message": problem.message}
            for problem in one.assessment.problems[:_MOST_PROBLEMS]
        ]
    if one.verified and one.verified.transfer != Transfer():
        status["transfer"] = one.verified.transfer.to_status()
    return status


def condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    """One condition of a status, or None."""
    for one in status.get("conditions") or ():
        if one.get("type") == kind:
            found: Mapping[str, Any] = one
            return found
    return None


def _counts(one: Pass, revision: str) -> dict[str, RoleCount]:
    service = one.assessment.service
    if service is None:
        return {}
    spec = service.spec
    wanted: dict[str, int | None] = {
        names.PREFILL: spec.prefill.replicas,
        names.DECODE: spec.decode.replicas,
        names.ROUTER: spec.router.replicas if spec.router.is_rendered else None,
    }
    return {
        role: _count(desired, _pods(one.observed, role, revision), one.overdue_since)
        for role, desired in wanted.items()
    }


def _pods(observed: Observed, role: str, revision: str) -> list[Pod]:
    return [pod for pod in observed.pods if pod.role == role and pod.revision == revision]


def _count(desired: int | None, pods: list[Pod], overdue_since: str) -> RoleCount:
    staying = [pod for pod in pods if not pod.deleting]
    # A StatefulSet makes no other pod of a name before the old one is gone.
    stuck = [
        (pod.name, f"StuckTerminating: it should have ended by {pod.gone_by}")
        for pod in pods
        if pod.is_overdue(overdue_since)
    ]
    troubled = sorted([*((pod.name, pod.trouble) for pod in staying if pod.trouble), *stuck])
    trouble = f"{troubled[0][0]}: {troubled[0][1]}" if troubled else ""
    return RoleCount(desired, len(staying), sum(pod.ready for pod in staying), trouble)


def _conditions(one: Pass, counts: Mapping[str, RoleCount]) -> dict[str, _Condition]:
    found = {
        "Accepted": _accepted(one.assessment),
        "Compatible": _compatible(one.assessment),
        **{_ROLE_CONDITIONS[role]: _role(one, role, count) for role, count in counts.items()},
        "KVTransferVerified": _verified(one.verified),
        "Stalled": _stalled(one),
    }
    found["Reconciling"] = _reconciling(one, found)
    found["Ready"] = _ready(one, found)
    return found


def _accepted(assessment: Assessment) -> _Condition:
    if assessment.accepted:
        return _Condition("True", "Valid", "the resource is in order" + _hint(assessment))
    problems = assessment.spec_problems
    return _Condition("False", problems[0].reason, _text(problems))


def _hint(assessment: Assessment) -> str:
    """What is allowed and yet worth a word."""
    service = assessment.service
    if service is None or service.spec.connector.side_channel_key_secret is not None:
        return ""
    return (
        "; the side channel has no key: set spec.connector.sideChannelKeySecret, "
        "or let only the pods of this service reach its port"
    )


def _compatible(assessment: Assessment) -> _Condition:
    if assessment.model_problems:
        problems = assessment.model_problems
        return _Condition("False", problems[0].reason, _text(problems))
    if not assessment.accepted:
        return _Condition("Unknown", "NotChecked", "the resource is not accepted")
    if not assessment.has_facts:
        return _Condition("Unknown", NO_FACTS, assessment.why_unknown)
    return _Condition("True", COMPATIBLE, "prefill and decode can exchange their caches")


def _role(one: Pass, role: str, count: RoleCount) -> _Condition:
    if count.desired is None:
        return _Condition("True", "NotRendered", "spec.router.kind is None")
    message = f"{count.ready} of {count.desired} ready"
    phase = one.plan.decision.phase if one.plan else Phase.BLOCKED
    if phase in (Phase.STOPPING_ROUTER, Phase.STOPPING_ENGINES):
        return _Condition("False", str(phase), message)
    if count.is_ready:
        return _Condition("True", "AllReady", message)
    if count.desired == 0:
        return _Condition("False", SCALED_TO_ZERO, f"spec.{role}.replicas is 0")
    service = one.assessment.service
    if role == names.ROUTER and service and not service.spec.decode.replicas:
        # It turns ready with the engines it finds.
        return _Condition("False", SCALED_TO_ZERO, f"{message}; there are no engines")
    if count.trouble:
        word = count.trouble.partition(": ")[2].split()[0].strip(":")
        return _Condition("False", word, f"{message}; {count.trouble}")
    if phase is Phase.BLOCKED and not count.existing:
        return _Condition("False", "NotStarted", message)
    return _Condition("False", "Starting", message)


def _verified(verified: Verified | None) -> _Condition:
    if verified is None:
        return _Condition("Unknown", "NotChecked", "nothing was started")
    return _Condition(verified.status, verified.reason, verified.message)


def _stalled(one: Pass) -> _Condition:
    if one.assessment.problems:
        problems = one.assessment.problems
        kept = f"; {one.plan.decision.message}" if one.plan else ""
        return _Condition("True", problems[0].reason, _text(problems) + kept)
    if one.stall:
        return _Condition("True", one.stall.reason, one.stall.message[:_MESSAGE_CHARACTERS])
    return _Condition("False", "NotStalled", "no problem that only a change from outside can solve")


def _reconciling(one: Pass, found: Mapping[str, _Condition]) -> _Condition:
    if found["Stalled"].status == "True" or one.plan is None:
        return _Condition("False", "Stalled", "nothing more is tried until something changes")
    if one.failure:
        return _Condition("True", RETRYING, _failed(one, one.failure))
    if one.waiting:
        held = ", ".join(f"{ref.kind} {ref.name}" for ref in one.waiting)
        return _Condition("True", WAITING, f"{held} of before: made anew when the old one is gone")
    decision = one.plan.decision
    if decision.phase is not Phase.STARTED:
        return _Condition("True", str(decision.phase), decision.message)
    for kind in _ROLE_CONDITIONS.values():
        if found[kind].status != "True" and found[kind].reason != SCALED_TO_ZERO:
            message = f"revision {one.plan.revision} is starting: {kind} is not True"
            return _Condition("True", "Starting", message)
    return _Condition("False", "Settled", f"revision {one.plan.revision} is as wanted")


def _failed(one: Pass, failure: ClusterError) -> str:
    """What is tried again. The first answer stays: answers that all differ would never settle."""
    start = f"{failure.what} failed and is tried again: "
    before = condition(one.observed.status, "Reconciling") or {}
    told = str(before.get("message", ""))
    if before.get("reason") == RETRYING and told.startswith(start):
        return told
    return f"{start}HTTP {failure.status}: {failure.message}"[:_MESSAGE_CHARACTERS]


def _ready(one: Pass, found: Mapping[str, _Condition]) -> _Condition:
    if found["Stalled"].status == "True":
        return _Condition("False", found["Stalled"].reason, found["Stalled"].message)
    if one.plan and one.plan.decision.phase is not Phase.STARTED:
        return _Condition("False", found["Reconciling"].reason, found["Reconciling"].message)
    for kind in _ROLE_CONDITIONS.values():
        if found[kind].status != "True":
            return _Condition("False", found[kind].reason, f"{kind}: {found[kind].message}")
    return _Condition("True", "Ready", "prefill, decode and router answer")


def _text(problems: tuple[Problem, ...]) -> str:
    """All problems in one message, bounded."""
    text = "; ".join(str(problem) for problem in problems[:_SHOWN_PROBLEMS])
    more = len(problems) - _SHOWN_PROBLEMS
    return (text + (f"; and {more} more" if more > 0 else ""))[:_MESSAGE_CHARACTERS]


def _with_times(one: Pass, found: Mapping[str, _Condition]) -> list[Manifest]:
    """Conditions in their fixed order; a time is kept while the status stays."""
    generation = one.observed.resource["metadata"].get("generation", 0)
    conditions: list[Manifest] = []
    for kind in TYPES:
        if kind not in found:
            continue
        before = condition(one.observed.status, kind)
        same = before is not None and before["status"] == found[kind].status
        conditions.append(
            {
                "type": kind,
                "status": found[kind].status,
                "reason": found[kind].reason,
                "message": found[kind].message,
                "lastTransitionTime": before["lastTransitionTime"] if before and same else one.now,
                "observedGeneration": generation,
            }
        )
    return conditions
