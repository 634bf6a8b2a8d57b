"""A service in a fake cluster with a reconciler, and short words for what tests do with them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from operator_fake_cluster import FakeCluster, clone

from hybridpd_operator import kinds, names
from hybridpd_operator.kinds import Kind, Manifest
from hybridpd_operator.manifests import Context
from hybridpd_operator.manifests.merge import merge
from hybridpd_operator.metrics import Metrics
from hybridpd_operator.observed import EngineSample, Pod
from hybridpd_operator.reconcile import Reconciler
from hybridpd_operator.revision import revision_of
from hybridpd_operator.settings import Images, Settings
from hybridpd_operator.spec import parse_service
from hybridpd_operator.work_queue import Key

KEY = Key("default", "demo")
IMAGES = Images(connector="hybridpd/connector:1", router="hybridpd/router:1")

#: The smallest service whose model the catalogue knows.
SPEC: Mapping[str, Any] = {
    "model": {"id": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"},
    "engine": {"image": "vllm/vllm-openai:v0.32.0"},
    "prefill": {"tensorParallelSize": 2},
    "decode": {"tensorParallelSize": 2},
}


def resource(patch: Mapping[str, Any] | None = None, **metadata: Any) -> Manifest:
    """A custom resource; ``patch`` is laid over ``SPEC``."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {
            "name": "demo",
            "namespace": "default",
            "uid": "uid-demo",
            "generation": 1,
            **metadata,
        },
        "spec": merge(SPEC, patch or {}),
    }


def context(patch: Mapping[str, Any] | None = None, *, images: Images = IMAGES) -> Context:
    """What manifests of a resource are rendered from."""
    service = parse_service(resource(patch))
    revision = revision_of(service.spec)
    return Context(service, revision, revision, images)


class FakeScraper:
    """Knows what it was told; None means that a pod did not answer."""

    def __init__(self) -> None:
        self.decode: EngineSample | None = EngineSample("", names.DECODE)
        self.asked = 0
        self.last_pods: tuple[Pod, ...] = ()

    def samples(self, pods: Sequence[Pod]) -> tuple[EngineSample, ...] | None:
        self.asked += 1
        self.last_pods = tuple(pods)
        if self.decode is None:
            return None
        return tuple(
            replace(self.decode, pod=pod.name)
            if pod.role == names.DECODE
            else EngineSample(pod.name, pod.role)
            for pod in pods
        )


class World:
    """One cluster, one operator, one service called demo."""

    def __init__(self, cluster: FakeCluster, ticking: Iterator[datetime]) -> None:
        self.cluster = cluster
        self.scraper = FakeScraper()
        self.metrics = Metrics()
        self._ticking = ticking
        self.restart_operator()

    def restart_operator(self, images: Images = IMAGES) -> None:
        """A new process: nothing in memory survives."""
        self.reconciler = Reconciler(
            self.cluster,
            Settings(images=images),
            self.scraper,
            self.metrics,
            clock=lambda: next(self._ticking),
        )

    def create(self, patch: Mapping[str, Any] | None = None, **metadata: Any) -> None:
        """Apply the custom resource."""
        self.cluster.put(resource(patch, **metadata))

    def edit(self, patch: Mapping[str, Any]) -> None:
        """Change the custom resource's spec."""
        live = self.service
        live["spec"] = merge(live["spec"], patch)
        live["metadata"]["generation"] += 1

    def run(self) -> float | None:
        """One pass."""
        return self.reconciler.run(KEY)

    def settle(self, *, ready: bool = True, most_passes: int = 20) -> int:
        """Passes and workload controllers in turns until a pass writes nothing."""
        for passes in range(1, most_passes + 1):
            self.cluster.taken_writes()
            self.run()
            quiet = not self.cluster.writes
            before = clone([*self.cluster.objects.values()])
            self.cluster.finish_pods()
            self.cluster.run_workloads(ready=ready)
            if quiet and before == [*self.cluster.objects.values()]:
                return passes
        raise AssertionError(f"not settled after {most_passes} passes: {self.cluster.writes}")

    @property
    def service(self) -> Manifest:
        return self.cluster.objects[(names.KIND, *KEY)]

    @property
    def status(self) -> Manifest:
        return dict(self.service.get("status") or {})

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason of one condition."""
        (found,) = (one for one in self.status["conditions"] if one["type"] == kind)
        return found["status"], found["reason"]

    def message(self, kind: str) -> str:
        (found,) = (one for one in self.status["conditions"] if one["type"] == kind)
        return str(found["message"])

    def event_reasons(self) -> list[str]:
        return [event["reason"] for event in self.cluster.events]

    def child(self, kind: Kind, name: str) -> Manifest:
        return self.cluster.objects[(kind.name, KEY.namespace, name)]

    def routers(self) -> list[Manifest]:
        return [
            one
            for (kind, _, _), one in self.cluster.objects.items()
            if kind == kinds.DEPLOYMENT.name
        ]

    def revision_now(self) -> str:
        return revision_of(parse_service(self.service).spec)
