"""The chart as helm renders it. Needs helm, no cluster."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

import release

DIGEST = "sha256:" + "ab" * 32


def rendered(*flags: str) -> dict[str, list[dict[str, Any]]]:
    """Kind → objects."""
    objects: dict[str, list[dict[str, Any]]] = {}
    for document in yaml.safe_load_all(release.template(*flags)):
        if document:
            objects.setdefault(document["kind"], []).append(document)
    return objects


def operator_container(objects: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    (deployment,) = objects["Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_helm_lints_without_a_warning() -> None:
    said = release.helm(None, "lint", "--strict", str(release.CHART))
    assert "0 chart(s) failed" in said


def test_default_install_is_one_replica_with_cluster_wide_rights() -> None:
    objects = rendered()
    assert sorted(objects) == [
        "ClusterRole",
        "ClusterRoleBinding",
        "CustomResourceDefinition",
        "Deployment",
        "ServiceAccount",
    ]
    (deployment,) = objects["Deployment"]
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_watched_namespaces_replace_the_cluster_role() -> None:
    objects = rendered("--set=watchNamespaces={blue,green}")
    assert "ClusterRole" not in objects
    assert [role["metadata"]["namespace"] for role in objects["Role"]] == ["blue", "green"]
    assert [item["metadata"]["namespace"] for item in objects["RoleBinding"]] == ["blue", "green"]
    everywhere = rendered()["ClusterRole"][0]["rules"]
    assert all(role["rules"] == everywhere for role in objects["Role"])
    env = {entry["name"]: entry["value"] for entry in operator_container(objects)["env"]}
    assert env["HYBRIDPD_WATCH_NAMESPACES"] == "blue,green"


@pytest.mark.parametrize("image", ["image", "connector.image", "router.image", "engine.image"])
def test_a_digest_wins_over_the_tag(image: str) -> None:
    text = release.template(
        f"--set={image}.repository=example/here,{image}.tag=v9,{image}.digest={DIGEST}"
    )
    assert f"example/here@{DIGEST}" in text
    assert "example/here:v9" not in text


def test_pull_secrets_reach_the_operator_and_its_children() -> None:
    objects = rendered("--set=imagePullSecrets={one,two}")
    spec = objects["Deployment"][0]["spec"]["template"]["spec"]
    assert spec["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
    env = {entry["name"]: entry["value"] for entry in operator_container(objects)["env"]}
    assert env["HYBRIDPD_IMAGE_PULL_SECRETS"] == "one,two"


def test_the_definition_is_the_source_and_is_kept() -> None:
    sources = [yaml.safe_load(path.read_text()) for path in (release.ROOT / "crds").glob("*.yaml")]
    dropped = rendered("--set=crds.keep=false")["CustomResourceDefinition"]
    assert dropped == sources
    (kept,) = rendered()["CustomResourceDefinition"]
    assert kept["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert [kept] == sources
    assert "CustomResourceDefinition" not in rendered("--set=crds.enabled=false")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--set=operater.logLevel=info", "operater"),
        ("--set=operator.logLevel=loud", "operator/logLevel"),
        ("--set=image.digest=sha256:short", "image/digest"),
        ("--set=crds.keep=perhaps", "crds/keep"),
    ],
)
def test_a_wrong_value_is_refused_by_name(flag: str, said: str) -> None:
    with pytest.raises(release.HelmError) as caught:
        release.template(flag)
    assert said in str(caught.value).replace(".", "/")
