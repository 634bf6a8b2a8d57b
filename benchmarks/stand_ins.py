"""What both connectors see of vLLM and of NIXL, doing nothing: for measuring their own code."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from vllm.v1.request import RequestStatus

from hybridpd_connector.agent_api import ReadState, ReadTelemetry


class Request:
    """What both connectors read of a vLLM request."""

    lora_request = None
    mm_features = ()
    cache_salt = None
    prompt_embeds = None
    status = RequestStatus.FINISHED_LENGTH_CAPPED

    def __init__(self, request_id: str, prompt: list[int], params: dict[str, Any]) -> None:
        self.request_id = request_id
        self.kv_transfer_params = params
        self.prompt_token_ids = list(prompt)
        self._all_token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.num_computed_tokens = len(prompt) - 1
        self.max_tokens = 16

    def get_skip_reading_prefix_cache(self) -> bool:
        return False


class Blocks:
    """What both connectors read of an allocation."""

    def __init__(self, groups: tuple[tuple[int, ...], ...]) -> None:
        self._groups = tuple(list(group) for group in groups)
        block = SimpleNamespace(block_hash=None, is_null=False)
        self.blocks = tuple([block] * len(group) for group in groups)

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self._groups

    get_unhashed_block_ids_all_groups = get_block_ids


class Agent:
    """Our agent, doing nothing; reads end when told."""

    name = "none"

    def __init__(self) -> None:
        self.state = ReadState.DONE
        self.notifications: list[Any] = []

    def register(self, regions: Any) -> None: ...
    def metadata(self) -> bytes:
        return b"none"

    def add_peer(self, metadata: bytes) -> str:
        return "peer"

    def remove_peer(self, name: str) -> None: ...
    def prepare(self, peer: Any, rows: Any, memory: Any) -> Any:
        words = (ctypes.c_uint64 * 4096).from_address(int(rows[0][0]))
        return SimpleNamespace(peer=peer, descriptor_count=1, words=words)

    def release_list(self, prepared: Any) -> None: ...
    def post_read(self, local: Any, local_ids: Any, *args: Any) -> Any:
        # The question to the lease board, answered at once: no lease has ended.
        for cell in local_ids:
            local.words[cell] = 0
        return SimpleNamespace(released=False)

    def post_ranges(self, *args: Any) -> Any:
        return SimpleNamespace(released=False)

    def poll(self, read: Any) -> ReadState:
        return self.state

    def telemetry(self, read: Any) -> ReadTelemetry:
        return ReadTelemetry(0, 0, 0.0, 0.0)  # as when NIXL cannot say

    def release_read(self, read: Any) -> bool:
        return True

    def send_notification(self, peer: str, payload: bytes) -> None: ...
    def take_notifications(self) -> list[Any]:
        taken, self.notifications = self.notifications, []
        return taken

    def close(self) -> None: ...


class Nixl:
    """NIXL's Python API for vLLM's connector, doing nothing."""

    def __init__(self) -> None:
        self.state = "DONE"
        self.notifications: dict[str, list[bytes]] = {}

    def make_prepped_xfer(self, *args: Any, **kwargs: Any) -> int:
        return 1

    def transfer(self, handle: int) -> str:
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        return self.state

    def get_xfer_telemetry(self, handle: int) -> Any:
        return SimpleNamespace(xferDuration=1, postDuration=1, totalBytes=1, descCount=1)

    def release_xfer_handle(self, handle: int) -> None: ...
    def send_notif(self, agent: str, notif_msg: bytes) -> None: ...
    def get_new_notifs(self) -> dict[str, list[bytes]]:
        taken, self.notifications = self.notifications, {}
        return taken
