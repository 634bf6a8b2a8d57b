"""Where pods may run: node labels, affinity, tolerations."""

import copy
from collections.abc import Mapping
from typing import Any, Final

from hybridpd_operator.kinds import Manifest
from hybridpd_operator.spec import Spec
from hybridpd_operator.spec_roles import Role, Router

_GPU_PRODUCT_LABEL: Final = "nvidia.com/gpu.product"
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"


def of_engine(spec: Spec, side: Role) -> Manifest:
    """Placement of one role's engines; empty settings leave no field behind."""
    affinity: Manifest = copy.deepcopy(dict(side.affinity or {}))
    if side.gpu_products and spec.engine.gpu_resource_name:
        affinity = with_node_requirement(
            affinity,
            {"key": _GPU_PRODUCT_LABEL, "operator": "In", "values": list(side.gpu_products)},
        )
    return _placement(side.node_selector, affinity, list(side.tolerations))


def of_router(router: Router) -> Manifest:
    """Placement of the router."""
    return _placement(router.node_selector, dict(router.affinity or {}), list(router.tolerations))


def with_node_requirement(affinity: Mapping[str, Any], requirement: Manifest) -> Manifest:
    """Add one requirement to every alternative of a node affinity (alternatives are or-ed)."""
    result: Manifest = copy.deepcopy(dict(affinity))
    required = result.setdefault("nodeAffinity", {}).setdefault(_REQUIRED, {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), requirement]}
        for term in terms
    ]
    return result


def _placement(
    node_selector: Mapping[str, str], affinity: Manifest, tolerations: list[Any]
) -> Manifest:
    placed: Manifest = {
        "nodeSelector": dict(node_selector),
        "affinity": affinity,
        "tolerations": [dict(toleration) for toleration in tolerations],
    }
    return {key: value for key, value in placed.items() if value}
