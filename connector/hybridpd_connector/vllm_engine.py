"""How the two halves are built from vLLM's configuration, and what they see of its requests.

Only ``connector`` uses this. It imports both halves, NIXL's agent among them, and is therefore
imported when vLLM builds a connector, not when it looks at the class.
"""

import logging
import os
import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from vllm import envs
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

from hybridpd_connector import __version__
from hybridpd_connector.agent import NixlAgent
from hybridpd_connector.agent_resets import SILENCE_SECONDS
from hybridpd_connector.consumer import Timeouts
from hybridpd_connector.device_sums import DeviceSums
from hybridpd_connector.handshake import Hello, RankHello, Responder
from hybridpd_connector.host_facts import read_host_facts
from hybridpd_connector.named_peers import parse_names
from hybridpd_connector.request_blocks import Identity
from hybridpd_connector.scheduler_side import SchedulerHalf
from hybridpd_connector.seals import KEY_BYTES
from hybridpd_connector.side_channel import Server
from hybridpd_connector.side_channel_client import Client
from hybridpd_connector.side_channel_keys import FIELD as KEY_FILE
from hybridpd_connector.side_channel_keys import KeyFile, tell_about_keys
from hybridpd_connector.sum_board import MODES
from hybridpd_connector.transfer_params import MAX_LEASE_SECONDS
from hybridpd_connector.vllm_cache import group_facts, read_cache, thread_setup, transfer_groups
from hybridpd_connector.vllm_compat import (
    UNPROVEN,
    EngineSettings,
    check_choice,
    check_flag,
    check_names,
    check_seconds,
    check_side_channel_host,
    unshown_of,
)
from hybridpd_connector.vllm_items import why_items_stay
from hybridpd_connector.vllm_scratch import allocate_scratch
from hybridpd_connector.vllm_zeroing import Zeroing
from hybridpd_connector.worker_side import RankCache, RankSettings, WorkerHalf

logger = logging.getLogger(__name__)

DEFAULT_BACKENDS = ("UCX",)
DEFAULT_LEASE_SECONDS = 30
DEFAULT_CHECKSUM = "sample"
DEFAULT_PREFILL_PEERS = ()
# NIXL's own thread keeps a producer moving; this look only empties its mailbox now and then.
DEFAULT_POLL_INTERVAL_SECONDS = 0.1
DEFAULT_HANDSHAKE_TIMEOUT_SECONDS = 30.0
# A read between two GPUs of a machine takes about 0.3 ms: a step waits that long for its own.
DEFAULT_STEP_WAIT_SECONDS = 0.0005
LONGEST_STEP_WAIT_SECONDS = 1
RENEW_INTERVAL_SECONDS = 0.25
HANDSHAKE_ATTEMPT_SECONDS = 5.0
SHORTEST_READ_TIMEOUT_SECONDS = 60.0
SILENCE_BEYOND_READS_SECONDS = 60.0

RankPart = tuple[RankHello, dict[str, object]]
"""What one rank adds to its engine's hello: itself, and the layout that all ranks share."""


def share_logging() -> None:
    """Let our messages appear with vLLM's, in its format and at its level."""
    ours, theirs = logging.getLogger("hybridpd_connector"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


class SchedulerSide:
    """The scheduler half with its side channel and the numbers of the groups it may transfer."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: EngineSettings) -> None:
        share_logging()
        port = envs.VLLM_NIXL_SIDE_CHANNEL_PORT
        port += vllm_config.parallel_config.data_parallel_index
        self._settings = settings
        self.identity = Identity(
            engine_id=unique(settings.engine_id),
            host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
            port=port,
            tp_size=settings.tp_size,
            role=settings.role,
            lease_seconds=lease_seconds_of(vllm_config),
            checksum_every=checksum_every_of(vllm_config),
            seal_key=secrets.token_bytes(KEY_BYTES),
        )
        self.group_ids = tuple(index for index, _ in transfer_groups(kv_cache_config))
        self.half = SchedulerHalf(self.identity, group_facts(kv_cache_config))
        self._responder = Responder(self.identity.engine_id)
        self._server: Server | None = None
        tell_about_unproven(vllm_config, settings)
        tell_about_items(vllm_config)
        keys = key_file_of(vllm_config)
        tell_about_keys(keys)
        if self.identity.produces:
            check_side_channel_host(self.identity.host)
            self._server = Server(self.identity.host, port, self._responder.answer, keys)

    def select(self, block_ids: Sequence[Sequence[int]]) -> tuple[Sequence[int], ...]:
        """The lists of the groups that are transferred."""
        return tuple(block_ids[index] for index in self.group_ids)

    def publish(self, ranks: Mapping[int, RankPart]) -> None:
        """All ranks are known: readers may shake hands from now on."""
        parts = [part for _, part in sorted(ranks.items())]
        if len(parts) != self.identity.tp_size:
            raise RuntimeError(f"expected {self.identity.tp_size} ranks, got {len(parts)}")
        layout = parts[0][1]
        if any(part[1] != layout for part in parts):
            raise RuntimeError("the ranks of this engine describe different cache layouts")
        self._responder.publish(
            Hello(
                engine_id=self.identity.engine_id,
                connector_version=__version__,
                vllm_version=self._settings.version,
                role=self.identity.role,  # type: ignore[arg-type]
                tp_size=self.identity.tp_size,
                lease_seconds=self.identity.lease_seconds,
                layout=layout,
                ranks=tuple(part[0] for part in parts),
                seal_key=self.identity.seal_key,
            )
        )

    def take_stats(self) -> dict[str, Any] | None:
        """``Stats`` data since the last call; None when nothing has happened."""
        if self._server is not None:
            self.half.note_refused(self._server.take_refused())
        return self.half.take_stats()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def unique(name: str) -> str:
    """A name of this process alone.

    An engine that is restarted under a configured ``engine_id`` must not be taken for its
    predecessor, whose leases and addresses mean nothing any more.
    """
    return f"{name}-{uuid.uuid4().hex[:12]}"


def lease_seconds_of(vllm_config: Any) -> int:
    value = vllm_config.kv_transfer_config.get_from_extra_config(
        "lease_seconds", DEFAULT_LEASE_SECONDS
    )
    return int(check_seconds("lease_seconds", value, 1, MAX_LEASE_SECONDS))


def timeouts_of(vllm_config: Any, lease_seconds: float) -> Timeouts:
    name = "handshake_timeout_seconds"
    value = vllm_config.kv_transfer_config.get_from_extra_config(
        name, DEFAULT_HANDSHAKE_TIMEOUT_SECONDS
    )
    handshake_seconds = check_seconds(name, value, 1, 3600)
    return Timeouts(
        handshake=handshake_seconds,
        attempt=min(HANDSHAKE_ATTEMPT_SECONDS, handshake_seconds),
        read=max(SHORTEST_READ_TIMEOUT_SECONDS, 2.0 * lease_seconds),
    )


def silence_seconds_of(vllm_config: Any) -> float:
    """How long readers over TCP may say nothing; 0: as long as UCX bears, see ``agent_readers``.
    Longer than they wait for a read, with the same settings."""
    extra = vllm_config.kv_transfer_config.get_from_extra_config
    if not check_flag("outlive_readers", extra("outlive_readers", True)):
        return 0.0
    read_seconds = timeouts_of(vllm_config, lease_seconds_of(vllm_config)).read
    return max(SILENCE_SECONDS, read_seconds + SILENCE_BEYOND_READS_SECONDS)


def remappable_cache(vllm_config: Any) -> bool:
    """Does vLLM's own allocator, made for sleep mode, hold the cache?"""
    return bool(getattr(vllm_config.model_config, "enable_cumem_allocator", False))


def key_file_of(vllm_config: Any) -> KeyFile | None:
    """The keys of the side channel; ``KeyFileError`` when a file is named that gives none."""
    path = vllm_config.kv_transfer_config.get_from_extra_config(KEY_FILE, None)
    return None if path is None else KeyFile(path)


def tell_about_unproven(vllm_config: Any, settings: EngineSettings) -> None:
    """What `check_settings` has let pass on demand must not be forgotten."""
    for name in vllm_config.kv_transfer_config.get_from_extra_config("unproven", ()):
        if name in UNPROVEN and unshown_of(settings) is not None:
            logger.warning("%s is carried although no test has shown its tokens right", name)
        else:
            logger.info("unproven: nothing here needs %s: it can be removed", name)


def tell_about_items(vllm_config: Any) -> None:
    """Requests with images will be computed on decode engines, and nobody would know why."""
    why = why_items_stay(vllm_config)
    if why:
        logger.warning("prompts with images or other items are not handed over: %s", why)


def checksum_every_of(vllm_config: Any) -> int:
    """Of how many prefills one is summed, 0 for none."""
    mode = vllm_config.kv_transfer_config.get_from_extra_config("checksum", DEFAULT_CHECKSUM)
    return MODES[check_choice("checksum", mode, MODES)]


def build_worker(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any], settings: EngineSettings
) -> WorkerHalf:
    """Everything of one rank: cache description, agent, worker half."""
    share_logging()
    extra = vllm_config.kv_transfer_config.get_from_extra_config
    rank = get_tensor_model_parallel_rank()
    memory = read_cache(
        vllm_config, kv_cache_config, kv_caches, rank, (settings.version, get_conv_state_layout())
    )
    agent = NixlAgent(
        unique(f"{settings.engine_id}/{rank}"),
        check_names("backends", extra("backends", DEFAULT_BACKENDS)),
        progress_thread=settings.role != "consumer",
        outlives=silence_seconds_of(vllm_config),
    )
    checksum_every = checksum_every_of(vllm_config)
    summer = None
    if checksum_every:
        summer = DeviceSums(memory.layout, memory.placement, memory.regions, memory.views)
    lease_seconds = lease_seconds_of(vllm_config)
    name_fast = "require_fast_link"
    return WorkerHalf(
        RankCache(
            memory.layout,
            memory.placement,
            memory.regions,
            Zeroing(memory.regions, memory.views),
            allocate_scratch(kv_caches) if settings.role != "producer" else None,
            summer,
        ),
        agent,
        Client(keys=key_file_of(vllm_config)),
        RankSettings(
            engine_id=settings.engine_id,
            role=settings.role,
            lease_seconds=lease_seconds,
            poll_interval_seconds=check_seconds(
                "poll_interval_seconds",
                extra("poll_interval_seconds", DEFAULT_POLL_INTERVAL_SECONDS),
                0.001,
                60,
            ),
            renew_interval_seconds=min(RENEW_INTERVAL_SECONDS, lease_seconds / 12),
            timeouts=timeouts_of(vllm_config, lease_seconds),
            host=read_host_facts(os.environ, remappable=remappable_cache(vllm_config)),
            require_fast_link=check_flag(name_fast, extra(name_fast, False)),
            step_wait_seconds=check_seconds(
                "step_wait_seconds",
                extra("step_wait_seconds", DEFAULT_STEP_WAIT_SECONDS),
                0,
                LONGEST_STEP_WAIT_SECONDS,
            ),
            checksum_every=checksum_every,
            checksum_required=checksum_every == MODES["all"],
            prefill_peers=parse_names(extra("prefill_peers", DEFAULT_PREFILL_PEERS)),
        ),
        prepare_thread=thread_setup(kv_caches),
    )
