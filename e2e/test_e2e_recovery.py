"""The operator and the engines die; what comes back is right."""

from __future__ import annotations

from collections.abc import Callable

import release
import waits
from kubectl import Kubectl, Object
from services import Pair
from traffic import Traffic

DEAD = ("--grace-period=0", "--force")


def kill_operator(operator: Kubectl) -> None:
    """Kill the operator's pod and return while it is away."""
    for pod in operator.find("pods", "app.kubernetes.io/component=operator"):
        operator.delete("pod", pod["metadata"]["name"], *DEAD)


def test_an_operator_killed_half_way_through_a_creation_converges(
    kubectl: Kubectl, operator: Kubectl, unscheduled: Callable[..., Object]
) -> None:
    name = "interrupted"
    unscheduled(name)
    kill_operator(operator)
    children = waits.for_children(kubectl, name)
    names = [(child["kind"], child["metadata"]["name"]) for child in children]
    assert len(names) == len(set(names))
    waits.for_condition(kubectl, name, "Compatible", "True")
    waits.for_deployment(operator, release.DEPLOYMENT)


def test_an_operator_killed_half_way_through_a_rollout_converges(
    kubectl: Kubectl, operator: Kubectl, unscheduled: Callable[..., Object]
) -> None:
    name = "half-rolled"
    unscheduled(name)
    old = {child["metadata"]["uid"] for child in waits.for_children(kubectl, name)}
    kubectl.merge("hpd", name, {"spec": {"engine": {"extraArgs": ["--max-num-seqs=4"]}}})
    kill_operator(operator)

    def rolled() -> tuple[bool, list[str]]:
        sets = kubectl.find("statefulsets", waits.selector_of(name))
        fresh = all("--max-num-seqs=4" in str(item["spec"]) for item in sets)
        names = [item["metadata"]["name"] for item in sets]
        return fresh and len(sets) == 2, names

    waits.until(f"{name}: the new pair only", rolled, waits.OPERATOR_SECONDS)
    workloads = [
        child
        for child in waits.for_children(kubectl, name)
        if child["kind"] in ("StatefulSet", "Deployment")
    ]
    assert not old & {child["metadata"]["uid"] for child in workloads}
    waits.for_deployment(operator, release.DEPLOYMENT)


def test_a_killed_operator_disturbs_no_traffic(pair: Pair, operator: Kubectl) -> None:
    before = {p["metadata"]["uid"] for p in pair.kubectl.find("pods", waits.selector_of(pair.name))}
    kill_operator(operator)
    pair.check_tokens()
    waits.for_deployment(operator, release.DEPLOYMENT)
    waits.for_ready(pair.kubectl, pair.name)
    after = {p["metadata"]["uid"] for p in pair.kubectl.find("pods", waits.selector_of(pair.name))}
    assert after == before


def test_a_killed_prefill_recovers_and_no_token_is_wrong(pair: Pair) -> None:
    """While prefill is away a request may fail; it must never be answered with other tokens."""
    chosen = f"{waits.selector_of(pair.name)},hybridpd.dev/role=prefill"
    (victim,) = pair.kubectl.find("pods", chosen)
    name, uid = victim["metadata"]["name"], victim["metadata"]["uid"]
    with pair.forward() as url, Traffic(url, pair.model, pair.expected) as traffic:

        def more_than(count: int) -> tuple[bool, str]:
            done = traffic.answered()
            return done > count, f"{done} answers, last refused: {traffic.refused[-1:]}"

        waits.until("answers before the kill", lambda: more_than(3), 60)
        pair.kubectl.delete("pod", name, *DEAD)
        waits.for_pod_replaced(pair.kubectl, name, uid)
        before = traffic.answered()
        waits.until(
            "answers after the kill", lambda: more_than(before + 3), waits.ENGINE_START_SECONDS
        )
    assert traffic.wrong == []
    assert traffic.refused, "prefill was killed and nothing was ever refused"
    waits.for_ready(pair.kubectl, pair.name)
    pair.check_tokens()
