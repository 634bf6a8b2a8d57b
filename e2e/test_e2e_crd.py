"""Every rule of the definition, broken alone, is refused by the API server in its own words."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

import release
from kubectl import Kubectl, KubectlError

VIOLATIONS = yaml.safe_load(
    (release.ROOT / "operator" / "tests" / "crd_violations.yaml").read_text()
)
MODEL = {"id": "org/model"}


def resource(spec: dict[str, Any], metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "apiVersion": "hybridpd.dev/v1alpha1",
        "kind": "HybridPDService",
        "metadata": metadata or {"name": "violation"},
        "spec": spec,
    }


@pytest.mark.parametrize("case", VIOLATIONS, ids=[case["name"] for case in VIOLATIONS])
def test_a_violation_is_refused_with_its_message(kubectl: Kubectl, case: dict[str, Any]) -> None:
    document = resource(case["spec"], case.get("metadata"))
    with pytest.raises(KubectlError) as caught:
        kubectl.create(document, "--dry-run=server")
    said = " ".join(caught.value.stderr.split())
    assert case["message"] in said
    assert (case["at"].partition("[")[0] or "metadata.name") in said


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "spec.model: Required value"),
        ({"model": MODEL, "prefil": {}}, 'unknown field "spec.prefil"'),
        ({"model": MODEL, "prefill": {"replicas": -1}}, "spec.prefill.replicas"),
        ({"model": MODEL, "rollout": {"strategy": "Canary"}}, "spec.rollout.strategy"),
        ({"model": MODEL, "engine": {"blockSize": 100}}, "spec.engine.blockSize"),
    ],
)
def test_the_schema_refuses_by_field(kubectl: Kubectl, spec: dict[str, Any], said: str) -> None:
    with pytest.raises(KubectlError) as caught:
        kubectl.create(resource(spec), "--dry-run=server", "--validate=strict")
    assert said in caught.value.stderr


def test_the_least_service_is_accepted(kubectl: Kubectl) -> None:
    """Nothing but a model: every default of the definition fits every rule."""
    assert "created" in kubectl.create(resource({"model": MODEL}), "--dry-run=server")
