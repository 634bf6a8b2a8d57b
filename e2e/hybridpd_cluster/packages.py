"""Debian packages the cluster needs, installed when a program is missing."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridpd_cluster.command import run
from hybridpd_cluster.errors import ClusterError
from hybridpd_cluster.settings import SYSTEM_PATH, download_environment
from tooling.binaries import say

# program (or file) that shows the package is there → package
REQUIRED = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "conntrack": "conntrack",
    "nft": "nftables",
    "iptables": "iptables",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "openssl": "openssl",
}
_START_POLICY = Path("/usr/sbin/policy-rc.d")


def missing_packages() -> list[str]:
    """Packages of which something is missing."""
    return sorted(
        {
            package
            for program, package in REQUIRED.items()
            if shutil.which(program, path=SYSTEM_PATH) is None and not Path(program).is_file()
        }
    )


@contextmanager
def _services_stay_down() -> Iterator[None]:
    """Debian starts a service when its package is installed, unless this policy file forbids it."""
    if _START_POLICY.exists():
        yield
        return
    _START_POLICY.write_text("#!/bin/sh\nexit 101\n")
    _START_POLICY.chmod(0o755)
    try:
        yield
        # On a systemd host an enabled containerd would start at the next boot.
        if Path("/run/systemd/system").is_dir():
            subprocess.run(["systemctl", "disable", "--quiet", "containerd"], check=False)
    finally:
        _START_POLICY.unlink()


def ensure_packages() -> None:
    """Installs what is missing; needs root and Debian."""
    if os.geteuid() != 0:
        raise ClusterError("user: expected root (namespaces, mounts, containers), got another user")
    wanted = missing_packages()
    if not wanted:
        return
    if shutil.which("apt-get") is None:
        raise ClusterError(
            f"packages: expected {', '.join(wanted)}; install them, apt-get is missing"
        )
    say(f"installing Debian packages: {', '.join(wanted)}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive", **download_environment()}
    with _services_stay_down():
        run(["apt-get", "update", "-q"], extra_environment=quiet)
        run(
            ["apt-get", "install", "-y", "-q", "--no-install-recommends", *wanted],
            extra_environment=quiet,
            timeout_seconds=1200,
        )
