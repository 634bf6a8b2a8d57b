"""Cluster, release and services for the end-to-end tests.

One real prefill/decode pair serves every test that needs tokens: two engines are all that two cores
bear. Tests about objects use services whose pods fit no node, which cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

import completions
import diagnostics
import nodefiles
import reference
import release
import waits
from kubectl import Kubectl, Object, connect
from services import Pair, example, guarded, key_secret, nowhere

NAMESPACE = "hybridpd-e2e"
# Cheap tests first; the deletion of the real pair last.
ORDER = (
    "test_e2e_binaries.py",
    "test_e2e_cluster.py",
    "test_e2e_demo.py",
    "test_e2e_chart.py",
    "test_e2e_crd.py",
    "test_e2e_examples.py",
    "test_e2e_install.py",
    "test_e2e_rejection.py",
    "test_e2e_replicas.py",
    "test_e2e_lifecycle.py",
    "test_e2e_steady.py",
    "test_e2e_recovery.py",
    "test_e2e_rollout.py",
    "test_e2e_deletion.py",
    "test_e2e_uninstall.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    position = {name: number for number, name in enumerate(ORDER)}
    items.sort(key=lambda item: position.get(item.path.name, len(ORDER)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    kubectl = getattr(item, "funcargs", {}).get("kubectl")
    if report.failed and isinstance(kubectl, Kubectl):
        report.sections.append(("cluster", diagnostics.report(kubectl)))
    return report


@pytest.fixture(scope="session")
def admin() -> Kubectl:
    """The cluster, as its administrator, in no particular namespace."""
    return connect()


@pytest.fixture(scope="session")
def operator(admin: Kubectl) -> Kubectl:
    """The namespace of the operator, installed by the chart and running with its rights only."""
    release.install(admin)
    system = admin.within(release.NAMESPACE)
    waits.for_deployment(system, release.DEPLOYMENT)
    return system


@pytest.fixture(scope="session")
def kubectl(admin: Kubectl, operator: Kubectl) -> Iterator[Kubectl]:
    """A namespace of the tests' own, empty at first and removed at the end."""
    bound = admin.make_namespace(NAMESPACE)
    for service in bound.find("hpd"):
        bound.delete("hpd", service["metadata"]["name"])
        waits.for_nothing_left(bound, service["metadata"]["name"])
    yield bound
    admin.run("delete", "namespace", NAMESPACE, "--ignore-not-found", seconds=180)


@pytest.fixture
def unscheduled(kubectl: Kubectl) -> Iterator[Callable[..., Object]]:
    """Creates services that start no engine, and removes them afterwards."""
    made: list[str] = []

    def make(name: str, **changes: Any) -> Object:
        made.append(name)
        service = nowhere(name, **changes)
        kubectl.apply(service)
        return service

    yield make
    for name in made:
        kubectl.delete("hpd", name)
    for name in made:
        waits.for_nothing_left(kubectl, name)


@pytest.fixture(scope="session")
def expected(kubectl: Kubectl) -> dict[str, completions.Answer]:
    """A single engine's answers, asked before the pair starts: three engines are too many here."""
    nodefiles.prepare()
    return reference.answers(kubectl, example(), completions.prompts())


@pytest.fixture(scope="session")
def started(kubectl: Kubectl, expected: dict[str, completions.Answer]) -> Pair:
    """The example of the documentation, with a key for its side channel."""
    kubectl.apply(key_secret())
    service = guarded()
    kubectl.apply(service)
    return Pair(
        kubectl, service["metadata"]["name"], service["spec"]["model"]["servedName"], expected
    )


@pytest.fixture
def pair(started: Pair) -> Pair:
    """The real pair, Ready and as the example says, whatever the test before did to it."""
    started.kubectl.apply(guarded())
    waits.for_ready(started.kubectl, started.name)
    return started
