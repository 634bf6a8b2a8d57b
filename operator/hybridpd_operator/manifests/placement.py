"""Where pods may run: node labels, affinity, tolerations."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hybridpd_operator.kinds import Manifest
from hybridpd_operator.spec import Spec
from hybridpd_operator.spec_roles import Role, Router

_GPU_PRODUCT_LABEL: Final = "nvidia.com/gpu.product"
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"


def of_engine(spec: Spec, side: Role) -> Manifest:
    """Placement of one role's engines; empty settings leave no field behind.

    An affinity of the user replaces the one made from ``gpuProducts``, as the API says.
    """
    affinity = dict(side.affinity or {})
    if not affinity and side.gpu_products and spec.engine.gpu_resource_name:
        affinity = _on_products(side.gpu_products)
    return _placement(side.node_selector, affinity, list(side.tolerations))


def of_router(router: Router) -> Manifest:
    """Placement of the router."""
    return _placement(router.node_selector, dict(router.affinity or {}), list(router.tolerations))


def _on_products(products: Sequence[str]) -> Manifest:
    """Affinity for nodes whose GPUs are one of ``products``."""
    wanted = {"key": _GPU_PRODUCT_LABEL, "operator": "In", "values": list(products)}
    terms = [{"matchExpressions": [wanted]}]
    return {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": terms}}}


def _placement(
    node_selector: Mapping[str, str], affinity: Manifest, tolerations: list[Any]
) -> Manifest:
    placed: Manifest = {
        "nodeSelector": dict(node_selector),
        "affinity": affinity,
        "tolerations": [dict(toleration) for toleration in tolerations],
    }
    return {key: value for key, value in placed.items() if value}
