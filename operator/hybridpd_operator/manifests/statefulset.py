"""One StatefulSet per role and revision."""

from hybridpd_operator import kinds, names
from hybridpd_operator.kinds import Manifest
from hybridpd_operator.manifests import engine_pod
from hybridpd_operator.manifests.context import Context, child


def engines(context: Context, role: str) -> Manifest:
    """The engines of one role.

    ``Parallel``: loads take minutes to an hour, and one broken pod must not hold up the others.
    ``OnDelete``: a template that changes within a revision (a new operator, a pull policy) reaches
    a pod when it is replaced anyway; nothing restarts a loaded engine behind its users' backs.
    """
    name = names.revisioned(context.name, role, context.revision)
    began_with = {
        names.ANNOTATION_ENGINE_IMAGE: context.engine_image,
        names.ANNOTATION_CONNECTOR_IMAGE: context.connector_image,
        **({names.ANNOTATION_PREFILL_PEERS: "true"} if context.tells_peers else {}),
    }
    labels = names.role_labels(context.name, role, context.revision)
    return {
        **child(context, kinds.STATEFULSET, name, labels, began_with),
        "spec": {
            "replicas": context.role(role).replicas,
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {
                "matchLabels": names.selector_labels(context.name, role, context.revision)
            },
            "template": engine_pod.template(context, role),
        },
    }
