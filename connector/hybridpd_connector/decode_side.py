"""The scheduler's decode side: requests whose prompt was prefilled by another engine."""

import dataclasses
import logging
from collections.abc import Sequence

from hybridpd_connector import stats
from hybridpd_connector.errors import ParamsError, StateError
from hybridpd_connector.failure_log import FailureLog
from hybridpd_connector.failure_reasons import UNKNOWN, known, split
from hybridpd_connector.held_blocks import HeldBlocks
from hybridpd_connector.metadata import GroupFacts, Interest, Load, Pin, RequestFacts, StepOrders
from hybridpd_connector.request_blocks import Identity, facts_digest, transfer_blocks
from hybridpd_connector.request_state import Decode, DecodeEvent, next_decode
from hybridpd_connector.transfer_params import RemotePrefill, parse_load
from hybridpd_connector.transfers import ABORTED

logger = logging.getLogger(__name__)

BAD_PARAMS = "bad_params"
WRONG_ROLE = "wrong_role"
OTHER_PROMPT = "other_prompt"
BAD_BLOCKS = "bad_blocks"
CLAIM_CUT = "claim_cut"


@dataclasses.dataclass(slots=True)
class _Decoded:
    """A request of the decode side. ``tokens``: how many it would load, N-1 or 0. ``claimed``: the
    latest answer to vLLM's lookup, which an allocation follows. ``detail``: of the refusal, or what
    the rank that failed first has said. ``block_ids``: all blocks of a load, as vLLM has them."""

    tokens: int
    remote: RemotePrefill | None
    refusal: str = ""
    failure: str = ""
    detail: str = ""
    claimed: int = 0
    block_ids: Sequence[Sequence[int]] = ()
    state: Decode = Decode.WAITING

    @property
    def holds_lease(self) -> bool:
        return self.remote is not None and self.remote.tokens > 0


def _refused(tokens: int, error: ParamsError) -> _Decoded:
    return _Decoded(tokens, None, BAD_PARAMS, detail=str(error))


class DecodeSide:
    """Requests whose prompt was prefilled by another engine."""

    def __init__(
        self,
        identity: Identity,
        groups: Sequence[GroupFacts],
        recorder: stats.Stats,
        failures: FailureLog,
    ) -> None:
        self._identity = identity
        self._groups = tuple(groups)
        self._requests: dict[str, _Decoded] = {}
        self._interests: list[Interest] = []
        self._leaves: list[str] = []
        self._aborts: dict[str, None] = {}
        self._loads: list[Load] = []
        self._abandons: list[str] = []
        self._queues = (self._loads, self._interests, self._leaves, self._aborts, self._abandons)
        self.held = HeldBlocks(identity.tp_size)
        self._stats = recorder
        self._failures = failures

    def arrive(self, facts: RequestFacts) -> None:
        """A request that asks for a load arrives; from now on its lease is renewed."""
        loads = facts.reads_cache and facts.token_ids is not None
        tokens = facts.prompt_tokens - 1 if loads else 0
        try:
            remote = parse_load(facts.params or {}, facts.prompt_tokens)
        except ParamsError as error:
            self._requests[facts.request_id] = _refused(tokens, error)
            return
        refusal, detail = self._difference(facts, remote) if loads else ("", "")
        request_id = facts.request_id
        self._requests[request_id] = _Decoded(tokens, remote, refusal, "", detail)
        if remote.tokens > 0:
            if request_id in self._leaves:
                # An id that was aborted comes again: the ranks replace the earlier interest.
                self._leaves.remove(request_id)
            self._interests.append(Interest(request_id, remote))

    def refuse(self, facts: RequestFacts, error: ParamsError) -> None:
        """A request whose role cannot be told: it fails the way a failed load does."""
        self._requests[facts.request_id] = _refused(facts.prompt_tokens - 1, error)

    def _difference(self, facts: RequestFacts, remote: RemotePrefill) -> tuple[str, str]:
        """(why this load must not happen, detail), empty when it may: a load belongs to its
        prompt."""
        if not self._identity.consumes:
            return WRONG_ROLE, f"kv_role makes it a {self._identity.role}"
        tokens = facts.prompt_tokens - 1
        if remote.tokens != tokens:
            return OTHER_PROMPT, f"expected the state of {tokens} tokens, got {remote.tokens}"
        digest = facts_digest(facts, remote.tokens)
        if remote.digest != digest:
            found = f"{digest[:12]}, got {remote.digest[:12]}"
            return OTHER_PROMPT, f"expected digest {found}, both of {tokens} tokens"
        return "", ""

    def owns(self, request_id: str) -> bool:
        return request_id in self._requests

    def external_tokens(self, request_id: str, computed_tokens: int) -> int:
        """Tokens to claim beyond ``computed_tokens``. A refused load claims them too: vLLM's
        failure policy acts on requests that wait for a load, and on no others."""
        item = self._requests.get(request_id)
        if item is None or item.state is not Decode.WAITING:
            return 0
        claimed = item.tokens - computed_tokens
        item.claimed = claimed if claimed > 0 else 0
        return item.claimed

    def allocated(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        external_tokens: int,
        cached_tokens: int | None = None,
    ) -> None:
        """Blocks were allocated, for a load (``external_tokens`` > 0) or for computing here.

        ``block_ids`` is kept, and not to be changed by its maker.
        ``cached_tokens``: what vLLM takes from its own cache. Attention may have hit all N-1
        tokens, so that nothing was claimed, while the recurrent state is cached for fewer: then
        vLLM goes back to those and computes the rest.
        """
        item = self._requests[request_id]
        if external_tokens == 0:
            waited, failed = item.state is Decode.WAITING, item.state is Decode.RECOMPUTE
            self._move(request_id, item, DecodeEvent.SKIP)
            if waited and item.holds_lease:
                self._leaves.append(request_id)
            ignored = waited and item.tokens == 0 and item.holds_lease
            known = item.tokens if cached_tokens is None else cached_tokens
            short = waited and not item.claimed and known < item.tokens
            if failed or ignored or short:
                self._stats.count(stats.RECOMPUTED_REQUESTS)
            return
        self._move(request_id, item, DecodeEvent.LOAD)
        refusal = item.refusal
        blocks: tuple[tuple[int, ...], ...] = ()
        if not refusal and external_tokens != item.claimed:
            # A state stands for all its tokens: it cannot be used for fewer.
            refusal = CLAIM_CUT
            item.detail = f"expected {item.claimed} tokens, got {external_tokens}"
        if not refusal:
            try:
                blocks = transfer_blocks(self._groups, block_ids, item.tokens, spare=True)
            except StateError:
                logger.exception("request %s is not loaded", request_id)
                refusal = BAD_BLOCKS
        item.block_ids = block_ids
        self._loads.append(Load(request_id, blocks, item.tokens - external_tokens, refusal))

    def explain(self, request_id: str, text: str) -> None:
        """A rank says why its part of a load failed, maybe steps before the last rank has ended."""
        item = self._requests.get(request_id)
        if item is not None and not item.failure:
            item.failure, detail = split(text)
            item.detail = item.detail or detail

    def late(self, request_id: str) -> None:
        """A rank's read outlasts its deadline: the request goes on without, its blocks are held.

        One that has ended already keeps its blocks in vLLM's own way, until all ranks report.
        """
        item = self._requests.get(request_id)
        if item is None or item.state is not Decode.LOADING:
            return
        if self.held.hold(request_id, item.block_ids):
            self._abandons.append(request_id)

    def ended_load(self, request_id: str, *, failed: bool) -> None:
        """All ranks have reported a load. It may be one of another connector beside this one."""
        item = self._requests.get(request_id)
        if item is None or item.state not in (Decode.LOADING, Decode.LEAVING):
            return
        self._move(request_id, item, DecodeEvent.FAILED if failed else DecodeEvent.RECEIVED)
        if not failed:
            self._stats.count(stats.LOADS)
        elif item.failure != ABORTED:
            self._tell(request_id, item)
        self._aborts.pop(request_id, None)

    def _tell(self, request_id: str, item: _Decoded) -> None:
        reason, remote = item.failure or UNKNOWN, item.remote
        self._stats.fail(known(reason))
        engine_id = remote.engine_id if remote else ""
        address = f"{remote.host}:{remote.port}" if remote else ""
        self._failures.load_failed(request_id, engine_id, address, reason, item.detail)

    def finish(self, request_id: str) -> None:
        """The request is over: answered, aborted or failed."""
        item = self._requests[request_id]
        before = item.state
        self._move(request_id, item, DecodeEvent.FINISH)
        if before is Decode.WAITING and item.holds_lease:
            self._leaves.append(request_id)
        elif before is Decode.LOADING:
            self._aborts[request_id] = None

    @property
    def has_orders(self) -> bool:
        return any(self._queues)

    def take_orders(self, step: int, pins: tuple[Pin, ...]) -> StepOrders:
        orders = StepOrders(
            step,
            pins,
            tuple(self._interests),
            tuple(self._leaves),
            tuple(self._aborts),
            tuple(self._loads),
            tuple(self._abandons),
        )
        for queue in self._queues:
            queue.clear()
        return orders

    def _move(self, request_id: str, item: _Decoded, event: DecodeEvent) -> None:
        item.state = next_decode(item.state, event)
        if item.state is Decode.GONE:
            del self._requests[request_id]
