"""Builds the images with buildah, without a registry, and gives them to the cluster's containerd.

An image is named by the content it is made of; an archive that is there under its name is not built
again, and an archive the cluster has is not imported again.
"""

import dataclasses
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hybridpd_cluster import contexts, lifecycle, rootfs
from hybridpd_cluster.command import run
from hybridpd_cluster.errors import ClusterError
from hybridpd_cluster.packages import ensure_packages
from hybridpd_cluster.rootfs import RootFileSystem, images_cache
from hybridpd_cluster.settings import state_folder
from tooling.binaries import say
from tooling.envs import exclusive

_STORE = "buildah-store"


@dataclasses.dataclass(frozen=True)
class Image:
    """One image: a Dockerfile on a root file system, and what its context holds.

    Without a Dockerfile the image is the root file system itself.
    """

    name: str
    root: RootFileSystem
    dockerfile: Path | None
    parts: Callable[[], dict[str, list[Path]]]

    @property
    def reference(self) -> str:
        """The name pods use."""
        return f"localhost/hybridpd-{self.name}:dev"

    def key(self, parts: dict[str, list[Path]]) -> str:
        """Names root, Dockerfile and context."""
        digest = hashlib.sha256(self.root.key().encode())
        if self.dockerfile is not None:
            digest.update(self.dockerfile.read_bytes())
        for name, sources in sorted(parts.items()):
            digest.update(f"\0{name}\0{contexts.content_key(*sources)}".encode())
        return digest.hexdigest()[:12]


IMAGES = (
    Image(
        "operator",
        rootfs.BASE,
        contexts.ROOT / "operator" / "Dockerfile",
        lambda: {"app": [contexts.third_party("operator"), contexts.product()]},
    ),
    Image(
        "connector",
        rootfs.BASE,
        contexts.ROOT / "connector" / "Dockerfile",
        lambda: {
            "python": [contexts.product()],
            "install.py": [contexts.ROOT / "connector" / "image" / "install.py"],
        },
    ),
    Image(
        "router",
        rootfs.BASE,
        contexts.IMAGES / "router.Dockerfile",
        lambda: {"app": [contexts.third_party("router")]},
    ),
    Image("engine-base", rootfs.ENGINE, None, dict),
)


def ensure(*, give_to_cluster: bool) -> None:
    """Builds what is missing; imports what the running cluster lacks."""
    ensure_packages()
    if give_to_cluster and lifecycle.problems():
        raise ClusterError("cluster: expected it up to take the images, got it down; run `up`")
    with exclusive(images_cache() / ".images.lock"):
        for leftover in images_cache().glob("context-*"):  # of a run that was killed
            shutil.rmtree(leftover)
        for image in IMAGES:
            archive = _build(image)
            if give_to_cluster:
                _give(image, archive)


def _give(image: Image, archive: Path) -> None:
    record = state_folder() / "images" / image.name
    if record.exists() and record.read_text() == archive.name:
        say(f"image {image.reference}: unchanged")
        return
    start = time.monotonic()
    lifecycle.import_archive(archive)
    record.parent.mkdir(exist_ok=True)
    record.write_text(archive.name)
    say(f"image {image.reference}: imported in {time.monotonic() - start:.1f} s")


def _build(image: Image) -> Path:
    parts = image.parts()  # once: the checkout may change while images are built
    final = images_cache() / f"{image.name}-{image.key(parts)}.tar"
    if final.exists():
        return final
    start = time.monotonic()
    say(f"image {image.reference}: building")
    for older in images_cache().glob(f"{image.name}-*.tar"):
        older.unlink()
    partial = final.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    base = _base_image(image.root)
    with tempfile.TemporaryDirectory(prefix="context-", dir=images_cache()) as folder:
        context = Path(folder)
        contexts.assemble(context, parts)
        if image.dockerfile is None:
            _buildah("tag", base, image.reference)
        else:
            words = ["bud", "--isolation=chroot", "--pull-never", f"--build-arg=BASE={base}"]
            words += ["--timestamp=0", f"--tag={image.reference}"]
            _buildah(*words, f"--file={image.dockerfile}", context)
    # The older of the two formats, because it is not compressed: ten times faster to write.
    _buildah("push", image.reference, f"docker-archive:{partial}:{image.reference}")
    _buildah("rmi", image.reference)
    _buildah("rmi", "--prune")
    partial.rename(final)
    say(f"image {image.reference}: built in {time.monotonic() - start:.0f} s")
    return final


def _base_image(root: RootFileSystem) -> str:
    """An image that is just the root file system, in buildah's store; gives its name."""
    tar = rootfs.ensure(root)
    name = f"localhost/hybridpd-rootfs-{root.name}:{root.key()}"
    try:
        if name in _buildah("images", "--format={{.Name}}:{{.Tag}}").split():
            return name
    except ClusterError:
        say("buildah's store is damaged by an interrupted run: starting a new one")
        shutil.rmtree(images_cache() / _STORE)
    with tempfile.TemporaryDirectory(prefix="context-", dir=images_cache()) as folder:
        (Path(folder) / tar.name).hardlink_to(tar)
        dockerfile = Path(folder) / "Dockerfile"
        dockerfile.write_text(
            f'FROM scratch\nADD {tar.name} /\nENV LANG=C.UTF-8\nCMD ["/bin/sh"]\n'
        )
        words = ["bud", "--isolation=chroot", "--timestamp=0", f"--tag={name}"]
        _buildah(*words, f"--file={dockerfile}", folder)
    return name


def _buildah(*words: str | Path) -> str:
    """Runs buildah with a store of its own; its mounts end with it, also when it is killed."""
    store = images_cache() / _STORE
    alone = ["unshare", "--mount", "--propagation", "slave", "--"]
    places = [f"--root={store / 'root'}", f"--runroot={store / 'run'}", "--storage-driver=overlay"]
    return run([*alone, "buildah", *places, *words], timeout_seconds=1200)
