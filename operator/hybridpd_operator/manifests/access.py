"""Service accounts, and the one right anybody gets: the router may read pods of its namespace."""

from hybridpd_operator import kinds, names
from hybridpd_operator.kinds import Manifest
from hybridpd_operator.manifests.context import Context, child


def engine_account(context: Context) -> Manifest:
    """Account of the engines. They never speak to the API server, so no token is mounted."""
    name = names.engine_account(context.name)
    account = child(context, kinds.SERVICE_ACCOUNT, name, names.service_labels(context.name))
    return {**account, "automountServiceAccountToken": False}


def router_access(context: Context) -> tuple[Manifest, ...]:
    """Account, Role and RoleBinding of the router, which finds engines by watching pods."""
    name = names.router_account(context.name)
    labels = names.role_labels(context.name, names.ROUTER)
    account = child(context, kinds.SERVICE_ACCOUNT, name, labels)
    role = child(context, kinds.ROLE, name, labels)
    binding = child(context, kinds.ROLE_BINDING, name, labels)
    return (
        # The pod asks for its token by itself; nothing else that uses the account gets one.
        {**account, "automountServiceAccountToken": False},
        {
            **role,
            "rules": [
                {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
            ],
        },
        {
            **binding,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [
                {"kind": "ServiceAccount", "name": name, "namespace": context.service.namespace}
            ],
        },
    )
