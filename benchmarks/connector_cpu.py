"""CPU time of the connector's own code per request, beside vLLM's; transfers cost nothing.

Both connectors' methods are called in the order in which vLLM calls them, on made-up requests of a
published model (TP 1), with a transfer agent that does nothing: what is left is the Python of the
scheduler and worker sides. vLLM's scheduler and worker objects are made without their constructors,
which want a running engine (see `intree.py`). Told is CPU time of the calling thread, in
microseconds per request, with 1 to 256 requests in flight at once, what one step costs while so
many reads are in flight, what a step without any transfer costs, scheduler and worker together, and
last, of the schedulers' rows, what vLLM's connector does not do: the digest by which a load belongs
to its prompt, and P's copy of the prompt without its last token. Medians of the rounds, without
garbage collections. "cold": the CPU's caches were swept before each call, as by the model's work
between two requests.

    python benchmarks/connector_cpu.py [--prompt 2000]
"""

from __future__ import annotations

import argparse
import collections
import gc
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import TPMapping

import idle_steps
import prompt_work
from hybridpd_connector.agent_api import MemoryRegion, Notification, ReadState
from hybridpd_connector.connector import HybridNixlConnector
from hybridpd_connector.consumer import Timeouts
from hybridpd_connector.handshake import Hello, Responder
from hybridpd_connector.metadata import GroupFacts
from hybridpd_connector.notifications import Release, encode
from hybridpd_connector.request_blocks import Identity
from hybridpd_connector.scheduler_side import SchedulerHalf
from hybridpd_connector.tail_zeros import Tail
from hybridpd_connector.worker_side import RankCache, RankSettings, WorkerHalf
from hybridpd_testkit.pd_client import PREFILL_PARAMS
from intree import InTree
from shapes import NANO, Shape, shape_of
from stand_ins import Agent, Blocks, Nixl, Request

IN_FLIGHT = (1, 16, 64, 256)
ROUNDS = 15
BLOCKS = 4096
SWEPT_BYTES = 48 << 20
NEVER = 3600.0


def groups_of(shape: Shape) -> list[GroupFacts]:
    return [GroupFacts(kind, shape.layout.block_tokens) for kind in shape.layout.group_kinds]


class Ours:
    """Both engines of the bundled connector, without engines."""

    def __init__(self, shape: Shape, zero: Callable[[Iterable[Tail]], Any] = list) -> None:
        self.shape, self._zero = shape, zero
        self.agents = {"p": Agent(), "d": Agent()}
        self.responder = Responder("p")
        self.p, self.d = self._engine("p", "producer"), self._engine("d", "consumer")
        worker = self.p._worker
        self.responder.publish(
            Hello("p", "0.1.0", "0.32.0", "producer", 1, 30, shape.layout.to_dict(),
                  (worker.hello(),))
        )  # fmt: skip

    def _engine(self, name: str, role: str) -> Any:
        connector: Any = object.__new__(HybridNixlConnector)
        identity = Identity(name, "10.0.0.1", 5600, 1, role, 30)
        half = SchedulerHalf(identity, groups_of(self.shape))
        connector._scheduler = SimpleNamespace(half=half, group_ids=(0,), select=tuple)
        connector._reasons, connector._connector_metadata = {}, None
        connector._with_items = True
        placement = self.shape.placement(0, BLOCKS)
        size = self.shape.geometry.page_bytes * BLOCKS
        regions = tuple(MemoryRegion(base, size) for base in placement.region_bases)
        cache = RankCache(self.shape.layout, placement, regions, self._zero)
        settings = RankSettings(name, role, 30, NEVER, NEVER, Timeouts(), step_wait_seconds=0.0005)
        connector._worker = WorkerHalf(cache, self.agents[name], self, settings)
        return connector

    def ask(self, host: str, port: int, question: bytes, timeout_seconds: float) -> bytes:
        return self.responder.answer(question)

    def hang_up(self) -> None:
        """No question is ever on its way here."""

    def step(self, connector: Any) -> Any:
        meta = connector.build_connector_meta(None)
        connector.handle_preemptions(meta)
        connector._connector_metadata = meta
        connector.start_load_kv(None)
        return connector.get_transfer_results(set())

    def end_lease(self, ids: list[str]) -> None:
        sequence = self.p._scheduler.half.prefill._sequence - len(ids)
        self.agents["p"].notifications = [
            Notification("d", encode(Release(one, sequence + at + 1, "d", one, 0, 1)))
            for at, one in enumerate(ids)
        ]

    def pending(self, pending: bool) -> None:
        self.agents["d"].state = ReadState.PENDING if pending else ReadState.DONE


class Theirs:
    """The same of vLLM's connector."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.p, self.d = self._scheduler(), self._scheduler()
        self.p_worker, self.d_worker = self._worker(), self._worker()

    def _cache_config(self) -> Any:
        groups = [SimpleNamespace(kv_cache_spec=None) for _ in self.shape.layout.group_kinds]
        return SimpleNamespace(select_transfer_block_ids=lambda ids: ids, transfer_groups=groups)

    def _scheduler(self) -> Any:
        made: Any = object.__new__(NixlPullConnectorScheduler)
        kinds = self.shape.layout.group_kinds
        made.vllm_config = SimpleNamespace(
            num_prefill_lookahead_tokens=0,
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, pipeline_parallel_size=1
            ),
        )
        made.kv_cache_config = self._cache_config()
        made.engine_id, made.side_channel_host, made.side_channel_port = "p", "10.0.0.1", 5600
        made.transfer_tp_size = 1
        made.use_host_buffer = made.is_bidirectional_kv_xfer_enabled = False
        made._bounded_replay = False
        made._has_mamba = made._is_hma_required = "state" in kinds
        made.blocks_per_sw = [0] * len(kinds)
        made._ssm_spec_blocks = [0 if kind == "state" else None for kind in kinds]
        made._kv_lease_duration, made._heartbeat_interval = 30, 5
        made._last_heartbeat_time, made.kv_recompute_threshold = 0.0, 64
        for name in ("_reqs_need_recv", "_reqs_need_save", "_reqs_need_send",
                     "_heartbeat_by_engine", "_heartbeat_req_engine"):  # fmt: skip
            setattr(made, name, {})
        made._reqs_in_batch, made._reqs_not_processed = set(), set()
        return made

    def _worker(self) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

        made = InTree(self.shape, BLOCKS).worker
        made.nixl_wrapper, made.engine_id = Nixl(), "d"
        made.kv_cache_config = self._cache_config()
        made.tp_rank = made.pcp_rank = 0
        made.dcp_size = 1
        made.block_size = self.shape.layout.block_tokens
        made.xfer_stats = NixlKVConnectorStats()
        ratio = self.shape.geometry.ratio
        info = SimpleNamespace(
            remote_tp_size=1, remote_dcp_size=1, remote_block_size=made.block_size,
            remote_physical_blocks_per_logical=ratio,
        )  # fmt: skip
        made.transfer_topo = SimpleNamespace(
            get_engine_info=lambda engine: info,
            tp_ratio=lambda size: 1,
            block_size_ratio=lambda size: 1,
        )
        kinds = self.shape.layout.group_kinds
        made.tp_mappings = {"p": TPMapping(((0,),) * len(kinds), (0,), {0: 0}, 0)}
        made.dst_region_group_ids = collections.defaultdict(list, {"p": made.region_group_ids})
        made.dst_uses_region_group_mapping = {"p": False}
        counts = None if made._has_mamba else made.region_num_blocks
        made.dst_region_num_blocks = {"p": counts, "d": counts}
        made.dst_num_blocks = {"p": made.num_blocks, "d": made.num_blocks}
        made.dst_xfer_side_handles = {"p": {0: 1}}
        made.src_xfer_handles_by_block_size = {made.block_size: 1}
        made._remote_agents = {"p": {(0, 0): "peer"}}
        made._engine_by_address = {("10.0.0.1", 5600): "p"}
        made._ready_requests, made._failed_recv_reqs = queue.Queue(), queue.Queue()
        made._invalid_block_ids = queue.Queue()
        made._recving_transfers = collections.defaultdict(list)
        made._handshake_lock, made._handshake_futures = threading.RLock(), {}
        made.consumer_notification_counts_by_req = collections.Counter()
        for name in ("_engine_last_active", "_recving_metadata", "_pending_recv_notifs",
                     "_reqs_to_send", "expected_consumer_notifications_by_req",
                     "_invalid_engine_backoff"):  # fmt: skip
            setattr(made, name, {})
        for name in ("_invalid_remote_engines", "_failed_remote_engines", "_recv_failures",
                     "_replicated_pcp_done_sending", "_reqs_to_process"):  # fmt: skip
            setattr(made, name, set())
        for name in ("_bidirectional_kv_xfer_enabled", "use_mla", "_mixed_mem_types",
                     "use_host_buffer", "enable_permute_local_kv", "pcp_dcp_sharded",
                     "enable_heterogeneous_attn_post_process"):  # fmt: skip
            setattr(made, name, False)
        made._is_hma_required = True
        # No heartbeats: ours are sent by a thread that is not measured either.
        made._send_heartbeats = lambda metadata: None
        return made

    def pending(self, pending: bool) -> None:
        self.d_worker.nixl_wrapper.state = "PROC" if pending else "DONE"


class Meter:
    """CPU microseconds of the calling thread, by what was done."""

    def __init__(self, cold: bool = False) -> None:
        self.spent: dict[str, list[float]] = collections.defaultdict(list)
        self._swept = bytearray(SWEPT_BYTES) if cold else b""

    def run(self, what: str, share: int, action: Callable[[], Any]) -> Any:
        """Run ``action``; its time is divided by ``share``."""
        bytes(self._swept)
        begun = time.thread_time()
        result = action()
        self.spent[what].append(1e6 * (time.thread_time() - begun) / share)
        return result


def output_of(received: Any = (), sent: Any = ()) -> Any:
    return SimpleNamespace(
        finished_recving=received, finished_sending=sent, failed_recving=(),
        kv_connector_worker_meta=None,
    )  # fmt: skip


def schedule_loads(connector: Any, decodes: Sequence[Any], blocks: Sequence[Any]) -> Any:
    """What a scheduler asks a decode engine's connector in one step; the step's metadata."""
    for request, own in zip(decodes, blocks, strict=True):
        connector.on_new_request(request)
        tokens, _ = connector.get_num_new_matched_tokens(request, 0)
        connector.update_state_after_alloc(request, Blocks(own), tokens)
    return connector.build_connector_meta(None)


def round_of_ours(ours: Ours, meter: Meter, count: int, prompt: list[int], serial: int) -> None:
    """``count`` requests through P and D of the bundled connector."""
    ids = [f"cmpl-{serial}-{at}" for at in range(count)]
    blocks = [ours.shape.blocks(len(prompt), first=1 + at * 16).groups for at in range(count)]
    prefills = [Request(one, prompt, dict(PREFILL_PARAMS)) for one in ids]

    def p_scheduler() -> list[Any]:
        for request in prefills:
            ours.p.on_new_request(request)
            ours.p.get_num_new_matched_tokens(request, 0)
        return [
            ours.p.request_finished_all_groups(request, tuple(map(list, own)))[1]
            for request, own in zip(prefills, blocks, strict=True)
        ]

    answers = meter.run("P scheduler", count, p_scheduler)
    meter.run("P worker", count, lambda: ours.step(ours.p))
    decodes = [Request(one, prompt, a) for one, a in zip(ids, answers, strict=True)]

    meta = meter.run("D scheduler", count, lambda: schedule_loads(ours.d, decodes, blocks))
    ours.pending(True)

    def post() -> Any:
        ours.d.handle_preemptions(meta)
        ours.d._connector_metadata = meta
        ours.d.start_load_kv(None)

    meter.run("D worker, post", count, post)
    while ours.d._worker._consumer._transfers.in_flight < count:  # the first handshake
        time.sleep(0.01)
        ours.step(ours.d)
    for _ in range(3):
        ours.step(ours.d)
    meter.run("D worker, step while all are in flight", 1, lambda: ours.step(ours.d))
    ours.pending(False)
    # The one call that finds the end, as below; a step's other calls are in the row before.
    results = meter.run("D worker, end", count, lambda: ours.d.get_transfer_results(set()))
    if set(results.finished_recving) != set(ids) or results.failed_recving:
        raise SystemExit(f"ours: {results}")
    meter.run("D scheduler", count, lambda: ours.d.update_connector_output(output_of(ids)))
    for request in decodes:
        ours.d.request_finished_all_groups(request, ((),))
    ours.step(ours.d)
    ours.end_lease(ids)
    results = meter.run("P worker", count, lambda: ours.step(ours.p))
    if set(results.finished_sending) != set(ids):
        raise SystemExit(f"ours: {results}")
    meter.run("P scheduler", count, lambda: ours.p.update_connector_output(output_of((), ids)))


def round_of_theirs(
    theirs: Theirs, meter: Meter, count: int, prompt: list[int], serial: int
) -> None:
    """The same calls on vLLM's connector."""
    ids = [f"cmpl-{serial}-{at}" for at in range(count)]
    blocks = [theirs.shape.blocks(len(prompt), first=1 + at * 16).groups for at in range(count)]
    prefills = [Request(one, prompt, dict(PREFILL_PARAMS)) for one in ids]

    def p_scheduler() -> list[Any]:
        for request, own in zip(prefills, blocks, strict=True):
            theirs.p.on_new_request(request)
            theirs.p.get_num_new_matched_tokens(request, 0)
            theirs.p.update_state_after_alloc(request, Blocks(own), 0)
        return [
            theirs.p.request_finished(request, tuple(map(list, own)))[1]
            for request, own in zip(prefills, blocks, strict=True)
        ]

    answers = meter.run("P scheduler", count, p_scheduler)

    def p_step() -> Any:
        meta = theirs.p.build_connector_meta(None)
        theirs.p_worker.start_load_kv(meta)
        return theirs.p_worker.get_transfer_results()

    meter.run("P worker", count, p_step)
    decodes = [Request(one, prompt, a) for one, a in zip(ids, answers, strict=True)]

    meta = meter.run("D scheduler", count, lambda: schedule_loads(theirs.d, decodes, blocks))
    meta.heartbeat_by_engine = {}
    theirs.pending(True)
    meter.run("D worker, post", count, lambda: theirs.d_worker.start_load_kv(meta))
    theirs.d_worker.get_transfer_results()

    def idle_step() -> Any:
        theirs.d_worker.start_load_kv(theirs.d.build_connector_meta(None))
        return theirs.d_worker.get_transfer_results()

    meter.run("D worker, step while all are in flight", 1, idle_step)
    theirs.pending(False)
    results = meter.run("D worker, end", count, theirs.d_worker.get_transfer_results)
    if set(results.finished_recving) != set(ids) or results.failed_recving:
        raise SystemExit(f"in-tree: {results}")
    meter.run("D scheduler", count, lambda: theirs.d.update_connector_output(output_of(ids)))
    for request in decodes:
        theirs.d.request_finished(request, ([],))
    notified = [f"{one}:1".encode() for one in ids]
    theirs.p_worker.nixl_wrapper.notifications = {"d": notified}
    results = meter.run("P worker", count, p_step)
    if set(results.finished_sending) != set(ids):
        raise SystemExit(f"in-tree: {results}")
    meter.run("P scheduler", count, lambda: theirs.p.update_connector_output(output_of((), ids)))


def per_round(meter: Meter, what: str) -> float:
    """Microseconds per request: calls of one round are added, then the median of the rounds."""
    spent = meter.spent[what]
    parts = max(1, len(spent) // ROUNDS)
    rounds = [sum(spent[at : at + parts]) for at in range(0, len(spent), parts)]
    return statistics.median(rounds[2:] or rounds)


def parse(description: str | None) -> argparse.Namespace:
    """The model and the prompt that a program like this one takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=2000, help="tokens")
    parser.add_argument("--model", default=NANO)
    return parser.parse_args()


def main() -> None:
    """Print one line per kind of work and number of requests in flight."""
    options = parse(__doc__)
    shape = shape_of(options.model, 1)
    prompt = list(range(3, 3 + options.prompt))
    ours, theirs = Ours(shape), Theirs(shape)
    print(f"{options.model}, TP 1, prompt of {options.prompt} tokens; CPU us per request")
    print(f"{'':<42}{'in flight':>10}{'ours':>10}{'in-tree':>10}{'ratio':>8}")
    gc.disable()  # Rounds are alike: a collection would fall into the same call of each.
    serial = 0
    for count, cold in (*((count, False) for count in IN_FLIGHT), (1, True)):
        own, other = Meter(cold), Meter(cold)
        for _ in range(ROUNDS):
            serial += 1
            round_of_ours(ours, own, count, prompt, serial)
            round_of_theirs(theirs, other, count, prompt, serial)
        for what in own.spent:
            mine, his = per_round(own, what), per_round(other, what)
            ratio = f"{mine / his:8.2f}" if his else "       -"
            label = f"cold {count}" if cold else count
            print(f"{what:<42}{label:>10}{mine:>10.1f}{his:>10.1f}{ratio}", flush=True)
    for name, engine, halves, role in (
        ("P", ours.p, (theirs.p, theirs.p_worker), "kv_producer"),
        ("D", ours.d, (theirs.d, theirs.d_worker), "kv_consumer"),
    ):
        mine = idle_steps.microseconds(*idle_steps.ours_of(engine))
        his = idle_steps.microseconds(*idle_steps.theirs_of(*halves, role))
        what = f"{name}, a step without transfers"
        print(f"{what:<42}{0:>10}{mine:>10.1f}{his:>10.1f}{mine / his:8.2f}", flush=True)
    for what, mine in prompt_work.microseconds(prompt):
        print(f"{what:<42}{'':>10}{mine:>10.1f}{'-':>10}", flush=True)
    for connector in (ours.p, ours.d):
        connector._worker.close()


if __name__ == "__main__":
    main()
