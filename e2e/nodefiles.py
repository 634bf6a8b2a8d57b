"""What the tiny example expects on the node: checkpoint, vLLM's packages, compile cache.

The paths in docs/examples must be the same on every machine, so they are links below one folder
into the cache. The compile cache is keyed by the engine environment: another vLLM never reads it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hybridpd_cluster import settings
from tooling import envs

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("/var/lib/hybridpd-demo")
FAMILY = "nemotron-h"


def node_is_here() -> bool:
    """Whether the cluster in use is the one this machine started."""
    named = os.environ.get("KUBECONFIG")
    return not named or Path(named).resolve() == settings.kubeconfig_path().resolve()


def prepare() -> Path:
    """Make the folder whole and give it; does nothing for a cluster that is not on this machine."""
    if not node_is_here():
        return FOLDER
    engine = envs.ensure("engine")
    compiled = envs.cache_folder() / "compile" / f"e2e-{engine.name}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Engines run as an ordinary user and share the folder, as /tmp is shared.
    compiled.mkdir(parents=True, exist_ok=True)
    compiled.chmod(0o1777)
    _link(FOLDER / "engine", engine)
    _link(FOLDER / "cache", compiled)
    write_checkpoint(engine, FOLDER / "model")
    return FOLDER


def write_checkpoint(engine: Path, folder: Path) -> None:
    """Write the tiny checkpoint; the same bytes every time."""
    subprocess.run(
        [
            str(engine / "bin" / "python"),
            "-m",
            "hybridpd_testkit.checkpoints",
            f"--family={FAMILY}",
            f"--out={folder}",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "connector" / "testkit")},
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _link(link: Path, target: Path) -> None:
    """Point `link` to `target`, replacing an older link in one step."""
    if link.is_symlink() and link.readlink() == target:
        return
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)
