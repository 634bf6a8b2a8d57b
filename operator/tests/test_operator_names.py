"""Names fit Kubernetes' limits for every service that is accepted."""

import pytest

from hybridpd_operator import names
from hybridpd_operator.kinds import CHILD_KINDS, DEPLOYMENT, POD, kind_named, kind_of

LONGEST = "s" * names.MAX_SERVICE_NAME
REVISION = "0" * names.REVISION_DIGITS


def test_the_longest_accepted_name_gives_legal_children() -> None:
    assert names.service_name_problem(LONGEST) is None
    for role in names.ENGINE_ROLES:
        name = names.revisioned(LONGEST, role, REVISION)
        assert len(name) <= names.MAX_STATEFULSET_NAME
        assert len(f"{name}-{10**9}") <= 63, "the controller's hash label and pod host names"
    assert len(names.revisioned(LONGEST, names.ROUTER, REVISION)) <= 63


def test_one_character_more_is_a_problem_that_names_the_limit() -> None:
    problem = names.service_name_problem(LONGEST + "s")
    assert problem is not None
    assert str(names.MAX_SERVICE_NAME) in problem
    assert str(names.MAX_SERVICE_NAME + 1) in problem


@pytest.mark.parametrize("name", ["1st", "a.b", "-a", "a-", "A", ""])
def test_names_that_are_no_dns_label_are_problems(name: str) -> None:
    problem = names.service_name_problem(name)
    assert problem is not None
    assert repr(name) in problem


def test_revisions_and_roles_have_different_selectors() -> None:
    one = names.selector_labels("s", names.PREFILL, "a")
    assert one != names.selector_labels("s", names.PREFILL, "b")
    assert one != names.selector_labels("s", names.DECODE, "a")
    assert names.LABEL_REVISION not in names.selector_labels("s", names.PREFILL)
    assert one.items() <= names.role_labels("s", names.PREFILL, "a").items()


def test_selector_text_is_stable() -> None:
    assert names.selector_text({"b": "2", "a": "1"}) == "a=1,b=2"


def test_paths_of_core_and_grouped_kinds() -> None:
    assert POD.path("ns") == "/api/v1/namespaces/ns/pods"
    assert POD.path(None) == "/api/v1/pods"
    assert DEPLOYMENT.path("ns", "a", "scale") == "/apis/apps/v1/namespaces/ns/deployments/a/scale"


def test_kinds_are_found_by_name() -> None:
    for kind in CHILD_KINDS:
        assert kind_named(kind.name) is kind
        assert kind_of({"kind": kind.name}) is kind
    with pytest.raises(KeyError):
        kind_named("Unicorn")
