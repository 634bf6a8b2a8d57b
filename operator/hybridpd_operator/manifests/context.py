"""What every manifest is rendered from, and the parts that all of them share."""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridpd_operator import names
from hybridpd_operator.kinds import Kind, Manifest
from hybridpd_operator.settings import Images
from hybridpd_operator.spec import Service, Spec
from hybridpd_operator.spec_roles import Role


@dataclass(frozen=True)
class Context:
    """One service at one revision, with the images it uses.

    ``serving`` is the revision whose router the stable Service selects. ``tells_peers``: do its
    decode engines know a setting for where its prefill engines are?
    """

    service: Service
    revision: str
    serving: str
    images: Images
    tells_peers: bool = True

    @property
    def spec(self) -> Spec:
        """The service's spec."""
        return self.service.spec

    @property
    def name(self) -> str:
        """The service's name, from which all children are named."""
        return self.service.name

    def role(self, role: str) -> Role:
        """Spec of ``prefill`` or ``decode``."""
        return self.spec.role(role)

    @property
    def engine_image(self) -> str:
        """Image of both roles' engines."""
        return self.spec.engine.image or self.images.engine

    @property
    def connector_image(self) -> str:
        """Image the connector's packages are copied from."""
        return self.spec.connector.image or self.images.connector

    @property
    def router_image(self) -> str:
        """Image of the router."""
        return self.spec.router.image or self.images.router

    @property
    def pull_secrets(self) -> list[Manifest]:
        """The service's pull secrets, then the operator's, each once."""
        wanted = [*(one.name for one in self.spec.image_pull_secrets), *self.images.pull_secrets]
        return [{"name": name} for name in dict.fromkeys(wanted)]


def child(
    context: Context,
    kind: Kind,
    name: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """Identity, labels and owner of one child; the caller adds the rest.

    The parent's own labels and annotations are not copied: tools that track objects by them
    (Argo CD, Flux) would take the children for theirs and prune them.
    """
    service = context.service
    metadata: Manifest = {
        "name": name,
        "namespace": service.namespace,
        "labels": dict(labels),
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    if service.uid:
        metadata["ownerReferences"] = [
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": service.name,
                "uid": service.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata}
