"""The scheduler half: which requests are handed over, and what the ranks are told about them.

Pure decisions over plain values: no clock, no I/O, no vLLM. ``connector`` translates vLLM's
objects into ``RequestFacts`` and block ids, and calls the methods in this order:

    on_new_request -> external_tokens (repeatedly, changes nothing) -> on_allocated
    -> build_orders (once a step) -> on_results -> on_finished

``SchedulerHalf`` sorts requests by side; ``PrefillSide`` and ``DecodeSide`` own their requests.
"""

import dataclasses
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybridpd_connector.digest import prompt_digest
from hybridpd_connector.errors import ParamsError, StateError
from hybridpd_connector.metadata import (
    GroupFacts,
    Interest,
    Load,
    Pin,
    RequestFacts,
    StepOrders,
)
from hybridpd_connector.request_state import (
    Decode,
    DecodeEvent,
    Prefill,
    PrefillEvent,
    next_decode,
    next_prefill,
)
from hybridpd_connector.transfer_params import (
    RemotePrefill,
    answer,
    parse_decode,
    wants_prefill,
)

logger = logging.getLogger(__name__)

BAD_PARAMS = "bad_params"
WRONG_ROLE = "wrong_role"
OTHER_PROMPT = "other_prompt"

# vLLM names the children of a request with n > 1 "<index>_<parent id>".
_CHILD = re.compile(r"\d+_(.+)", re.DOTALL)

Answer = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Identity:
    """This engine, as its peers address it. ``role``: producer, consumer or both."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    role: str
    lease_seconds: int

    @property
    def produces(self) -> bool:
        return self.role in ("producer", "both")

    @property
    def consumes(self) -> bool:
        return self.role in ("consumer", "both")


def parent_of(request_id: str) -> str | None:
    """Id of the request that ``request_id`` is one of n samples of; None for others."""
    child = _CHILD.fullmatch(request_id)
    return child[1] if child else None


def state_block(block_ids: Sequence[int], scratch_blocks: int) -> int:
    """The one block of a state group's list that holds the running state.

    Mode "none" ``[m]``, speculation ``[m, s, s]``, mode "align" ``[0, ..., 0, m, s]``: the last
    one before the speculative slots.
    """
    kept = len(block_ids) - min(scratch_blocks, len(block_ids) - 1)
    if kept < 1 or block_ids[kept - 1] <= 0:
        raise StateError("state block", "a block id above 0", list(block_ids)[-4:])
    return block_ids[kept - 1]


def transfer_blocks(
    groups: Sequence[GroupFacts], block_ids: Sequence[Sequence[int]], tokens: int
) -> tuple[tuple[int, ...], ...]:
    """The blocks that hold the first ``tokens`` tokens of a request, per group.

    ``block_ids`` is vLLM's list for each transferable group. ``StateError`` when blocks are
    missing: then nothing of this request may be transferred.
    """
    if len(block_ids) != len(groups):
        raise StateError("block ids", f"{len(groups)} groups", len(block_ids))
    chosen: list[tuple[int, ...]] = []
    for facts, ids in zip(groups, block_ids, strict=True):
        if facts.kind == "state":
            chosen.append((state_block(ids, facts.scratch_blocks),))
            continue
        needed = -(-tokens // facts.block_tokens)
        if len(ids) < needed or any(block <= 0 for block in ids[:needed]):
            raise StateError("attention blocks", f"{needed} ids above 0", len(ids))
        chosen.append(tuple(ids[:needed]))
    return tuple(chosen)


def facts_digest(facts: RequestFacts, tokens: int) -> str:
    """Digest of the first ``tokens`` tokens of a prompt and all else its state depends on."""
    return prompt_digest(
        (facts.token_ids or ())[:tokens],
        lora=facts.lora,
        multimodal=facts.multimodal,
        cache_salt=facts.cache_salt,
    )


@dataclasses.dataclass
class _Prefilled:
    """A request of the prefill side. ``tokens`` is 0 when there is nothing to hand over."""

    tokens: int
    digest: str
    state: Prefill = Prefill.PREFILLING


class PrefillSide:
    """Requests whose state another engine will read."""

    def __init__(self, identity: Identity, groups: Sequence[GroupFacts]) -> None:
        self._identity = identity
        self._groups = tuple(groups)
        self._requests: dict[str, _Prefilled] = {}
        self._pins: list[Pin] = []
        self._sequence = 0
        self._answers: dict[tuple[str, str], tuple[str, Answer]] = {}

    @property
    def pinned(self) -> int:
        return sum(item.state is Prefill.PINNED for item in self._requests.values())

    def arrive(self, facts: RequestFacts) -> bool:
        """A prefill arrives. True: drop the last prompt token, the reader computes it itself.

        Recurrent state cannot be rolled back: what is handed over must end before the token whose
        output the reader needs. Nothing is handed over when that leaves no token, or when vLLM
        ignores cached prefixes for this request, or when tokens cannot be compared (embeddings).
        """
        tokens = facts.prompt_tokens - 1
        if tokens < 1 or not facts.reads_cache or facts.token_ids is None:
            tokens = 0
        self._requests[facts.request_id] = _Prefilled(tokens, facts_digest(facts, tokens))
        return tokens > 0

    def owns(self, request_id: str) -> bool:
        return request_id in self._requests

    def finish(
        self, request_id: str, computed_tokens: int | None, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, Answer | None]:
        """The prefill ended. (keep its blocks, kv_transfer_params of the answer)."""
        item = self._requests[request_id]
        if computed_tokens is None:
            self._move(request_id, PrefillEvent.DROP)
            return False, None
        if item.tokens == 0:
            self._move(request_id, PrefillEvent.DROP)
            return False, self._answer(request_id, item, tuple(() for _ in self._groups))
        parent = parent_of(request_id)
        shared = self._answers.get((parent, item.digest)) if parent else None
        if shared is not None:
            # n > 1: the client gets one child's answer, so all children name the same blocks.
            self._move(request_id, PrefillEvent.DROP)
            return False, shared[1]
        try:
            if computed_tokens != item.tokens:
                raise StateError("computed tokens", str(item.tokens), computed_tokens)
            blocks = transfer_blocks(self._groups, block_ids, item.tokens)
        except StateError:
            logger.exception("prefill %s is not handed over", request_id)
            self._move(request_id, PrefillEvent.DROP)
            return False, None
        params = self._answer(request_id, item, blocks)
        self._move(request_id, PrefillEvent.PIN)
        self._pins.append(Pin(request_id, self._sequence))
        if parent:
            self._answers[parent, item.digest] = (request_id, params)
        return True, params

    def sent(self, request_id: str) -> None:
        """All ranks have ended the lease; vLLM frees the blocks now."""
        if request_id not in self._requests:
            return
        digest = self._requests[request_id].digest
        self._move(request_id, PrefillEvent.SENT)
        parent = parent_of(request_id)
        if parent:
            self._answers.pop((parent, digest), None)

    def take_pins(self) -> tuple[Pin, ...]:
        pins = tuple(self._pins)
        self._pins.clear()
        return pins

    def _answer(
        self, request_id: str, item: _Prefilled, blocks: tuple[tuple[int, ...], ...]
    ) -> Answer:
        self._sequence += 1
        return answer(
            RemotePrefill(
                engine_id=self._identity.engine_id,
                request_id=request_id,
                host=self._identity.host,
                port=self._identity.port,
                block_ids=blocks,
                tp_size=self._identity.tp_size,
                tokens=item.tokens,
                digest=item.digest,
                lease_seconds=self._identity.lease_seconds,
                sequence=self._sequence,
            )
        )

    def _move(self, request_id: str, event: PrefillEvent) -> None:
        item = self._requests[request_id]
        item.state = next_prefill(item.state, event)
        if item.state is Prefill.GONE:
            del self._requests[request_id]


@dataclasses.dataclass
class _Decoded:
    """A request of the decode side. ``tokens``: how many it would load, N-1 or 0."""

    tokens: int
    remote: RemotePrefill | None
    refusal: str = ""
    state: Decode = Decode.WAITING

    @property
    def holds_lease(self) -> bool:
        return self.remote is not None and self.remote.tokens > 0


class DecodeSide:
    """Requests whose prompt was prefilled by another engine."""

    def __init__(self, identity: Identity, groups: Sequence[GroupFacts]) -> None:
        self._identity = identity
        self._groups = tuple(groups)
        self._requests: dict[str, _Decoded] = {}
        self._interests: list[Interest] = []
        self._leaves: list[str] = []
        self._aborts: dict[str, None] = {}
        self._loads: list[Load] = []
        self.recomputed = 0

    def arrive(self, facts: RequestFacts) -> None:
        """A request arrives; from now on its lease is renewed."""
        refusal, remote = "", None
        try:
            remote = parse_decode(facts.params)
        except ParamsError as error:
            logger.warning("request %s: %s", facts.request_id, error)
            refusal = BAD_PARAMS
        if remote is None and not refusal:
            return
        tokens = facts.prompt_tokens - 1
        if not facts.reads_cache or facts.token_ids is None:
            tokens = 0
        elif not refusal:
            refusal = self._difference(facts, remote)
        item = _Decoded(tokens, remote, refusal)
        self._requests[facts.request_id] = item
        if item.holds_lease and remote is not None:
            self._interests.append(Interest(facts.request_id, remote))

    def refuse(self, facts: RequestFacts) -> None:
        """A request whose role cannot be told: it fails the way a failed load does."""
        self._requests[facts.request_id] = _Decoded(facts.prompt_tokens - 1, None, BAD_PARAMS)

    def _difference(self, facts: RequestFacts, remote: RemotePrefill | None) -> str:
        """Why this load must not happen, empty when it may: a load belongs to its prompt."""
        if not self._identity.consumes or remote is None:
            return WRONG_ROLE
        if remote.tokens != facts.prompt_tokens - 1:
            return OTHER_PROMPT
        if remote.digest != facts_digest(facts, remote.tokens):
            return OTHER_PROMPT
        return ""

    def owns(self, request_id: str) -> bool:
        return request_id in self._requests

    def external_tokens(self, request_id: str, computed_tokens: int) -> int:
        """Tokens to claim beyond ``computed_tokens``. A refused load claims them too: vLLM's
        failure policy acts on requests that wait for a load, and on no others."""
        item = self._requests.get(request_id)
        if item is None or item.state is not Decode.WAITING:
            return 0
        return max(0, item.tokens - computed_tokens)

    def allocated(
        self, request_id: str, block_ids: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """Blocks were allocated, for a load (``external_tokens`` > 0) or for computing here."""
        item = self._requests[request_id]
        if external_tokens == 0:
            waited, failed = item.state is Decode.WAITING, item.state is Decode.RECOMPUTE
            self._move(request_id, DecodeEvent.SKIP)
            if waited and item.holds_lease:
                self._leaves.append(request_id)
            ignored = waited and item.tokens == 0 and item.holds_lease
            self.recomputed += failed or ignored
            return
        self._move(request_id, DecodeEvent.LOAD)
        refusal, blocks = item.refusal, tuple[tuple[int, ...], ...]()
        if not refusal:
            try:
                blocks = transfer_blocks(self._groups, block_ids, item.tokens)
            except StateError:
                logger.exception("request %s is not loaded", request_id)
                refusal = "bad_blocks"
        self._loads.append(Load(request_id, blocks, item.tokens - external_tokens, refusal))

    def ended_load(self, request_id: str, failed: bool) -> None:
        """All ranks have reported the load."""
        if request_id not in self._requests:
            return
        self._move(request_id, DecodeEvent.FAILED if failed else DecodeEvent.RECEIVED)
        self._aborts.pop(request_id, None)

    def finish(self, request_id: str) -> None:
        """The request is over: answered, aborted or failed."""
        item = self._requests[request_id]
        before = item.state
        self._move(request_id, DecodeEvent.FINISH)
        if before is Decode.WAITING and item.holds_lease:
            self._leaves.append(request_id)
        elif before is Decode.LOADING:
            self._aborts[request_id] = None

    def take_orders(self, step: int, pins: tuple[Pin, ...]) -> StepOrders:
        orders = StepOrders(
            step=step,
            pins=pins,
            interests=tuple(self._interests),
            leaves=tuple(self._leaves),
            aborts=tuple(self._aborts),
            loads=tuple(self._loads),
        )
        for queue in (self._interests, self._leaves, self._aborts, self._loads):
            queue.clear()
        return orders

    def _move(self, request_id: str, event: DecodeEvent) -> None:
        item = self._requests[request_id]
        item.state = next_decode(item.state, event)
        if item.state is Decode.GONE:
            del self._requests[request_id]


class SchedulerHalf:
    """Both sides behind the calls of vLLM's scheduler."""

    def __init__(self, identity: Identity, groups: Sequence[GroupFacts]) -> None:
        self.identity = identity
        self.prefill = PrefillSide(identity, groups)
        self.decode = DecodeSide(identity, groups)
        self._step = 0

    def on_new_request(self, facts: RequestFacts) -> bool:
        """True: the caller must drop the last prompt token (and ask for one output token)."""
        if not facts.params:
            return False
        try:
            prefill = wants_prefill(facts.params)
        except ParamsError as error:
            logger.warning("request %s: %s", facts.request_id, error)
            self.decode.refuse(facts)
            return False
        if not prefill:
            self.decode.arrive(facts)
            return False
        return self.identity.produces and self.prefill.arrive(facts)

    def external_tokens(self, request_id: str, computed_tokens: int) -> int:
        return self.decode.external_tokens(request_id, computed_tokens)

    def on_allocated(
        self, request_id: str, block_ids: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        if self.decode.owns(request_id):
            self.decode.allocated(request_id, block_ids, external_tokens)

    def build_orders(self) -> StepOrders:
        self._step += 1
        return self.decode.take_orders(self._step, self.prefill.take_pins())

    def on_results(
        self, sent: Iterable[str], received: Iterable[str], failed: Mapping[str, str] | set[str]
    ) -> None:
        """What all ranks agree on; ``failed`` is a part of ``received``."""
        for request_id in sent:
            self.prefill.sent(request_id)
        for request_id in received:
            self.decode.ended_load(request_id, request_id in failed)

    def on_finished(
        self, request_id: str, computed_tokens: int | None, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, Answer | None]:
        """(keep the blocks until they are reported as sent, params for the client).

        ``computed_tokens``: tokens whose state the blocks hold; None when the request did not
        run to its end.
        """
        if self.prefill.owns(request_id):
            return self.prefill.finish(request_id, computed_tokens, block_ids)
        if self.decode.owns(request_id):
            self.decode.finish(request_id)
        return False, None
