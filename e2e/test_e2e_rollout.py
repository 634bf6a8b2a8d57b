"""An edit of an engine flag recreates the pair, and no router ever sees two revisions."""

from __future__ import annotations

from typing import Any

import waits
from kubectl import Object, Watch
from services import Pair, guarded

REVISION = "hybridpd.dev/revision"
ROLE = "hybridpd.dev/role"


def revisions_of(objects: dict[str, Object], role: str | None = None) -> set[str]:
    return {
        item["metadata"]["labels"][REVISION]
        for item in objects.values()
        if REVISION in item["metadata"]["labels"]
        and (role is None or item["metadata"]["labels"][ROLE] == role)
    }


def test_an_engine_flag_recreates_the_pair(pair: Pair) -> None:
    kubectl = pair.kubectl
    old = kubectl.find("statefulsets", waits.selector_of(pair.name))
    (old_revision,) = {item["metadata"]["labels"][REVISION] for item in old}
    with (
        Watch(kubectl, "pods", waits.selector_of(pair.name)) as pods,
        Watch(kubectl, "deployments", waits.selector_of(pair.name)) as routers,
        Watch(kubectl, "hpd", "") as services,
    ):
        changed = guarded()
        changed["spec"]["engine"]["extraArgs"] = [
            "--max-num-seqs=4",
            "--max-num-batched-tokens=2048",
        ]
        kubectl.apply(changed)
        waits.for_condition(kubectl, pair.name, "Reconciling", "True")
        service = waits.for_ready(kubectl, pair.name)
    new = kubectl.find("statefulsets", waits.selector_of(pair.name))
    (new_revision,) = {item["metadata"]["labels"][REVISION] for item in new}
    assert new_revision != old_revision
    assert service["status"]["revision"] == new_revision

    assert_one_revision_at_a_time(pods.seen(), {old_revision, new_revision})
    assert_routers_select_one_revision(routers.seen())
    outage = [
        item
        for _, item in services.seen()
        if item["metadata"]["name"] == pair.name
        and waits.condition(item, "Ready")["status"] == "False"
        and waits.condition(item, "Reconciling")["status"] == "True"
    ]
    assert outage, "the outage never showed as Reconciling"
    pair.check_tokens()


def assert_one_revision_at_a_time(events: list[tuple[str, Object]], expected: set[str]) -> None:
    """Replay the watch: at no moment do pods of two revisions exist."""
    alive: dict[str, Object] = {}
    met: set[str] = set()
    for kind, pod in events:
        if kind == "DELETED":
            alive.pop(pod["metadata"]["uid"], None)
        else:
            alive[pod["metadata"]["uid"]] = pod
        now = revisions_of(alive)
        met |= now
        assert len(now) <= 1, f"pods of {sorted(now)} at once"
    assert met == expected, "the watch missed a revision"


def assert_routers_select_one_revision(events: list[tuple[str, Object]]) -> None:
    """Both selectors of every router name its own revision and nothing wider."""
    assert events
    for _, deployment in events:
        revision = deployment["metadata"]["labels"][REVISION]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        for flag in ("--prefill-selector", "--decode-selector"):
            assert f"{REVISION}={revision}" in router_selector(container, flag)


def router_selector(container: dict[str, Any], flag: str) -> list[str]:
    """The label pairs that follow one of the router's selector flags."""
    words = [*container.get("command", []), *container.get("args", [])]
    pairs = []
    for word in words[words.index(flag) + 1 :]:
        if word.startswith("--"):
            break
        pairs.append(word)
    return pairs
