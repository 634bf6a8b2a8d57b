"""Keys, certificates and kubeconfigs, made with the openssl program."""

import base64
import dataclasses
import json
from pathlib import Path

from hybridpd_cluster.command import run
from hybridpd_cluster.settings import (
    API_SERVER,
    DNS_DOMAIN,
    KUBERNETES_SERVICE,
    NAME,
    NODE_ADDRESS,
    NODE_NAME,
)

_DAYS = "30"
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc")


@dataclasses.dataclass(frozen=True)
class Identity:
    """One certificate; an organization is a Kubernetes group."""

    file: str
    common_name: str
    organization: str = ""
    alternative_names: tuple[str, ...] = ()
    authority: str = "ca"
    kubeconfig: bool = False


_API_SERVER_NAMES = (
    f"IP:{NODE_ADDRESS}",
    f"IP:{KUBERNETES_SERVICE}",
    "IP:127.0.0.1",
    "DNS:kubernetes",
    "DNS:kubernetes.default",
    "DNS:kubernetes.default.svc",
    f"DNS:kubernetes.default.svc.{DNS_DOMAIN}",
)

_KUBELET_NAMES = (f"IP:{NODE_ADDRESS}", f"DNS:{NODE_NAME}")

IDENTITIES = (
    Identity("apiserver", "kube-apiserver", alternative_names=_API_SERVER_NAMES),
    Identity("apiserver-kubelet", "kube-apiserver-kubelet", "system:masters"),
    Identity("front-proxy", "front-proxy-client", authority="front-proxy-ca"),
    Identity("kubelet-serving", NODE_NAME, alternative_names=_KUBELET_NAMES),
    Identity("kubelet", f"system:node:{NODE_NAME}", "system:nodes", kubeconfig=True),
    Identity("admin", "hybridpd-admin", "system:masters", kubeconfig=True),
    Identity("controller-manager", "system:kube-controller-manager", kubeconfig=True),
    Identity("scheduler", "system:kube-scheduler", kubeconfig=True),
    Identity("proxy", "system:kube-proxy", kubeconfig=True),
    Identity("coredns", "system:coredns", kubeconfig=True),
)


def create(folder: Path) -> None:
    """Fills an empty folder with every key, certificate and kubeconfig of the cluster."""
    folder.mkdir(mode=0o700, parents=True)
    for authority in ("ca", "front-proxy-ca"):
        _openssl(
            ("req", "-x509", *_NEW_KEY, "-days", _DAYS, "-subj", f"/CN={NAME}-{authority}"),
            ("-keyout", folder / f"{authority}.key", "-out", folder / f"{authority}.crt"),
            ("-addext", "keyUsage=critical,keyCertSign,digitalSignature"),
        )
    key, public = folder / "service-account.key", folder / "service-account.pub"
    curve = ("-pkeyopt", "ec_paramgen_curve:P-256")
    _openssl(("genpkey", "-algorithm", "EC", *curve, "-out", key))
    _openssl(("pkey", "-in", key, "-pubout", "-out", public))
    for identity in IDENTITIES:
        _sign(folder, identity)
        if identity.kubeconfig:
            path = folder / f"{identity.file}.kubeconfig"
            path.write_text(kubeconfig(folder, identity.file))
            path.chmod(0o600)


def _openssl(*parts: tuple[str | Path, ...]) -> None:
    run(["openssl", *(word for part in parts for word in part)])


def _sign(folder: Path, identity: Identity) -> None:
    organization = f"/O={identity.organization}" if identity.organization else ""
    names: tuple[str, ...] = ()
    if identity.alternative_names:
        names = ("-addext", f"subjectAltName={','.join(identity.alternative_names)}")
    authority, file = folder / identity.authority, folder / identity.file
    _openssl(
        ("req", "-x509", *_NEW_KEY, "-days", _DAYS),
        ("-subj", f"{organization}/CN={identity.common_name}"),
        ("-CA", authority.with_suffix(".crt"), "-CAkey", authority.with_suffix(".key")),
        ("-addext", "basicConstraints=critical,CA:FALSE"),
        ("-addext", "extendedKeyUsage=serverAuth,clientAuth"),
        names,
        ("-keyout", file.with_suffix(".key"), "-out", file.with_suffix(".crt")),
    )


def kubeconfig(folder: Path, file: str) -> str:
    """A kubeconfig with everything inline, so that it can be copied; as JSON, which is YAML."""

    def inline(name: str) -> str:
        return base64.b64encode((folder / name).read_bytes()).decode()

    cluster = {"server": API_SERVER, "certificate-authority-data": inline("ca.crt")}
    user = {
        "client-certificate-data": inline(f"{file}.crt"),
        "client-key-data": inline(f"{file}.key"),
    }
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": NAME, "cluster": cluster}],
        "users": [{"name": file, "user": user}],
        "contexts": [{"name": NAME, "context": {"cluster": NAME, "user": file}}],
        "current-context": NAME,
    }
    return json.dumps(document, indent=2) + "\n"
