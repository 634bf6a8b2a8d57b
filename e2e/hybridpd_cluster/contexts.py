"""Build contexts: folders whose content goes into an image as it is.

Python packages are installed here, on the host, for the Python of the image (3.11), so that no
image build needs a network. Third-party packages are pinned closures, installed with `--no-deps`.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hybridpd_cluster.errors import ClusterError
from hybridpd_cluster.rootfs import images_cache
from tooling import envs
from tooling.binaries import say

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "e2e" / "images"
_PRODUCT = (
    "operator/hybridpd_operator",
    "connector/hybridpd_geometry",
    "connector/hybridpd_connector",
)
_PRODUCT_FILES = ("pyproject.toml", "README.md", "LICENSE")
_FOR_IMAGE = ("--python-version=3.11", "--implementation=cp", "--only-binary=:all:")


def _named_files(*roots: Path) -> Iterator[tuple[str, Path]]:
    """Single files, and files below folders with their place in it, without compiled leftovers."""
    for root in roots:
        if root.is_file():
            yield root.name, root
            continue
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(root)), path


def content_key(*roots: Path) -> str:
    """Names the content of some files and folders, wherever these themselves lie."""
    digest = hashlib.sha256()
    for name, path in _named_files(*roots):
        data = path.read_bytes()
        digest.update(f"{name}\0{os.access(path, os.X_OK)}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:12]


def product_sources() -> list[Path]:
    """What a wheel of the product is built from."""
    files = [ROOT / name for name in _PRODUCT_FILES if (ROOT / name).exists()]
    return [*(ROOT / folder for folder in _PRODUCT), *files]


def _cached(name: str, key: str, fill: Callable[[Path], None]) -> Path:
    """A folder of the cache, filled beside its final name and renamed when it is whole.

    Earlier ones of the same name, with other keys, are removed then.
    """
    final = images_cache() / "contexts" / f"{name}-{key}"
    if final.is_dir():
        return final
    with envs.exclusive(images_cache() / ".contexts.lock"):
        if final.is_dir():
            return final
        final.parent.mkdir(parents=True, exist_ok=True)
        for leftover in final.parent.glob(".filling-*"):
            shutil.rmtree(leftover)
        working = Path(tempfile.mkdtemp(prefix=".filling-", dir=final.parent))
        try:
            fill(working)
            working.chmod(0o755)
            for older in final.parent.glob(f"{name}-*"):
                shutil.rmtree(older)
            working.rename(final)
        finally:
            shutil.rmtree(working, ignore_errors=True)
    return final


def _pip(*words: str | Path) -> None:
    python = envs.ensure("check") / "bin" / "python"
    command = [str(python), "-m", "pip", *(str(word) for word in words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"pip {words[0]}: exit status {done.returncode}\n{done.stderr[-3000:]}")


def third_party(requirements: str) -> Path:
    """Folder with the pinned packages of `e2e/images/<requirements>.txt`."""
    path = IMAGES / f"{requirements}.txt"

    def fill(folder: Path) -> None:
        say(f"packages of {path.name}: installing for Python 3.11")
        target = ("--target", folder, "--no-deps", "--no-compile", *_FOR_IMAGE)
        _pip("install", "--quiet", *target, "-r", path)

    return _cached(requirements, content_key(path), fill)


def product() -> Path:
    """Folder with the product installed from a wheel of this checkout, without its dependencies."""

    def fill(folder: Path) -> None:
        say("product: building and unpacking its wheel")
        with tempfile.TemporaryDirectory() as wheels:
            _pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", wheels, ROOT)
            wheel = next(Path(wheels).glob("*.whl"))
            _pip("install", "--quiet", "--no-deps", "--no-compile", "--target", folder, wheel)

    return _cached("product", content_key(*product_sources()), fill)


def assemble(context: Path, parts: dict[str, list[Path]]) -> None:
    """Fills a build context: each name gets the content of its folders, or its one file."""
    for name, sources in parts.items():
        for source in sources:
            if source.is_file():
                shutil.copyfile(source, context / name)
            else:
                shutil.copytree(source, context / name, dirs_exist_ok=True, symlinks=True)
