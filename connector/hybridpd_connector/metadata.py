"""What the scheduler half tells the worker half in each step. Plain values, pickled by vLLM.

Every rank of an engine receives the same orders. They are numbered, because vLLM shows a step's
metadata more than once; a step that is seen again is ignored as a whole.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from hybridpd_connector.transfer_params import RemotePrefill


class GroupFacts(NamedTuple):
    """One transferable KV-cache group: ``kind`` is "attention" or "state".

    ``block_tokens``: tokens of a logical block. ``scratch_blocks``: speculative slots that vLLM
    appends to a state group's block list; they hold no state.
    """

    kind: str
    block_tokens: int
    scratch_blocks: int = 0


class Pin(NamedTuple):
    """P: the prefill of ``request_id`` ended and its blocks wait for a reader.

    ``tokens`` and ``block_ids`` (per transferable group) say what to sum; empty when no checksums
    of this prefill are stated.
    """

    request_id: str
    sequence: int
    tokens: int = 0
    block_ids: tuple[tuple[int, ...], ...] = ()


class Interest(NamedTuple):
    """D: ``request_id`` has arrived and will want the state at ``remote``: renew its lease."""

    request_id: str
    remote: RemotePrefill


class Load(NamedTuple):
    """D: blocks are allocated, read the state of ``request_id`` now.

    ``block_ids``: per transferable group, logical ids; attention blocks behind the last token are
    to be zeroed. ``first_token``: attention tokens before it
    are here already (local prefix cache). ``refusal``: when not empty, do not read but report the
    load as failed for this reason.
    """

    request_id: str
    block_ids: tuple[tuple[int, ...], ...]
    first_token: int
    refusal: str = ""


class StepOrders(NamedTuple):
    """Orders of one step, in the order they must be carried out: fields from top to bottom.

    ``leaves``: D requests that need their prefill no longer and have nothing in flight.
    ``aborts``: D requests that ended while loading; each is still to be reported once.
    ``abandons``: loads with a late read, whose blocks are held now: report them as failed.
    """

    step: int
    pins: tuple[Pin, ...] = ()
    interests: tuple[Interest, ...] = ()
    leaves: tuple[str, ...] = ()
    aborts: tuple[str, ...] = ()
    loads: tuple[Load, ...] = ()
    abandons: tuple[str, ...] = ()


NO_ORDERS = StepOrders(step=0)
"""Of most steps, which begin and end no transfer: nothing to number, to build or to carry out."""


class TransferResults(NamedTuple):
    """What a rank reports: request ids. Every failed one is also in ``received``."""

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()


NO_RESULTS = TransferResults()
"""Of most steps: nothing has ended, and no reason is told."""
NOTHING_ENDED: tuple[frozenset[str], Mapping[str, str]] = frozenset(), MappingProxyType({})
"""The same of one side: (what ended, reasons)."""


class LateReads(NamedTuple):
    """What a rank says of loads whose read outlasts its deadline (see ``held_blocks``).

    ``late``: it is in flight and its time is over. ``landed``: of an abandoned load nothing is in
    flight on this rank any more; said once for each order to abandon.
    """

    late: frozenset[str] = frozenset()
    landed: tuple[str, ...] = ()


class RequestFacts(NamedTuple):
    """What the connector needs to know of one vLLM request.

    ``token_ids`` is vLLM's own list, not to be kept; None for prompts that are not handed over
    (given as embeddings, for one).
    ``multimodal``: content hash and place of each item. ``reads_cache`` is False when vLLM itself
    will ignore any cached prefix (prompt log-probabilities). ``params`` is the request's
    ``kv_transfer_params``, unchecked.
    """

    request_id: str
    prompt_tokens: int
    token_ids: Sequence[int] | None
    params: Mapping[str, object] | None
    lora: str = ""
    multimodal: tuple[str, ...] = ()
    cache_salt: str = ""
    reads_cache: bool = True
