"""The release goes, what it must leave stays, and a namespaced one takes its place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import release
import waits
from kubectl import Kubectl
from services import nowhere

WATCHED = "hybridpd-e2e-watched"
OTHER = "hybridpd-e2e-other"
NAME = "scoped"


@pytest.fixture(scope="module")
def namespaced(admin: Kubectl, operator: Kubectl) -> Iterator[Kubectl]:
    """The cluster-wide release replaced by one that watches a single namespace through a Role."""
    watched = admin.make_namespace(WATCHED)
    admin.make_namespace(OTHER)
    release.uninstall(admin)
    release.install(admin, "--set=crds.enabled=false", f"--set=watchNamespaces={{{WATCHED}}}")
    waits.for_deployment(operator, release.DEPLOYMENT)
    yield watched
    release.uninstall(admin)
    for namespace in (WATCHED, OTHER):
        admin.run("delete", "namespace", namespace, seconds=180)


def test_uninstalling_keeps_the_definition_and_every_service(
    admin: Kubectl, namespaced: Kubectl
) -> None:
    definition = admin.get("crd", "hybridpdservices.hybridpd.dev")
    assert definition is not None
    assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert admin.get("clusterrole", release.DEPLOYMENT) is None
    assert admin.get("clusterrolebinding", release.DEPLOYMENT) is None


def test_a_namespaced_operator_needs_only_its_role(namespaced: Kubectl, admin: Kubectl) -> None:
    elsewhere = admin.within(OTHER)
    for place in (elsewhere, namespaced):
        place.apply(nowhere(NAME))
    waits.for_condition(namespaced, NAME, "Compatible", "True")
    waits.for_children(namespaced, NAME)
    assert elsewhere.find(waits.CHILD_KINDS, waits.selector_of(NAME)) == []
    untouched = elsewhere.get("hpd", NAME)
    assert untouched is not None
    assert "status" not in untouched
    (pod,) = admin.within(release.NAMESPACE).find("pods", "app.kubernetes.io/component=operator")
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
