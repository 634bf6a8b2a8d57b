"""The operator's process: ``python3 -m hybridpd_operator``."""

import os
import random
import sys
import time
from collections.abc import Sequence

import kopf

from hybridpd_operator import handlers, logs
from hybridpd_operator.cluster import KubernetesCluster
from hybridpd_operator.cluster_api import Cluster, ClusterError
from hybridpd_operator.controller import Controller
from hybridpd_operator.endpoint import Endpoint, Freshness
from hybridpd_operator.kinds import HYBRIDPD_SERVICE
from hybridpd_operator.metrics import Metrics
from hybridpd_operator.reconcile import Reconciler
from hybridpd_operator.scrape import HttpScraper
from hybridpd_operator.settings import Settings, SettingsError, from_environment
from hybridpd_operator.work_queue import Key, WorkQueue


def main() -> int:
    """Run until a signal ends it. Returns the exit status."""
    try:
        settings = from_environment(os.environ)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    logs.configure(settings.log_level, settings.log_format)
    try:
        cluster = KubernetesCluster.connect(connections=settings.workers + 1)
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    run(settings, cluster)
    return 0


def run(settings: Settings, cluster: Cluster) -> None:
    """Wire the parts together and serve."""
    metrics = Metrics()
    freshness = Freshness(settings.resync_seconds, time.monotonic())
    scraper = HttpScraper(lambda: metrics.add("hybridpd_operator_scrape_failures_total"))
    reconciler = Reconciler(cluster, settings, scraper, metrics)
    controller = Controller(
        WorkQueue(jitter=random.random),
        reconciler.run,
        lambda: list_services(cluster, settings.watch_namespaces),
        freshness,
        metrics,
        settings.workers,
    )
    registry = kopf.OperatorRegistry()
    handlers.register(registry, controller, freshness)
    endpoint = Endpoint(settings.http_port, freshness, metrics, time.monotonic)
    try:
        kopf.run(
            registry=registry,
            settings=handlers.operator_settings(),
            standalone=True,
            clusterwide=not settings.watch_namespaces,
            namespaces=settings.watch_namespaces,
        )
    finally:
        endpoint.close()
        scraper.close()


def list_services(cluster: Cluster, namespaces: Sequence[str]) -> list[tuple[Key, int]]:
    """Every service in reach, with its generation."""
    found = [
        service
        for namespace in (namespaces or (None,))
        for service in cluster.list(HYBRIDPD_SERVICE, namespace)
    ]
    return [
        (
            Key(service["metadata"]["namespace"], service["metadata"]["name"]),
            int(service["metadata"].get("generation", 0)),
        )
        for service in found
    ]


if __name__ == "__main__":
    sys.exit(main())
