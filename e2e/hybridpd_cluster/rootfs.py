"""Debian root file systems for the images, as tar files in the cache.

`base` is what the product's own images stand on; `engine` adds what vLLM needs at run time: a C++
compiler with Python's headers (torch compiles kernels when it starts) and libnuma.
"""

import dataclasses
import hashlib
import shutil
import tempfile
import time
from pathlib import Path

from hybridpd_cluster.command import run
from hybridpd_cluster.errors import ClusterError
from hybridpd_cluster.settings import download_environment
from tooling.binaries import say
from tooling.envs import cache_folder, exclusive

_SUITE = "bookworm"
_RECIPE = 2  # raise it when the steps below change
# Only takes room in an image that never installs or reads anything.
_LEFT_OUT = (
    "var/cache/apt",
    "var/lib/apt/lists",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
)


@dataclasses.dataclass(frozen=True)
class RootFileSystem:
    """One root file system: Debian's minimal variant and some packages."""

    name: str
    packages: tuple[str, ...]

    def key(self) -> str:
        """Names the recipe; the packages' versions are those of the day it was built."""
        recipe = repr((_SUITE, _RECIPE, self.packages, _LEFT_OUT))
        return hashlib.sha256(recipe.encode()).hexdigest()[:12]

    def path(self) -> Path:
        """The tar file, there or not."""
        return images_cache() / f"rootfs-{self.name}-{self.key()}.tar"


BASE = RootFileSystem("base", ("python3", "ca-certificates"))
ENGINE = RootFileSystem(
    "engine", ("python3", "python3-dev", "g++", "libnuma1", "ca-certificates", "iproute2")
)


def images_cache() -> Path:
    """Folder of everything the images are built from, and of the built images."""
    return cache_folder() / "images"


def ensure(root: RootFileSystem) -> Path:
    """Makes the tar file unless it is there, and gives its path."""
    final = root.path()
    if final.exists():
        return final
    with exclusive(images_cache() / f".rootfs-{root.name}.lock"):
        if final.exists():
            return final
        for leftover in images_cache().glob(f".rootfs-{root.name}-*"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
        working = Path(tempfile.mkdtemp(prefix=f".rootfs-{root.name}-", dir=images_cache()))
        try:
            _make(root, working)
            (working / "root.tar").rename(final)
        finally:
            shutil.rmtree(working, ignore_errors=True)
    return final


def _make(root: RootFileSystem, working: Path) -> None:
    start = time.monotonic()
    say(f"root file system {root.name}: Debian {_SUITE} with {', '.join(root.packages)}")
    target, packages = working / "root", images_cache() / "debian-packages"
    packages.mkdir(exist_ok=True)
    # Its own mount namespace: an interrupted debootstrap leaves /proc mounted in the target.
    alone = ["unshare", "--mount", "--propagation", "slave", "--"]
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(root.packages)}"]
    command += [f"--cache-dir={packages}", _SUITE, str(target)]
    try:
        run([*alone, *command], extra_environment=download_environment(), timeout_seconds=1800)
    except ClusterError as error:
        log = target / "debootstrap" / "debootstrap.log"
        said = log.read_text(errors="replace")[-2000:] if log.exists() else ""
        raise ClusterError(f"{error}\n{said}") from error
    for folder in _LEFT_OUT:
        shutil.rmtree(target / folder, ignore_errors=True)
    # Same content, same bytes: then the layer's digest is stable as well.
    same = [
        "--sort=name",
        "--mtime=@0",
        "--numeric-owner",
        "--exclude=./dev/*",
        "--exclude=./proc/*",
    ]
    run(["tar", "-C", target, "-cf", working / "root.tar", *same, "."], timeout_seconds=600)
    say(f"root file system {root.name}: made in {time.monotonic() - start:.0f} s")
