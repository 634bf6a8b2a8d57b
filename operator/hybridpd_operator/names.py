"""Every name, label and annotation the operator writes. Nothing else spells one out."""

import hashlib
import re
from typing import Final

GROUP: Final = "hybridpd.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "HybridPDService"
PLURAL: Final = "hybridpdservices"
FIELD_MANAGER: Final = "hybridpd"

PREFILL: Final = "prefill"
DECODE: Final = "decode"
ROUTER: Final = "router"
ENGINE_ROLES: Final = (PREFILL, DECODE)

LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_INSTANCE: Final = "app.kubernetes.io/instance"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
LABEL_SERVICE: Final = f"{GROUP}/service"
LABEL_ROLE: Final = f"{GROUP}/role"
LABEL_REVISION: Final = f"{GROUP}/revision"
MANAGED_BY: Final = "hybridpd"
APP_NAME: Final = "hybridpd"

#: Hash of the object as it was rendered; a difference means that we want something else now.
ANNOTATION_RENDERED: Final = f"{GROUP}/rendered"
#: The images a revision was started with; a new default of the operator waits for the next one.
ANNOTATION_CONNECTOR_IMAGE: Final = f"{GROUP}/connector-image"
ANNOTATION_ENGINE_IMAGE: Final = f"{GROUP}/engine-image"
#: On a revision whose decode engines are told where its prefill engines are. Older ones have a
#: connector image that does not know the setting and would refuse to start with it.
ANNOTATION_PREFILL_PEERS: Final = f"{GROUP}/prefill-peers"

ENGINE_CONTAINER: Final = "engine"
CONNECTOR_CONTAINER: Final = "connector"
ROUTER_CONTAINER: Final = "router"
CONNECTOR_VOLUME: Final = "hybridpd-connector"
CONNECTOR_PYTHON_PATH: Final = "/hybridpd/python"
SIDE_CHANNEL_KEY_VOLUME: Final = "hybridpd-side-channel-key"
SIDE_CHANNEL_KEY_FOLDER: Final = "/hybridpd/side-channel"
SIDE_CHANNEL_KEY_FILE: Final = "key"
MODEL_VOLUME: Final = "model"
MODEL_PATH: Final = "/hybridpd/model"

HTTP_PORT: Final = 8000
ROUTER_METRICS_PORT: Final = 29000

REVISION_DIGITS: Final = 8
#: A StatefulSet's name plus its 11-character controller hash has to fit a label (63).
MAX_STATEFULSET_NAME: Final = 52
#: ``<service>-prefill-<revision>`` is the longest child name that is bound by the limit above.
MAX_SERVICE_NAME: Final = MAX_STATEFULSET_NAME - len(f"-{PREFILL}-") - REVISION_DIGITS

_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?\Z")


def service_name_problem(name: str) -> str | None:
    """Say why children of a service called ``name`` could not be named, or None."""
    if len(name) > MAX_SERVICE_NAME:
        return (
            f"metadata.name: expected at most {MAX_SERVICE_NAME} characters, got {len(name)}; "
            f"names of its StatefulSets end at {MAX_STATEFULSET_NAME}: choose a shorter one"
        )
    if not _DNS_LABEL.match(name):
        return (
            f"metadata.name: expected lower-case letters, digits and '-', beginning with a letter, "
            f"got {name!r}: the Service of the same name must be a DNS label"
        )
    return None


def short_hash(text: str, digits: int = REVISION_DIGITS) -> str:
    """Return ``digits`` hex digits that stand for ``text``."""
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def revisioned(service: str, role: str, revision: str) -> str:
    """Name of a role's StatefulSet, headless Service or router Deployment at one revision."""
    return f"{service}-{role}-{revision}"


def per_role(service: str, role: str) -> str:
    """Name of what a role keeps across revisions: disruption budget, service account."""
    return f"{service}-{role}"


def engine_account(service: str) -> str:
    """Service account of the engines: no token, no rights."""
    return f"{service}-engine"


def router_account(service: str) -> str:
    """Service account, Role and RoleBinding of the router: may read pods of its namespace."""
    return f"{service}-router"


def router_service(service: str) -> str:
    """The stable Service clients talk to."""
    return service


def service_labels(service: str) -> dict[str, str]:
    """Labels of every child."""
    return {
        LABEL_NAME: APP_NAME,
        LABEL_INSTANCE: service,
        LABEL_MANAGED_BY: MANAGED_BY,
        LABEL_SERVICE: service,
    }


def selector_labels(service: str, role: str, revision: str | None = None) -> dict[str, str]:
    """The fewest labels that select one role's pods (of one revision)."""
    labels = {LABEL_SERVICE: service, LABEL_ROLE: role}
    if revision is not None:
        labels[LABEL_REVISION] = revision
    return labels


def role_labels(service: str, role: str, revision: str | None = None) -> dict[str, str]:
    """Labels of a child that belongs to one role (and revision)."""
    return {**service_labels(service), **selector_labels(service, role, revision)}


def selector_text(labels: dict[str, str]) -> str:
    """Write labels as a selector string, in a stable order."""
    return ",".join(f"{key}={labels[key]}" for key in sorted(labels))
