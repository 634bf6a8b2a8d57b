"""The class that vLLM loads: translates between vLLM's objects and the two halves.

    --kv-transfer-config '{"kv_connector": "HybridNixlConnector",
        "kv_connector_module_path": "hybridpd_connector.connector", "kv_role": "kv_producer"}'

vLLM builds one instance in the scheduler's process and one per rank; each holds one half. The
module is imported in the API server too, hence everything heavy is imported when a half is built.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM before 0.32 does not split hits by source
    HIT_SOURCE: Any = None
else:
    HIT_SOURCE = CacheHitSource.P2P

from hybridpd_connector.closing import close_within
from hybridpd_connector.metadata import NO_ORDERS, NO_RESULTS, RequestFacts, StepOrders
from hybridpd_connector.vllm_compat import check_engine
from hybridpd_connector.vllm_items import ends_in_item, items_of, why_items_stay
from hybridpd_connector.vllm_metrics import HybridPromMetrics, HybridStats, stats_from

if TYPE_CHECKING:
    from hybridpd_connector.scheduler_side import SchedulerHalf
    from hybridpd_connector.vllm_engine import RankPart, SchedulerSide
    from hybridpd_connector.worker_side import WorkerHalf

CLASS_NAME = "HybridNixlConnector"
COMPLETED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")


class HandshakeMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """One rank's part of the hello; travels from the worker to the scheduler's process."""

    def __init__(self, part: "RankPart") -> None:
        self.part = part


class ConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler half's orders of one step."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders

    def __reduce__(self) -> str | tuple[Any, ...]:
        # How vLLM sends it to its ranks; most steps order nothing, which is sent by name.
        return "NOTHING" if self is NOTHING else (ConnectorMetadata, (self.orders,))


NOTHING = ConnectorMetadata(NO_ORDERS)


class RankReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What vLLM's own results have no place for. ``reasons``: why loads failed, request id ->
    reason; the first rank that failed names it. ``late``, ``landed``: see ``LateReads``, with the
    number of ranks that have landed."""

    def __init__(
        self, reasons: dict[str, str], late: frozenset[str], landed: dict[str, int]
    ) -> None:
        self.reasons = reasons
        self.late = late
        self.landed = landed

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "RankReport":
        if not isinstance(other, RankReport):
            return self
        landed = Counter(self.landed) + Counter(other.landed)
        return RankReport({**other.reasons, **self.reasons}, self.late | other.late, dict(landed))


class HybridNixlConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands hybrid models' caches from prefill to decode engines over NIXL. See the module."""

    _cache_hit_source = HIT_SOURCE

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = check_engine(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerHalf | None = None
        self._reasons: dict[str, str] = {}
        self._with_items = not why_items_stay(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            from hybridpd_connector import vllm_engine

            self._scheduler = vllm_engine.SchedulerSide(
                vllm_config, kv_cache_config, self._settings
            )

    # --- what vLLM asks the class -------------------------------------------------------------

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A load brings the whole recurrent state, so attention may be cached further here."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads outside tokens: a head of a block is contiguous, so a rank reads only its own."""
        return "HND"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HybridStats:
        return stats_from(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HybridPromMetrics:
        return HybridPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Registered memory must stay mapped."""
        return False

    # --- scheduler ----------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        if not request.kv_transfer_params:
            return
        if self._side.half.on_new_request(facts_of(request, with_items=self._with_items)):
            drop_last_token(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        half = self._side.half
        tokens = half.decode.external_tokens(request.request_id, num_computed_tokens)
        return tokens, tokens > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self._side.group_ids

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        side, request_id = self._side, request.request_id
        if not side.half.decode.owns(request_id):
            return
        ids: Sequence[Sequence[int]] = ()
        if num_external_tokens > 0:
            ids = side.select(blocks.get_block_ids())
        cached = cached_tokens_of(request)
        side.half.on_allocated(request_id, ids, num_external_tokens, cached)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        orders = self._half.build_orders()
        return NOTHING if orders is NO_ORDERS else ConnectorMetadata(orders)

    def update_connector_output(self, connector_output: Any) -> None:
        report = getattr(connector_output, "kv_connector_worker_meta", None)
        reasons: dict[str, str] = {}
        if isinstance(report, RankReport):
            reasons = report.reasons
            self._half.on_late(report.late, report.landed)
        self._half.on_results(
            connector_output.finished_sending or (),
            connector_output.finished_recving or (),
            connector_output.failed_recving or (),
            reasons,
        )

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._half.decode.held.bind(gpu_block_pool)

    def has_pending_push_work(self) -> bool:
        """Go on stepping: a rank may have to say that a late read has ended."""
        return self._half.decode.held.count > 0

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        side = self._side
        completed = request.status.name in COMPLETED
        return side.half.on_finished(
            request.request_id,
            request.num_computed_tokens if completed else None,
            side.select(block_ids),
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._side.publish(
            {
                tp_rank: item.part
                for (_, tp_rank), item in metadata.items()
                if isinstance(item, HandshakeMetadata)
            }
        )

    # --- worker -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        from hybridpd_connector.vllm_engine import build_worker

        self._worker = build_worker(
            self._vllm_config, self._kv_cache_config, kv_caches, self._settings
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """vLLM asks once, when the engine has warmed up and recorded its graphs."""
        half = self._rank
        half.warmed_up()
        return HandshakeMetadata((half.hello(), half.layout.to_dict()))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """The first call of every step, before the model runs: orders are taken here."""
        self._absorb(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.has_connector_metadata():
            self._absorb(self._get_connector_metadata())
        self._rank.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: vLLM runs a request only after its load was reported."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to save: readers take the pages from the cache itself."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results, reasons = self._rank.poll(ended=bool(finished_req_ids))
        if results is NO_RESULTS:
            return KVConnectorTransferResults()
        self._reasons.update(reasons)
        return KVConnectorTransferResults(
            finished_sending=set(results.sent),
            finished_recving=set(results.received),
            failed_recving=set(results.failed),
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        reads = self._rank.take_late()
        if not (self._reasons or reads.late or reads.landed):
            return None
        reasons, self._reasons = self._reasons, {}
        return RankReport(reasons, reads.late, dict(Counter(reads.landed)))

    # --- both ---------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> HybridStats | None:
        """What this half has counted since the last call."""
        half = self._worker or self._side
        data = half.take_stats()
        return None if data is None else HybridStats(data)

    def shutdown(self) -> None:
        for half in (self._worker, self._scheduler):
            if half is not None:
                close_within(half.close)

    @property
    def _side(self) -> "SchedulerSide":
        if self._scheduler is None:
            raise RuntimeError("a scheduler method was called on a worker's connector")
        return self._scheduler

    @property
    def _half(self) -> "SchedulerHalf":
        return self._side.half

    @property
    def _rank(self) -> "WorkerHalf":
        if self._worker is None:
            raise RuntimeError("a worker method was called before register_kv_caches")
        return self._worker

    def _absorb(self, metadata: KVConnectorMetadata) -> None:
        # Of most steps, and each shows it twice.
        if metadata is not NOTHING and isinstance(metadata, ConnectorMetadata):
            self._rank.absorb(metadata.orders)


def facts_of(request: Any, *, with_items: bool = True) -> RequestFacts:
    """What the scheduler half needs to know of a vLLM request. ``with_items``: prompts with images
    or other items are handed over; without that such a prompt is like one of embeddings, as is one
    that ends in an item, or that goes on when its answer has ended (``resumable``)."""
    items, lora = items_of(request), request.lora_request
    stays = getattr(request, "prompt_embeds", None) is not None
    stays = stays or getattr(request, "resumable", False)
    if items and not stays:
        stays = not with_items or ends_in_item(request)
    # In the order of the fields: names would make it take twice as long.
    return RequestFacts(
        request.request_id,
        request.num_prompt_tokens,
        None if stays else request.prompt_token_ids,
        request.kv_transfer_params,
        lora.lora_name if lora else "",
        items,
        getattr(request, "cache_salt", None) or "",
        not request.get_skip_reading_prefix_cache(),
    )


def cached_tokens_of(request: Any) -> int | None:
    """Tokens that this engine's own prefix cache gives a request that is about to be allocated."""
    return getattr(getattr(request, "prefill_stats", None), "num_local_cached_tokens", None)


def drop_last_token(request: Any) -> None:
    """Make a request end one token earlier, and after its prefill. Called once, at arrival."""
    # The list of prompt ids may belong to others too (n > 1 and the client, in one process); the
    # other one is the request's own, and views of it exist.
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1


def register() -> None:
    """Make the class known by name, so that MultiConnector can find its statistics."""
    try:
        KVConnectorFactory.register_connector(CLASS_NAME, __name__, CLASS_NAME)
    except ValueError:
        # vLLM imports this module once per process, but a test may have registered it before.
        return


register()
