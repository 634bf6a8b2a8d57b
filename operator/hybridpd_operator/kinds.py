"""The Kubernetes kinds the operator reads and writes, and their REST paths."""

from dataclasses import dataclass
from typing import Any, Final

from hybridpd_operator import names

#: One Kubernetes object as parsed JSON.
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One namespaced kind. ``plural`` is its name in REST paths."""

    name: str
    api_version: str
    plural: str

    @property
    def group(self) -> str:
        """API group; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """REST path of the collection, one object or its subresource."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        scope = f"/namespaces/{namespace}" if namespace else ""
        tail = "".join(f"/{part}" for part in (name, subresource) if part)
        return f"{root}{scope}/{self.plural}{tail}"


HYBRIDPD_SERVICE: Final = Kind(names.KIND, names.API_VERSION, names.PLURAL)
POD: Final = Kind("Pod", "v1", "pods")
CONFIG_MAP: Final = Kind("ConfigMap", "v1", "configmaps")
EVENT: Final = Kind("Event", "v1", "events")

STATEFULSET: Final = Kind("StatefulSet", "apps/v1", "statefulsets")
DEPLOYMENT: Final = Kind("Deployment", "apps/v1", "deployments")
SERVICE: Final = Kind("Service", "v1", "services")
SERVICE_ACCOUNT: Final = Kind("ServiceAccount", "v1", "serviceaccounts")
ROLE: Final = Kind("Role", "rbac.authorization.k8s.io/v1", "roles")
ROLE_BINDING: Final = Kind("RoleBinding", "rbac.authorization.k8s.io/v1", "rolebindings")
DISRUPTION_BUDGET: Final = Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets")

#: Everything a pass may create, in the order in which it is applied: rights and names first,
#: workloads after them.
CHILD_KINDS: Final = (
    SERVICE_ACCOUNT,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    DISRUPTION_BUDGET,
    STATEFULSET,
    DEPLOYMENT,
)

_BY_NAME: Final = {
    kind.name: kind for kind in (HYBRIDPD_SERVICE, POD, CONFIG_MAP, EVENT, *CHILD_KINDS)
}


def kind_of(manifest: Manifest) -> Kind:
    """Look up the kind of ``manifest``. KeyError for a kind the operator does not handle."""
    return _BY_NAME[manifest["kind"]]


def kind_named(name: str) -> Kind:
    """Look up a kind by its name. KeyError for one the operator does not handle."""
    return _BY_NAME[name]
