"""From apply to Ready to tokens, with real engines."""

from __future__ import annotations

import base64
import json
import re
import shlex

import release
import waits
from kubectl import Kubectl
from services import KEY_SECRET, Pair

OWNED = "statefulsets,deployments,services,serviceaccounts,roles,rolebindings,poddisruptionbudgets"


def test_the_applied_example_turns_ready(pair: Pair) -> None:
    service = waits.for_ready(pair.kubectl, pair.name)
    for kind in ("Accepted", "Compatible", "PrefillReady", "DecodeReady", "RouterReady"):
        assert waits.condition(service, kind)["status"] == "True", kind
    assert waits.condition(service, "Stalled")["status"] == "False"


def test_tokens_through_the_router_equal_a_single_engine(pair: Pair) -> None:
    pair.check_tokens()


def test_decode_met_prefill_before_the_first_request(pair: Pair) -> None:
    """By the name of the headless Service, which its pod resolves: nobody paid for a handshake."""
    chosen = f"{waits.selector_of(pair.name)},hybridpd.dev/role=decode"
    (decode,) = pair.kubectl.find("pods", chosen)
    log = pair.kubectl.run("logs", decode["metadata"]["name"], "-c", "engine")
    assert "is met ahead of requests" in log


def test_the_reference_is_no_constant_loop(pair: Pair) -> None:
    for name, answer in pair.expected.items():
        assert len(set(answer.tokens)) > len(answer.tokens) // 2, name
    assert len({answer.tokens for answer in pair.expected.values()}) == len(pair.expected)


def test_the_state_was_transferred_and_not_recomputed(pair: Pair) -> None:
    """Equal tokens alone prove nothing: a decode that computes the prompt itself gives them too."""
    pair.check_tokens()
    service = waits.for_condition(pair.kubectl, pair.name, "KVTransferVerified", "True")
    verdict = waits.condition(service, "KVTransferVerified")
    assert verdict["reason"]
    moved = service["status"]["transfer"]
    assert moved["readBytes"] > 0
    assert moved["readBytes"] == moved["predictedBytes"]


def test_every_child_belongs_to_the_service_and_nothing_has_a_finalizer(pair: Pair) -> None:
    service = pair.kubectl.get("hpd", pair.name)
    assert service is not None
    assert "finalizers" not in service["metadata"]
    children = pair.kubectl.find(OWNED, waits.selector_of(pair.name))
    assert children
    for child in children:
        (owner,) = child["metadata"]["ownerReferences"]
        assert owner["uid"] == service["metadata"]["uid"]
        assert owner["controller"] is True
        assert "finalizers" not in child["metadata"], child["metadata"]["name"]


def test_engine_pods_are_restricted(pair: Pair) -> None:
    pods = pair.kubectl.find("pods", waits.selector_of(pair.name))
    engines = [p for p in pods if p["metadata"]["labels"]["hybridpd.dev/role"] != "router"]
    assert len(engines) == 2
    for pod in engines:
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False
        assert spec["automountServiceAccountToken"] is False
        for container in (*spec["initContainers"], *spec["containers"]):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]


def test_the_engines_ask_for_the_key_and_nobody_shows_it(pair: Pair) -> None:
    """The key comes as a file: it is in no pod, no argument, no log and no status."""
    secret = pair.kubectl.get("secret", KEY_SECRET)
    assert secret is not None
    key = base64.b64decode(secret["data"]["key"]).decode()
    pods = pair.kubectl.find("pods", waits.selector_of(pair.name))
    engines = [p for p in pods if p["metadata"]["labels"]["hybridpd.dev/role"] != "router"]
    for pod in engines:
        log = pair.kubectl.run("logs", pod["metadata"]["name"], "-c", "engine")
        assert "the side channel is encrypted and asks for a key" in log
        assert "the side channel has no key" not in log
        assert "may use it" not in log
        assert key not in log
    service = waits.for_ready(pair.kubectl, pair.name)
    assert key not in json.dumps([service, *pods])
    assert "side channel" not in waits.condition(service, "Accepted")["message"]


def test_wide_columns_tell_the_pair(pair: Pair) -> None:
    head, row = pair.kubectl.run("get", "hpd", pair.name, "-o", "wide").splitlines()
    for column in ("NAME", "READY", "AGE"):
        assert column in head
    assert row.startswith(pair.name)
    assert "True" in row


def test_the_commands_of_the_page_on_conditions_run_as_they_stand(pair: Pair) -> None:
    page = (release.ROOT / "docs" / "howto" / "read-conditions.md").read_text()
    wide, conditions = re.findall(r"^kubectl (.*)$", page, re.MULTILINE)
    assert pair.name in pair.kubectl.run(*shlex.split(wide.replace("NAME", pair.name)))
    told = pair.kubectl.run(*shlex.split(conditions.replace("NAME", pair.name))).splitlines()
    for kind in re.findall(r"^\| ([A-Za-z]+) \| (?:True|False) \|", page, re.MULTILINE):
        assert any(line.startswith(f"{kind}=") for line in told), kind
    pair.kubectl.run("wait", f"hpd/{pair.name}", "--for=condition=Ready", "--timeout=30s")


def test_the_router_is_reachable_by_the_stable_name(kubectl: Kubectl, pair: Pair) -> None:
    service = kubectl.get("service", pair.name)
    assert service is not None
    status = (kubectl.get("hpd", pair.name) or {})["status"]
    assert f"{pair.name}.{kubectl.namespace}" in status["endpoint"]
