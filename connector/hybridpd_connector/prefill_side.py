"""The scheduler's prefill side: requests whose state another engine will read."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from hybridpd_connector import stats
from hybridpd_connector.errors import ParamsError, StateError, shorten
from hybridpd_connector.failure_log import FailureLog
from hybridpd_connector.failure_reasons import split
from hybridpd_connector.metadata import GroupFacts, Pin, RequestFacts
from hybridpd_connector.request_blocks import Identity, facts_digest, parent_of, transfer_blocks
from hybridpd_connector.request_state import Prefill, PrefillEvent, next_prefill
from hybridpd_connector.seals import sealed
from hybridpd_connector.transfer_params import RemotePrefill, answer

logger = logging.getLogger(__name__)

Answer = dict[str, Any]


@dataclasses.dataclass(slots=True)
class _Prefilled:
    """A request of the prefill side. ``tokens`` is 0 when there is nothing to hand over.
    ``expired``: what the first rank whose lease ran out said of it."""

    tokens: int
    digest: str
    state: Prefill = Prefill.PREFILLING
    expired: str = ""


class PrefillSide:
    """Requests whose state another engine will read."""

    def __init__(
        self,
        identity: Identity,
        groups: Sequence[GroupFacts],
        recorder: stats.Stats,
        failures: FailureLog,
    ) -> None:
        self._identity = identity
        self._stats = recorder
        self._failures = failures
        self.pinned = 0
        self._groups = tuple(groups)
        self._requests: dict[str, _Prefilled] = {}
        self._pins: list[Pin] = []
        self._sequence = 0
        self._answers: dict[tuple[str, str], tuple[str, Answer]] = {}

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
            self._move(request_id, item, PrefillEvent.DROP)
            return False, None
        parent = parent_of(request_id)
        shared = self._answers.get((parent, item.digest)) if parent and item.tokens else None
        if shared is not None:
            # n > 1: the client gets one child's answer, so all children name the same blocks.
            self._move(request_id, item, PrefillEvent.DROP)
            return False, shared[1]
        try:
            blocks = self._blocks(item, computed_tokens, block_ids)
            params = self._answer(request_id, item, blocks)
        except (StateError, ParamsError) as error:
            # ParamsError: an id from a client that no reader would accept.
            logger.warning("prefill %s is not handed over: %s", shorten(request_id), error)
            self._move(request_id, item, PrefillEvent.DROP)
            return False, None
        if not item.tokens:
            self._move(request_id, item, PrefillEvent.DROP)
            return False, params
        self._move(request_id, item, PrefillEvent.PIN)
        self.pinned += 1
        self._pins.append(self._pin(request_id, item, blocks))
        if parent:
            self._answers[parent, item.digest] = (request_id, params)
        return True, params

    def explain(self, request_id: str, text: str) -> None:
        """A rank says that its lease ran out, maybe steps before the last rank has ended it."""
        item = self._requests.get(request_id)
        if item is not None and not item.expired:
            item.expired = text

    def sent(self, request_id: str) -> None:
        """All ranks have ended the lease; vLLM frees the blocks now."""
        item = self._requests.get(request_id)
        if item is None or item.state is not Prefill.PINNED:
            return
        self._move(request_id, item, PrefillEvent.SENT)
        self.pinned -= 1
        if item.expired:
            self._stats.count(stats.LEASES_EXPIRED)
            self._failures.lease_expired(request_id, *split(item.expired))
        else:
            self._stats.count(stats.LEASES_RELEASED)
        parent = parent_of(request_id) if self._answers else None
        if parent:
            self._answers.pop((parent, item.digest), None)

    @property
    def has_pins(self) -> bool:
        return bool(self._pins)

    def take_pins(self) -> tuple[Pin, ...]:
        pins = tuple(self._pins)
        self._pins.clear()
        return pins

    def _pin(self, request_id: str, item: _Prefilled, blocks: tuple[tuple[int, ...], ...]) -> Pin:
        every = self._identity.checksum_every
        if every and self._sequence % every == 0:
            return Pin(request_id, self._sequence, item.tokens, blocks)
        return Pin(request_id, self._sequence)

    def _blocks(
        self, item: _Prefilled, computed_tokens: int, block_ids: Sequence[Sequence[int]]
    ) -> tuple[tuple[int, ...], ...]:
        """The blocks to hand over; ``StateError`` when they do not hold what was asked for."""
        if item.tokens == 0:
            return tuple(() for _ in self._groups)
        if computed_tokens != item.tokens:
            raise StateError("computed tokens", str(item.tokens), computed_tokens)
        return transfer_blocks(self._groups, block_ids, item.tokens)

    def _answer(
        self, request_id: str, item: _Prefilled, blocks: tuple[tuple[int, ...], ...]
    ) -> Answer:
        self._sequence += 1
        us = self._identity
        # In the order of the fields: names would make it take twice as long.
        offer = RemotePrefill(
            *(us.engine_id, request_id, us.host, us.port, blocks, us.tp_size),
            *(item.tokens, item.digest, us.lease_seconds, self._sequence),
        )
        return answer(sealed(us.seal_key, offer))

    def _move(self, request_id: str, item: _Prefilled, event: PrefillEvent) -> None:
        item.state = next_prefill(item.state, event)
        if item.state is Prefill.GONE:
            del self._requests[request_id]
