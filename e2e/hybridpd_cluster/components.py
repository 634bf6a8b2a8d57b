"""Command lines and configuration files of the programs that make a one-node Kubernetes."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from hybridpd_cluster.settings import (
    CGROUP,
    CNI_PLUGINS,
    DNS_DOMAIN,
    ETCD_CLIENT,
    ETCD_PEER,
    GPU_LABEL,
    NODE_ADDRESS,
    NODE_NAME,
    PAUSE_IMAGE,
    POD_RANGE,
    SERVICE_RANGE,
    SYSTEM_PATH,
    containerd_socket,
    runtime_folder,
    state_folder,
)
from tooling.binaries import program

Words = list[str | Path]


def keys() -> Path:
    """Folder of keys, certificates and kubeconfigs."""
    return state_folder() / "keys"


def _written(name: str, text: str) -> Path:
    path = state_folder() / "config" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _flags(flags: Mapping[str, object]) -> list[str | Path]:
    return [f"--{name}={value}" for name, value in flags.items()]


def etcd() -> Words:
    """A store that may lose data with the machine: the cluster is rebuilt then anyway."""
    flags = {
        "name": "node",
        "data-dir": state_folder() / "etcd",
        "unsafe-no-fsync": "true",
        "listen-client-urls": ETCD_CLIENT,
        "advertise-client-urls": ETCD_CLIENT,
        "listen-peer-urls": ETCD_PEER,
        "initial-advertise-peer-urls": ETCD_PEER,
        "initial-cluster": f"node={ETCD_PEER}",
    }
    return [program("etcd"), *_flags(flags)]


def _audit_policy() -> Path:
    """Records who wrote what, except leases and events: tests count writes with it."""
    quiet = [{"group": "coordination.k8s.io"}, {"group": "events.k8s.io"}]
    rules: list[dict[str, object]] = [
        {"level": "None", "verbs": ["get", "list", "watch"]},
        {"level": "None", "resources": [*quiet, {"group": "", "resources": ["events"]}]},
        {"level": "Metadata", "omitStages": ["RequestReceived", "ResponseStarted"]},
    ]
    policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules}
    return _written("audit-policy.json", json.dumps(policy, indent=2))


def audit_log() -> Path:
    """One JSON object a line for each write to the API."""
    return state_folder() / "logs" / "audit.log"


def kube_apiserver() -> Words:
    """The API, on the node's address."""
    folder = keys()
    flags = {
        "advertise-address": NODE_ADDRESS,
        "secure-port": 6443,
        "etcd-servers": ETCD_CLIENT,
        "service-cluster-ip-range": SERVICE_RANGE,
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction",
        "allow-privileged": "true",
        "client-ca-file": folder / "ca.crt",
        "tls-cert-file": folder / "apiserver.crt",
        "tls-private-key-file": folder / "apiserver.key",
        "kubelet-client-certificate": folder / "apiserver-kubelet.crt",
        "kubelet-client-key": folder / "apiserver-kubelet.key",
        "kubelet-certificate-authority": folder / "ca.crt",
        # By name, exec and logs would look the node up in DNS.
        "kubelet-preferred-address-types": "InternalIP",
        "service-account-issuer": f"https://kubernetes.default.svc.{DNS_DOMAIN}",
        "service-account-key-file": folder / "service-account.pub",
        "service-account-signing-key-file": folder / "service-account.key",
        "requestheader-client-ca-file": folder / "front-proxy-ca.crt",
        "requestheader-allowed-names": "front-proxy-client",
        "requestheader-extra-headers-prefix": "X-Remote-Extra-",
        "requestheader-group-headers": "X-Remote-Group",
        "requestheader-username-headers": "X-Remote-User",
        "proxy-client-cert-file": folder / "front-proxy.crt",
        "proxy-client-key-file": folder / "front-proxy.key",
        "audit-policy-file": _audit_policy(),
        "audit-log-path": audit_log(),
        "audit-log-mode": "blocking",
    }
    return [program("kube-apiserver"), *_flags(flags)]


def _kubeconfigs(identity: str) -> dict[str, object]:
    path = keys() / f"{identity}.kubeconfig"
    return {
        "kubeconfig": path,
        "authentication-kubeconfig": path,
        "authorization-kubeconfig": path,
        "bind-address": "127.0.0.1",
        "leader-elect": "false",
    }


def kube_controller_manager() -> Words:
    """The controllers of Kubernetes itself."""
    folder = keys()
    flags = _kubeconfigs("controller-manager") | {
        "use-service-account-credentials": "true",
        "root-ca-file": folder / "ca.crt",
        "service-account-private-key-file": folder / "service-account.key",
        "cluster-signing-cert-file": folder / "ca.crt",
        "cluster-signing-key-file": folder / "ca.key",
    }
    return [program("kube-controller-manager"), *_flags(flags)]


def kube_scheduler() -> Words:
    """The scheduler with its defaults."""
    return [program("kube-scheduler"), *_flags(_kubeconfigs("scheduler"))]


def kube_proxy() -> Words:
    """Service addresses by nftables; the node's namespace has rules of its own."""
    flags = {
        "kubeconfig": keys() / "proxy.kubeconfig",
        "hostname-override": NODE_NAME,
        "proxy-mode": "nftables",
        "cluster-cidr": POD_RANGE,
        "conntrack-max-per-core": 0,
    }
    return [program("kube-proxy"), *_flags(flags)]


def coredns() -> Words:
    """DNS for the cluster's names only; nothing is forwarded."""
    text = f""".:53 {{
    bind {NODE_ADDRESS}
    errors
    ready 127.0.0.1:8181
    kubernetes {DNS_DOMAIN} in-addr.arpa {{
        kubeconfig "{keys() / "coredns.kubeconfig"}"
    }}
}}
"""
    return [program("coredns"), "-conf", _written("Corefile", text)]


def coredns_rights() -> str:
    """What CoreDNS may read, as a manifest."""
    rules = [
        {
            "apiGroups": [""],
            "resources": ["endpoints", "services", "pods", "namespaces"],
            "verbs": ["list", "watch"],
        },
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        },
    ]
    group = "rbac.authorization.k8s.io"
    role = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "system:coredns"},
        "rules": rules,
    }
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "system:coredns"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "system:coredns"},
        "subjects": [{"apiGroup": group, "kind": "User", "name": "system:coredns"}],
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [role, binding]})


def _cni_configuration() -> Path:
    """Each pod gets a routed link of its own: no bridge, so no dependence on bridge netfilter."""
    link = {
        "type": "ptp",
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": str(POD_RANGE)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    network = {"cniVersion": "0.4.0", "name": "pods", "plugins": [link]}
    return _written("cni/10-pods.conflist", json.dumps(network, indent=2)).parent


def containerd() -> Words:
    """The container runtime; its volatile state lies where socket paths stay short."""
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    runc = shutil.which("runc", path=SYSTEM_PATH) or "runc"
    text = f"""version = 2
root = "{state_folder() / "containerd"}"
state = "{runtime_folder() / "containerd"}"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "{containerd_socket()}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{state_folder() / "containerd-opt"}"
[{cri}]
  sandbox_image = "{PAUSE_IMAGE}"
  # Without CAP_SYS_RESOURCE a lower score cannot be set, and every sandbox would fail.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  tolerate_missing_hugetlb_controller = true
[{cri}.cni]
  bin_dir = "{CNI_PLUGINS}"
  conf_dir = "{_cni_configuration()}"
[{cri}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[{cri}.containerd.runtimes.runc.options]
  BinaryName = "{runc}"
  SystemdCgroup = false
"""
    return ["containerd", "--config", _written("containerd.toml", text)]


def kubelet() -> Words:
    """The node agent. Its root is the default folder, private to the node's mount namespace."""
    folder = keys()
    configuration = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{containerd_socket()}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "resolvConf": "",
        "clusterDNS": [str(NODE_ADDRESS)],
        "clusterDomain": DNS_DOMAIN,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
        "localStorageCapacityIsolation": True,
        "maxPods": 80,
        "readOnlyPort": 0,
        "tlsCertFile": str(folder / "kubelet-serving.crt"),
        "tlsPrivateKeyFile": str(folder / "kubelet-serving.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(folder / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
    }
    flags = {
        "config": _written("kubelet.json", json.dumps(configuration, indent=2)),
        "kubeconfig": folder / "kubelet.kubeconfig",
        "hostname-override": NODE_NAME,
        "node-ip": NODE_ADDRESS,
        "node-labels": GPU_LABEL,
    }
    return [program("kubelet"), *_flags(flags)]


# In the order of start.
COMPONENTS = {
    "etcd": etcd,
    "containerd": containerd,
    "kube-apiserver": kube_apiserver,
    "kube-controller-manager": kube_controller_manager,
    "kube-scheduler": kube_scheduler,
    "kubelet": kubelet,
    "kube-proxy": kube_proxy,
    "coredns": coredns,
}


def program_path(component: str) -> Path:
    """The file a component's process runs."""
    if component == "containerd":
        return Path(shutil.which("containerd", path=SYSTEM_PATH) or "/usr/bin/containerd")
    return program(component)
