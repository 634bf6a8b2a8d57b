"""Builds the cluster's Go programs from the modules pinned beside this file.

Each family is one `go.mod` with `tool` directives, so that go.sum pins every byte. A family's
programs go to `<cache>/bin/<family>-<key>/`; the key covers go.mod, go.sum and the build flags.
They are built in a temporary folder that is renamed when it is whole: a folder under its final name
is always complete.

    PYTHONPATH=e2e python3.11 -m tooling.binaries    # build what is missing, print the paths
"""

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tooling.envs import cache_folder, exclusive

GO_FOLDER = Path(__file__).resolve().parent / "go"
KUBERNETES_VERSION = "v1.34.4"
HELM_VERSION = "v3.19.5"

# Without the stamps kubectl, helm and webhooks see the version v0.0.0.
_KUBERNETES_STAMPS = tuple(
    f"-X k8s.io/{package}/version.{key}={value}"
    for package in ("component-base", "client-go/pkg")
    for key, value in (("gitVersion", KUBERNETES_VERSION), ("gitMajor", "1"), ("gitMinor", "34"))
)


class BinariesError(Exception):
    """A program could not be built; the message says which and how to see more."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Programs built from one go.mod: `programs` maps a program's name to its main package."""

    name: str
    programs: Mapping[str, str]
    stamps: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the family's go.mod lies."""
        return GO_FOLDER / self.name

    def flags(self) -> tuple[str, ...]:
        """Flags of `go build`, the same for every program of the family."""
        return ("-trimpath", "-buildvcs=false", "-ldflags", " ".join(("-s -w", *self.stamps)))

    def key(self) -> str:
        """Names one set of inputs: module files, own sources, flags and program list."""
        digest = hashlib.sha256()
        for path in sorted(self.folder.iterdir()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        digest.update(repr((self.flags(), sorted(self.programs.items()))).encode())
        return digest.hexdigest()[:12]


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("pause", {"pause": "."}),
        Family(
            "kubernetes",
            {
                "etcd": "go.etcd.io/etcd/server/v3",
                "kubectl": "k8s.io/kubernetes/cmd/kubectl",
                "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
                "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
                "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
                "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
                "kubelet": "k8s.io/kubernetes/cmd/kubelet",
            },
            _KUBERNETES_STAMPS,
        ),
        Family("coredns", {"coredns": "."}),
        Family(
            "helm",
            {"helm": "helm.sh/helm/v3/cmd/helm"},
            (
                f"-X helm.sh/helm/v3/internal/version.version={HELM_VERSION}",
                "-X helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor=1",
                "-X helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor=34",
            ),
        ),
    )
}


def family_folder(family: Family) -> Path:
    """Where the family's programs are, or will be."""
    return cache_folder() / "bin" / f"{family.name}-{family.key()}"


def say(message: str) -> None:
    """One line of progress, on standard error: standard output is for results."""
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def _build(family: Family, folder: Path) -> None:
    environment = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off", "GOFLAGS": ""}
    for number, (program, package) in enumerate(family.programs.items(), start=1):
        say(f"{family.name}: building {program} ({number} of {len(family.programs)})")
        start = time.monotonic()
        command = ["go", "build", *family.flags(), "-o", str(folder / program), package]
        try:
            subprocess.run(command, cwd=family.folder, env=environment, check=True)
        except FileNotFoundError as error:
            raise BinariesError("go: not found; expected Go 1.25 or newer on PATH") from error
        except subprocess.CalledProcessError as error:
            raise BinariesError(
                f"{program}: `go build` gave {error.returncode} in {family.folder}; "
                "its own lines above say why"
            ) from error
        say(f"{family.name}: {program} built in {time.monotonic() - start:.0f} s")


def build_family(name: str) -> Path:
    """Builds a family unless its folder is there already, and gives the folder."""
    family = FAMILIES[name]
    final = family_folder(family)
    if final.is_dir():
        return final
    with exclusive(final.parent / f".{name}.lock"):
        if final.is_dir():  # another process built it while this one waited
            return final
        for leftover in final.parent.glob(f".building-{name}-*"):
            shutil.rmtree(leftover)
        working = Path(tempfile.mkdtemp(prefix=f".building-{name}-", dir=final.parent))
        try:
            _build(family, working)
            working.chmod(0o755)
            working.rename(final)
        finally:
            shutil.rmtree(working, ignore_errors=True)
    return final


def build_all() -> Mapping[str, Path]:
    """Builds every family; gives program name → path."""
    return {
        program: folder / program
        for name, family in FAMILIES.items()
        for folder in (build_family(name),)
        for program in family.programs
    }


def program(name: str) -> Path:
    """Path of one program, built when it is missing."""
    for family in FAMILIES.values():
        if name in family.programs:
            return build_family(family.name) / name
    raise BinariesError(f"program: expected one of {sorted(_all_programs())}, got {name!r}")


def _all_programs() -> list[str]:
    return [program for family in FAMILIES.values() for program in family.programs]


def main() -> int:
    """Builds all and prints `program path` lines."""
    try:
        for name, path in build_all().items():
            print(f"{name:24} {path}")
    except BinariesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
