"""One level-triggered pass over one service: gather, decide, act, then say how it stands.

Nothing is remembered between passes that could not be read from the cluster again; a pass never
waits for anything; a pass over an unchanged world writes nothing.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from hybridpd_operator import leftovers, names, status, transitions
from hybridpd_operator.apply import Outcome, act
from hybridpd_operator.assessment import Assessment
from hybridpd_operator.cluster_api import Cluster, ClusterError, NotFoundError
from hybridpd_operator.gather import gather
from hybridpd_operator.kinds import Manifest
from hybridpd_operator.metrics import Metrics
from hybridpd_operator.observed import EngineSample, Observed
from hybridpd_operator.plan import Plan, make_plan
from hybridpd_operator.problems import INVALID_FIELD, Problem
from hybridpd_operator.scrape import Scraper
from hybridpd_operator.settings import Settings
from hybridpd_operator.validate import assess
from hybridpd_operator.verify import Transfer, Verified, judge
from hybridpd_operator.work_queue import Key

_log: Final = logging.getLogger(__name__)

#: Seconds after which a service that is changing is looked at even if no watch says so.
CHANGING_SECONDS: Final = 15.0
#: Seconds until a name is tried again that an object on its way out still holds.
WAITING_SECONDS: Final = 2.0
#: What kubelet and API server may take to finish a pod whose grace period is over.
OVERDUE: Final = timedelta(seconds=60)
_NO_ENGINE_IMAGE: Final = Problem(
    INVALID_FIELD,
    "spec.engine.image",
    "expected an image, got none, and the operator was installed without a default; name one",
)


@dataclass
class Reconciler:
    """The collaborators of a pass. One instance serves all worker threads."""

    cluster: Cluster
    settings: Settings
    scraper: Scraper
    metrics: Metrics
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    _scraped: dict[Key, datetime] = field(default_factory=dict)
    _pruned: dict[Key, tuple[Manifest, Any]] = field(default_factory=dict)
    _seen: dict[Key, tuple[str, dict[str, EngineSample]]] = field(default_factory=dict)

    def run(self, key: Key) -> float | None:
        """Make one pass; return the seconds after which to look again, or None.

        Raises ClusterError when the cluster did not answer or somebody was faster: try later.
        """
        now = self.clock()
        observed = gather(self.cluster, key.namespace, key.name, self._due_scraper(key, now))
        if observed is None or "deletionTimestamp" in observed.resource["metadata"]:
            # The garbage collector removes the children; a write would only race with it.
            self._scraped.pop(key, None)
            self._pruned.pop(key, None)
            self._seen.pop(key, None)
            return None
        assessment = self._assess(observed)
        plan = self._plan(assessment, observed)
        outcome = act(self.cluster, plan, observed, self.metrics) if plan else Outcome()
        overdue_since = _written(now - OVERDUE)
        done = status.Pass(
            observed=observed,
            assessment=assessment,
            plan=plan,
            verified=self._verified(key, observed, plan),
            stall=_stall(outcome) or leftovers.stall(observed, plan, overdue_since),
            now=_written(now),
            failure=outcome.failure,
            overdue_since=overdue_since,
            waiting=outcome.waiting,
        )
        after = status.build(done)
        self._write_status(observed, after, done.now)
        if outcome.failure:
            raise outcome.failure
        return self._again(observed, outcome, after)

    def _due_scraper(self, key: Key, now: datetime) -> Scraper | None:
        """Engines are asked once per interval, however many passes their pods' events cause."""
        last = self._scraped.get(key)
        if last and (now - last).total_seconds() < self.settings.verify_seconds / 2:
            return None
        self._scraped[key] = now
        return self.scraper

    def _assess(self, observed: Observed) -> Assessment:
        """The checks of the resource, and the one that needs the operator's own settings."""
        assessment = assess(observed.resource, observed.config, observed.config_problem)
        service = assessment.service
        if service is None or service.spec.engine.image or self.settings.images.engine:
            return assessment
        return replace(assessment, spec_problems=(*assessment.spec_problems, _NO_ENGINE_IMAGE))

    def _plan(self, assessment: Assessment, observed: Observed) -> Plan | None:
        service = assessment.service
        if service is None:
            return None
        return make_plan(service, observed, self.settings.images, may_start=assessment.may_start)

    def _write_status(self, observed: Observed, after: Manifest, now: str) -> None:
        key = Key(observed.namespace, observed.name)
        if after == observed.status or self._pruned.get(key) == (after, observed.status):
            return
        metadata = observed.resource["metadata"]
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            # With the uid, a service that was deleted and made again is not mistaken for this one.
            "metadata": {key: metadata[key] for key in ("name", "namespace", "uid")},
            "status": after,
        }
        try:
            kept = self.cluster.apply(body, subresource="status").get("status")
        except NotFoundError:
            return
        if kept != after:
            # An older definition of the resource drops what it does not know. Say it once; written
            # again on every pass it would never end.
            _log.warning("the server did not keep the whole status: upgrade the CRD")
            self._pruned[key] = (after, kept)
        self.metrics.add("hybridpd_operator_writes_total", verb="apply", kind="status")
        for notice in transitions.notices(observed.status, after):
            self._tell(transitions.event(notice, observed.resource, now))

    def _tell(self, event: Manifest) -> None:
        """Events are a courtesy: one that cannot be written is logged, not retried."""
        try:
            self.cluster.create(event)
            self.metrics.add("hybridpd_operator_writes_total", verb="create", kind="Event")
        except ClusterError as error:
            _log.warning("event %s was not written: %s", event["reason"], error)

    def _verified(self, key: Key, observed: Observed, plan: Plan | None) -> Verified | None:
        """The verdict on the shown revision; numbers of another one are not carried over."""
        revision = status.shown_revision(observed, plan)
        if not revision:
            return None
        before = observed.status
        if before.get("revision") != revision:
            return judge(None, Transfer(), None)
        of_revision, seen = self._seen.get(key, (revision, {}))
        if of_revision != revision:
            seen = {}
        last = Transfer.from_status(before.get("transfer") or {})
        told = status.condition(before, "KVTransferVerified")
        verdict = judge(observed.samples, last, told, seen)
        latest = {sample.pod: sample for sample in observed.samples or ()}
        self._seen[key] = (revision, {**seen, **latest})
        return verdict

    def _again(self, observed: Observed, outcome: Outcome, after: Manifest) -> float | None:
        if outcome.waiting:
            return WAITING_SECONDS
        # ConfigMaps and the objects of others are not watched.
        if _is(after, "Reconciling") or observed.config_problem or outcome.troubles:
            return CHANGING_SECONDS
        if _is(after, "PrefillReady") or _is(after, "DecodeReady"):
            return float(self.settings.verify_seconds)
        return None


def _written(time: datetime) -> str:
    """A time as the API server writes it; later ones sort behind earlier ones."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def _is(after: Mapping[str, Any], kind: str) -> bool:
    one = status.condition(after, kind)
    return one is not None and one["status"] == "True"


def _stall(outcome: Outcome) -> status.Stall | None:
    if not outcome.troubles:
        return None
    return status.Stall(
        outcome.troubles[0].reason, "; ".join(one.message for one in outcome.troubles)
    )
