"""The chart on the cluster: install, and where its parts are."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hybridpd_cluster import settings
from kubectl import Kubectl
from tooling.binaries import program

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "hybridpd"
RELEASE = "hybridpd"
NAMESPACE = "hybridpd-system"
DEPLOYMENT = "hybridpd"
ACCOUNT = "hybridpd"
LOCAL_TAG = "dev"
INSTALL_SECONDS = 180


class HelmError(Exception):
    """helm ended with an error; the message is what it said."""


def local_values() -> list[str]:
    """Flags that name the images built here. HYBRIDPD_E2E_VALUES names a values file instead."""
    named = os.environ.get("HYBRIDPD_E2E_VALUES")
    if named:
        return [f"--values={named}"]
    images = {"image": "operator", "connector.image": "connector", "router.image": "router"}
    flags = []
    for key, name in images.items():
        flags.append(f"--set={key}.repository=localhost/hybridpd-{name}")
        flags.append(f"--set={key}.tag={LOCAL_TAG}")
    return flags


def build_flag() -> list[str]:
    """Marks the operator's pod with the build of its image: the tag stays when the code changes."""
    record = settings.state_folder() / "images" / "operator"
    if os.environ.get("HYBRIDPD_E2E_VALUES") or not record.exists():
        return []
    return [f"--set-string=operator.podAnnotations.build={record.read_text().strip()}"]


def helm(kubeconfig: Path | None, *arguments: str, seconds: float = 60) -> str:
    """Standard output of one helm call; HelmError when it fails."""
    target = [f"--kubeconfig={kubeconfig}"] if kubeconfig else []
    done = subprocess.run(
        [str(program("helm")), *target, *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode != 0:
        raise HelmError(f"helm {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def install(kubectl: Kubectl, *flags: str) -> str:
    """Install or upgrade the release and wait until the operator's pod is ready; helm's notes.

    The namespace enforces the restricted pod security standard: the operator must fit it.
    """
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kubectl.make_namespace(NAMESPACE, labels)
    return helm(
        kubectl.kubeconfig,
        "upgrade",
        RELEASE,
        str(CHART),
        "--install",
        f"--namespace={NAMESPACE}",
        "--set=operator.verifySeconds=5",
        *local_values(),
        *build_flag(),
        "--wait",
        f"--timeout={INSTALL_SECONDS}s",
        *flags,
        seconds=INSTALL_SECONDS + 30,
    )


def uninstall(kubectl: Kubectl) -> str:
    """Remove the release and wait until its objects are gone."""
    place = [f"--namespace={NAMESPACE}", "--ignore-not-found", "--wait"]
    return helm(kubectl.kubeconfig, "uninstall", RELEASE, *place, seconds=INSTALL_SECONDS)


def template(*flags: str) -> str:
    """The rendered chart, without a cluster."""
    place = [f"--namespace={NAMESPACE}", "--kube-version=1.34.0"]
    return helm(None, "template", RELEASE, str(CHART), *place, *flags)
