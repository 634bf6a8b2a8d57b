"""Nothing changed, nothing written; counted where writes cannot hide, at the API server."""

from __future__ import annotations

import re
import time

import waits
from kubectl import Kubectl
from services import Pair

QUIET_SECONDS = 30
# Server-side apply that changes nothing leaves no trace on the object, but it is a request.
WRITES = {"APPLY", "PATCH", "PUT", "POST", "DELETE", "DELETECOLLECTION", "UPDATE", "CREATE"}
RESOURCES = {
    "hybridpdservices",
    "statefulsets",
    "deployments",
    "services",
    "serviceaccounts",
    "roles",
    "rolebindings",
    "poddisruptionbudgets",
    "events",
}
SAMPLE = re.compile(r"^apiserver_request_total\{(.*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


def writes(kubectl: Kubectl) -> dict[str, float]:
    """Write requests so far, by verb and resource, for what the operator writes."""
    counts: dict[str, float] = {}
    for labels_text, value in SAMPLE.findall(kubectl.run("get", "--raw", "/metrics")):
        labels = dict(LABEL.findall(labels_text))
        if labels["verb"] not in WRITES or labels["resource"] not in RESOURCES:
            continue
        # Creating a token is a POST to serviceaccounts, by the kubelet.
        if labels["subresource"] == "token":
            continue
        key = f"{labels['verb']} {labels['resource']}/{labels['subresource']}"
        counts[key] = counts.get(key, 0.0) + float(value)
    return counts


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {
        key: after[key] - before.get(key, 0) for key in after if after[key] > before.get(key, 0)
    }


def settle(kubectl: Kubectl) -> None:
    """Two looks, five seconds apart, without a write between them."""

    def quiet() -> tuple[bool, dict[str, float]]:
        before = writes(kubectl)
        time.sleep(5)
        difference = grown(before, writes(kubectl))
        return not difference, difference

    waits.until("no writes for 5 s", quiet, 60)


def test_the_count_sees_a_write_that_changes_nothing(pair: Pair) -> None:
    """The check below would be worthless if an empty apply were not counted."""
    document = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "default", "namespace": pair.kubectl.namespace},
    }
    pair.kubectl.apply(document, "--server-side", "--field-manager=e2e")
    before = writes(pair.kubectl)
    pair.kubectl.apply(document, "--server-side", "--field-manager=e2e")
    assert sum(grown(before, writes(pair.kubectl)).values()) >= 1


def test_steady_state_makes_no_writes(pair: Pair) -> None:
    settle(pair.kubectl)
    before = writes(pair.kubectl)
    time.sleep(QUIET_SECONDS)
    assert grown(before, writes(pair.kubectl)) == {}


def test_an_event_without_a_change_makes_no_writes(pair: Pair) -> None:
    """A label of no meaning wakes the operator; it looks, and writes nothing."""
    settle(pair.kubectl)
    before = writes(pair.kubectl)
    pair.kubectl.run("label", "hpd", pair.name, f"e2e/touched=at-{int(time.time())}", "--overwrite")
    time.sleep(10)
    difference = grown(before, writes(pair.kubectl))
    assert difference == {"PATCH hybridpdservices/": 1.0}
