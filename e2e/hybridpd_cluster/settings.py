"""Names, addresses and folders of the cluster. Every other module takes them from here."""

import ipaddress
import os
from pathlib import Path

from tooling.envs import cache_folder

# A second cluster may stand beside the first: tests of this tool itself use number 1.
NUMBER = int(os.environ.get("HYBRIDPD_CLUSTER_NUMBER", "0"))
_SUFFIX = f"-{NUMBER}" if NUMBER else ""

NAME = f"hybridpd{_SUFFIX}"
NODE_NAME = f"hybridpd-node{_SUFFIX}"
NETWORK_NAMESPACE = NODE_NAME
HOST_LINK = f"hybridpd{NUMBER}"
NODE_LINK = "uplink0"
CGROUP = NODE_NAME

# 198.18.0.0/15 is reserved for benchmarks of networks: it exists on no network that routes.
_THIRD = 224 + 4 * NUMBER
NODE_RANGE = ipaddress.ip_network(f"198.18.{_THIRD}.0/29")
POD_RANGE = ipaddress.ip_network(f"198.18.{_THIRD + 1}.0/24")
SERVICE_RANGE = ipaddress.ip_network(f"198.18.{_THIRD + 2}.0/24")
HOST_ADDRESS = NODE_RANGE[1]
NODE_ADDRESS = NODE_RANGE[2]
KUBERNETES_SERVICE = SERVICE_RANGE[1]
DNS_DOMAIN = "cluster.local"

API_SERVER = f"https://{NODE_ADDRESS}:6443"
ETCD_CLIENT = "http://127.0.0.1:2379"
ETCD_PEER = "http://127.0.0.1:2380"

GPU_RESOURCE = "nvidia.com/gpu"
GPU_COUNT = 8
GPU_LABEL = "nvidia.com/gpu.product=NVIDIA-H200"

IMAGE_NAMESPACE = "k8s.io"
PAUSE_IMAGE = "localhost/hybridpd-pause:dev"

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CNI_PLUGINS = Path("/usr/lib/cni")


def cluster_folder() -> Path:
    """Everything of the running cluster, and its kubeconfig."""
    return cache_folder() / f"cluster{_SUFFIX}"


def state_folder() -> Path:
    """Data, logs, keys and records of the running cluster."""
    return cluster_folder() / "state"


def kubeconfig_path() -> Path:
    """The administrator's kubeconfig."""
    return cluster_folder() / "kubeconfig"


def lock_path() -> Path:
    """Held by `up` and `down`; for the whole machine, since names and addresses are fixed."""
    return Path("/run/lock/hybridpd-cluster.lock")


def containerd_socket() -> Path:
    """Address of the cluster's own containerd."""
    # A socket's path has a limit of 108 bytes, and a cache folder may be deep.
    return Path("/run") / CGROUP / "containerd.sock"


def runtime_folder() -> Path:
    """Sockets and containerd's volatile state."""
    return Path("/run") / CGROUP


def clean_environment() -> dict[str, str]:
    """Environment for the cluster's programs: no proxy, no caller's KUBECONFIG."""
    kept = {key: os.environ[key] for key in ("LANG", "TMPDIR") if key in os.environ}
    # A root shell made with `su` has no sbin folders on its path.
    path = os.pathsep.join((os.environ.get("PATH", ""), SYSTEM_PATH)).lstrip(os.pathsep)
    return kept | {"HOME": "/root", "PATH": path}


def download_environment() -> dict[str, str]:
    """What programs that download need besides: the caller's proxy settings."""
    return {key: value for key, value in os.environ.items() if key.lower().endswith("_proxy")}
