"""The scheduler half: which requests are handed over, and what the ranks are told about them.

Pure decisions over plain values: no clock, no I/O, no vLLM. ``connector`` translates vLLM's
objects into ``RequestFacts`` and block ids, and calls the methods in this order:

    on_new_request -> external_tokens (repeatedly, the last one counts) -> on_allocated
    -> build_orders (once a step) -> on_late, on_results -> on_finished

``SchedulerHalf`` sorts requests by side; ``PrefillSide`` and ``DecodeSide`` own their requests.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from hybridpd_connector import stats
from hybridpd_connector.decode_side import DecodeSide
from hybridpd_connector.errors import ParamsError
from hybridpd_connector.failure_log import FailureLog
from hybridpd_connector.metadata import NO_ORDERS, GroupFacts, RequestFacts, StepOrders
from hybridpd_connector.prefill_side import Answer, PrefillSide
from hybridpd_connector.request_blocks import Identity
from hybridpd_connector.transfer_params import roles_of

logger = logging.getLogger(__name__)


class SchedulerHalf:
    """Both sides behind the calls of vLLM's scheduler."""

    def __init__(self, identity: Identity, groups: Sequence[GroupFacts]) -> None:
        self.identity = identity
        self._produces = identity.produces
        self._stats = stats.Stats()
        self._failures = FailureLog()
        self.prefill = PrefillSide(identity, groups, self._stats, self._failures)
        self.decode = DecodeSide(identity, groups, self._stats, self._failures)
        self._step = 0
        self._told_pinned = self._told_held = 0

    def on_new_request(self, facts: RequestFacts) -> bool:
        """True: the caller must drop the last prompt token (and ask for one output token)."""
        if not facts.params:
            return False
        try:
            prefill, load = roles_of(facts.params)
        except ParamsError as error:
            self.decode.refuse(facts, error)
            return False
        if load:
            self.decode.arrive(facts)
        if not prefill:
            return False
        if not self._produces:
            logger.warning(
                "request %s asks for a prefill for another engine, but kv_role is %s here: "
                "nothing is handed over",
                facts.request_id,
                self.identity.role,
            )
            return False
        return self.prefill.arrive(facts)

    def external_tokens(self, request_id: str, computed_tokens: int) -> int:
        return self.decode.external_tokens(request_id, computed_tokens)

    def on_allocated(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        external_tokens: int,
        cached_tokens: int | None = None,
    ) -> None:
        """``cached_tokens``: what vLLM takes from its own prefix cache; None when it is unknown."""
        if self.decode.owns(request_id):
            self.decode.allocated(request_id, block_ids, external_tokens, cached_tokens)

    def build_orders(self) -> StepOrders:
        """The orders of this step; ``NO_ORDERS``, which has no number, when there are none."""
        if not (self.prefill.has_pins or self.decode.has_orders):
            return NO_ORDERS
        self._step += 1
        return self.decode.take_orders(self._step, self.prefill.take_pins())

    def on_results(
        self,
        sent: Iterable[str],
        received: Iterable[str],
        failed: Collection[str],
        reasons: Mapping[str, str],
    ) -> None:
        """What all ranks agree on; ``failed`` is a part of ``received``. ``reasons``: id -> why,
        from the ranks that failed in this step, not only for loads that all ranks have ended."""
        for request_id, reason in reasons.items():
            self.decode.explain(request_id, reason)
            self.prefill.explain(request_id, reason)
        for request_id in sent:
            self.prefill.sent(request_id)
        for request_id in received:
            self.decode.ended_load(request_id, failed=request_id in failed)

    def on_late(self, late: Iterable[str], landed: Mapping[str, int]) -> None:
        """Reads that outlast their deadline on some rank, and how many ranks say of an abandoned
        load that nothing of it is in flight. Before the results of the same step: vLLM frees the
        blocks of what they name."""
        for request_id in late:
            self.decode.late(request_id)
        self.decode.held.landed(landed)

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

    def note_refused(self, reasons: Mapping[str, int]) -> None:
        """Connections that the side channel refused, by reason, to be counted."""
        for reason, connections in reasons.items():
            self._stats.refuse(reason, connections)

    def take_stats(self) -> dict[str, Any] | None:
        """``Stats`` data since the last call; None when nothing has happened."""
        self._failures.flush()
        held = self.decode.held.count
        if held != self._told_held:
            self._told_held = held
            self._stats.set_gauge(stats.BLOCKS_HELD, held)
        if self._produces and self.prefill.pinned != self._told_pinned:
            self._told_pinned = self.prefill.pinned
            self._stats.set_gauge(stats.LEASES_HELD, self._told_pinned)
        return None if self._stats.is_empty() else self._stats.take()
