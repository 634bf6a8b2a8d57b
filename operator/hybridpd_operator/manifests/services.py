"""Services: the stable one for clients, and a headless one per role and revision."""

from hybridpd_operator import kinds, names
from hybridpd_operator.kinds import Manifest
from hybridpd_operator.manifests.context import Context, child


def stable(context: Context) -> Manifest:
    """The Service clients talk to. Its selector names one revision's router, never two."""
    labels = names.role_labels(context.name, names.ROUTER)
    service = child(context, kinds.SERVICE, names.router_service(context.name), labels)
    return {
        **service,
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector_labels(context.name, names.ROUTER, context.serving),
            "ports": [
                {
                    "name": "http",
                    "port": names.HTTP_PORT,
                    "targetPort": "http",
                    "protocol": "TCP",
                }
            ],
        },
    }


def headless(context: Context, role: str) -> Manifest:
    """DNS names of one role's pods at one revision, also of those that are not ready yet: decode
    engines meet a prefill engine while it warms up, and keep it while it drains."""
    name = names.revisioned(context.name, role, context.revision)
    labels = names.role_labels(context.name, role, context.revision)
    return {
        **child(context, kinds.SERVICE, name, labels),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.selector_labels(context.name, role, context.revision),
            "ports": [
                {"name": "http", "port": names.HTTP_PORT, "targetPort": "http", "protocol": "TCP"},
                {
                    "name": "nixl",
                    "port": context.spec.connector.side_channel_port,
                    "targetPort": "nixl",
                    "protocol": "TCP",
                },
            ],
        },
    }
