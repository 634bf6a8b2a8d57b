"""Reads everything one pass depends on. The first of gather, decide, act."""

import json
from collections.abc import Mapping
from typing import Any

from hybridpd_operator import names
from hybridpd_operator.cluster_api import Cluster, NotFoundError, RefusedError
from hybridpd_operator.kinds import CHILD_KINDS, CONFIG_MAP, HYBRIDPD_SERVICE, POD
from hybridpd_operator.observed import EngineSample, Observed, Pod, child_from, pod_from
from hybridpd_operator.scrape import Scraper


def gather(cluster: Cluster, namespace: str, name: str, scraper: Scraper | None) -> Observed | None:
    """Observe one service, or None when it is gone. ``scraper`` None: do not ask engines.

    Raises ClusterError when the cluster does not answer; a ConfigMap that is missing or unreadable
    is an observation, not an error.
    """
    try:
        resource = cluster.get(HYBRIDPD_SERVICE, namespace, name)
    except NotFoundError:
        return None
    if "deletionTimestamp" in resource["metadata"]:
        return Observed(resource)
    ours = names.selector_text(
        {names.LABEL_SERVICE: name, names.LABEL_MANAGED_BY: names.MANAGED_BY}
    )
    children = tuple(
        child_from(manifest)
        for kind in CHILD_KINDS
        for manifest in cluster.list(kind, namespace, ours)
    )
    pods = tuple(pod_from(manifest) for manifest in cluster.list(POD, namespace, ours))
    config, config_problem = _model_config(cluster, namespace, resource)
    revision = (resource.get("status") or {}).get("revision", "")
    return Observed(
        resource=resource,
        children=children,
        pods=pods,
        config=config,
        config_problem=config_problem,
        samples=_samples(scraper, pods, revision),
    )


def _samples(
    scraper: Scraper | None, pods: tuple[Pod, ...], revision: str
) -> tuple[EngineSample, ...] | None:
    """Counters of the engines that serve; None when nobody asked or nobody serves."""
    serving = [
        pod
        for pod in pods
        if pod.ready and not pod.deleting and pod.ip
        if pod.revision == revision and pod.role in names.ENGINE_ROLES
    ]
    return scraper.samples(serving) if scraper and serving else None


def _model_config(
    cluster: Cluster, namespace: str, resource: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, str]:
    """The ``config.json`` that ``spec.model.config.configMap`` names, or why it cannot be read."""
    where = _config_map_key(resource)
    if where is None:
        return None, ""
    name, key = where
    try:
        data = cluster.get(CONFIG_MAP, namespace, name).get("data") or {}
    except NotFoundError:
        return None, f"expected a ConfigMap {name!r} in this namespace, got none"
    except RefusedError as error:
        return None, f"expected to read ConfigMap {name!r}, got {error.message}"
    if key not in data:
        return None, f"expected key {key!r} in ConfigMap {name!r}, got {sorted(data)}"
    try:
        config = json.loads(data[key])
    except (ValueError, RecursionError) as error:
        return None, f"expected JSON in ConfigMap {name!r} at {key!r}, got {error}"
    if not isinstance(config, dict):
        return None, f"expected a JSON object in ConfigMap {name!r} at {key!r}"
    return config, ""


def _config_map_key(resource: Mapping[str, Any]) -> tuple[str, str] | None:
    """Name and key, read tolerantly: the spec is checked later and as a whole."""
    node: Any = resource.get("spec")
    for field in ("model", "config", "configMap"):
        node = node.get(field) if isinstance(node, dict) else None
    if not isinstance(node, dict) or not isinstance(node.get("name"), str):
        return None
    return node["name"], str(node.get("key") or "config.json")
