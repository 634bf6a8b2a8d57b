"""Build the virtual environments the tests and the demo use, outside the checkout.

Each environment is keyed by its requirement file, the interpreter and the recipe below, so a
change of any of them makes a new one and an old checkout keeps working beside a new one.
A folder counts only once its `.complete` file exists, which is written last: an interrupted
install is removed and made again, never used.

Requirement files are complete closures pinned with `==` and installed with `--no-deps`. That is
what lets the CPU build of vLLM run on the registry's ordinary torch, which its metadata refuses.
The engine closures hold all that vLLM declares, thus also clients of services that nothing here
calls.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RECIPE = 1  # raise it when the steps below change
ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
NAMES = tuple(sorted(path.stem for path in REQUIREMENTS.glob("*.txt")))


def cache_folder() -> Path:
    """The cache outside the checkout: `HYBRIDPD_CACHE`, or `~/.cache/hybridpd`."""
    return Path(os.environ.get("HYBRIDPD_CACHE") or Path.home() / ".cache" / "hybridpd")


def missing_packages(name: str) -> list[str]:
    """Debian packages that environment `name` needs at run time and this machine lacks.

    torch compiles small kernels when an engine starts, for which it wants a compiler and Python's
    headers. The failure tests make networks with iproute2.
    """
    missing = []
    if name.partition("-")[0] == "engine":
        if shutil.which("g++") is None:
            missing.append("g++")
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            missing.append("python3-dev")
        if shutil.which("ip") is None or shutil.which("tc") is None:
            missing.append("iproute2")
    return missing


def env_path(name: str) -> Path:
    """Where environment `name` lives; the folder need not exist yet."""
    text = (REQUIREMENTS / f"{name}.txt").read_bytes()
    version = ".".join(map(str, sys.version_info[:3]))
    # The interpreter behind the links: the same from a shell and from within an environment.
    python = os.path.realpath(sys.executable)
    key = hashlib.sha256(text + f"{version}/{python}/{RECIPE}".encode()).hexdigest()[:12]
    return cache_folder() / "venvs" / f"{name}-{key}"


def ensure(name: str) -> Path:
    """Return the whole environment `name`, building it first when it is missing or half made."""
    path = env_path(name)
    if (path / ".complete").exists() and not missing_packages(name):
        return path
    with exclusive(path.with_suffix(".lock")):
        # Also beside a whole environment: the cache may have come from another machine.
        _apt_install(missing_packages(name))
        if not (path / ".complete").exists():
            _build(name, path)
    return path


def _build(name: str, path: Path) -> None:
    started = time.monotonic()
    _say(f"{name}: building {path}")
    shutil.rmtree(path, ignore_errors=True)
    _create(path)
    pip = [str(path / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    pip += ["--disable-pip-version-check", "--no-compile", "--retries", "10"]
    requirements = REQUIREMENTS / f"{name}.txt"
    _say(f"{name}: installing {len(requirements.read_text().splitlines())} pinned packages")
    subprocess.run([*pip, "-r", str(requirements)], check=True, stdin=subprocess.DEVNULL)
    (path / ".complete").write_text(requirements.read_text())
    _say(f"{name}: ready after {time.monotonic() - started:.0f} s")


def _create(path: Path) -> None:
    command = [os.path.realpath(sys.executable), "-m", "venv", str(path)]
    if subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode == 0:
        return
    # Debian ships the venv module without ensurepip in its minimal Python.
    shutil.rmtree(path, ignore_errors=True)
    _apt_install(["python3-venv", "python3-pip"])
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _apt_install(packages: list[str]) -> None:
    if not packages:
        return
    _say(f"installing {', '.join(packages)}")
    apt_env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["update", "-qq"], ["install", "-y", "-qq", *packages]):
        subprocess.run(["apt-get", *step], check=True, stdin=subprocess.DEVNULL, env=apt_env)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock file, so that two builds of one thing do not run at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"[envs] {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Build the named environments and print the path of each, one a line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        epilog="example: python3.11 e2e/tooling/envs.py engine",
    )
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    for name in parser.parse_args().names:
        print(ensure(name))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
