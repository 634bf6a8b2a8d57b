"""Entry point of the connector's init container: copies the packages to the shared volume.

`python3 install.py [TARGET]`, TARGET by default `/hybridpd/python`, the folder the engine container
has on its `PYTHONPATH`. A restarted init container finds an earlier, perhaps partial copy: it is
replaced, and each package appears under its name only when it is whole.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "python"
PACKAGES = ("hybridpd_geometry", "hybridpd_connector")
DEFAULT_TARGET = Path("/hybridpd/python")


def install(source: Path, target: Path) -> None:
    """Copies the packages of `source` into `target`; OSError when one of them is not there."""
    target.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        partial = target / f".{package}.partial"
        for leftover in (partial, target / package):
            if leftover.exists():
                shutil.rmtree(leftover)
        # copyfile leaves modes and owners to the volume: the engine may run as another uid.
        shutil.copytree(source / package, partial, copy_function=shutil.copyfile)
        for path in (partial, *partial.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        partial.rename(target / package)


def main() -> None:
    """Installs to the argument or the default folder and says what it did."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_TARGET
    install(SOURCE, target)
    sys.stdout.write(f"hybridpd: {', '.join(PACKAGES)} copied to {target}\n")


if __name__ == "__main__":
    main()
