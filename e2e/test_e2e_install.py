"""helm install, and an operator that holds the chart's rights and no others."""

from __future__ import annotations

import pytest

import release
import waits
from kubectl import Kubectl, KubectlError

ACCOUNT = f"system:serviceaccount:{release.NAMESPACE}:{release.ACCOUNT}"


def may(kubectl: Kubectl, verb: str, resource: str) -> bool:
    """Whether the operator's account may do this in any namespace."""
    resource, _, part = resource.partition("/")
    flags = [f"--as={ACCOUNT}", f"--subresource={part}", "-A"]
    try:
        said = kubectl.run("auth", "can-i", verb, resource, *flags)
    except KubectlError:  # kubectl ends with 1 when the answer is no
        return False
    return said.strip() == "yes"


def test_install_names_the_next_command(admin: Kubectl, operator: Kubectl) -> None:
    notes = release.install(admin)
    assert "kubectl get hpd -A -o wide" in notes
    waits.for_deployment(operator, release.DEPLOYMENT)


def test_an_upgrade_with_the_same_values_restarts_nothing(
    admin: Kubectl, operator: Kubectl
) -> None:
    def pods() -> set[str]:
        return {pod["metadata"]["uid"] for pod in operator.find("pods")}

    before = pods()
    release.install(admin)
    assert pods() == before


def test_the_operator_is_ready_and_did_not_restart(operator: Kubectl) -> None:
    (pod,) = operator.find("pods", "app.kubernetes.io/component=operator")
    (status,) = pod["status"]["containerStatuses"]
    assert status["ready"]
    assert status["restartCount"] == 0


@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("get", "secrets"),
        ("list", "nodes"),
        ("delete", "pods"),
        ("create", "pods"),
        ("create", "pods/exec"),
        ("update", "hybridpdservices.hybridpd.dev"),
        ("patch", "hybridpdservices.hybridpd.dev"),
        ("create", "clusterroles.rbac.authorization.k8s.io"),
        ("escalate", "roles.rbac.authorization.k8s.io"),
        ("patch", "customresourcedefinitions.apiextensions.k8s.io"),
    ],
)
def test_the_operator_may_not(operator: Kubectl, verb: str, resource: str) -> None:
    assert not may(operator, verb, resource)


@pytest.mark.parametrize(
    ("verb", "resource"),
    [("patch", "statefulsets.apps"), ("patch", "hybridpdservices.hybridpd.dev/status")],
)
def test_the_operator_may(operator: Kubectl, verb: str, resource: str) -> None:
    assert may(operator, verb, resource)


def test_the_api_explains_itself(operator: Kubectl) -> None:
    said = operator.run("explain", "hpd.spec.prefill.tensorParallelSize")
    assert "DESCRIPTION" in said
    assert "<integer>" in said
