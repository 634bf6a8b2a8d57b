"""Every reason for which a load fails or a lease ends unread: what it means and what to do.

The name is the value of the metric's label ``reason`` and the first word after the colon in the
log. ``docs/reference/connector.md`` shows this table. Between processes a failure travels as one
text, ``reason: detail``, see ``join`` and ``split``.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

UNKNOWN = "unknown"
LEASE_EXPIRED = "lease_expired"
MAX_DETAIL = 600


@dataclasses.dataclass(frozen=True)
class Reason:
    """``meaning`` and ``action`` are sentences without a full stop. ``side``: whose log has it.

    ``counted``: is it a value of ``hybridpd_load_failures_total``?
    """

    name: str
    meaning: str
    action: str
    side: str = "decode"
    counted: bool = True


_ALL = (
    Reason(
        "bad_params",
        "kv_transfer_params lack a key, or one is of the wrong type or out of bounds",
        "let the router pass kv_transfer_params of the prefill answer on unchanged",
    ),
    Reason(
        "wrong_role",
        "this engine was asked to load, and its kv_role does not allow it",
        "send decode requests to engines with kv_role kv_consumer or kv_both",
    ),
    Reason(
        "other_prompt",
        "the prompt here is not the one that was prefilled",
        "let the router send both engines the same body; compare tokenizer, chat template, "
        "LoRA adapter and cache salt of both",
    ),
    Reason(
        "changed_params",
        "kv_transfer_params are not what the prefill engine offered: their seal is broken",
        "let the router pass kv_transfer_params of the prefill answer on unchanged; if it does, "
        "somebody else can write to this engine's port",
    ),
    Reason(
        "bad_blocks",
        "the block lists do not fit the caches of the two engines",
        "look for a router that changes remote_block_ids; if there is none, report it as a fault",
    ),
    Reason(
        "claim_cut",
        "vLLM granted the load fewer tokens than it needs: a state stands for all its tokens",
        "take other connectors out of MultiConnector, or put this one first",
    ),
    Reason(
        "unknown_request",
        "the ranks were told to load a request of which they had never heard",
        "report it as a fault, with the log lines of this request id",
    ),
    Reason(
        "already_released",
        "this engine has used and released this prefill before",
        "let the router send every retry through prefill again, never one answer twice",
    ),
    Reason(
        "peer_refused",
        "the two engines do not fit, or the prefill engine was replaced since",
        "read the difference in this line; if it is the engine id, later requests are fine",
    ),
    Reason(
        "peer_unreachable",
        "no handshake with the prefill engine succeeded in time",
        "see whether its pod runs, and whether its side channel and data ports can be reached "
        "from this pod (NetworkPolicy), and whether both engines have the same "
        "side_channel_key_file; handshake_timeout_seconds is the bound",
    ),
    Reason(
        "post_failed",
        "the transfer library did not accept the read",
        "see whether the prefill pod was restarted; if not, the text in this line is NIXL's own",
    ),
    Reason(
        "read_failed",
        "the connection to the prefill engine broke during the read",
        "see whether the prefill pod was restarted or killed (out of memory), then look at the "
        "network between the pods",
    ),
    Reason(
        "lease_check_failed",
        "the pages arrived, and the prefill engine's lease board could not be read after them",
        "as for read_failed",
    ),
    Reason(
        "lease_ended",
        "the prefill engine had freed the blocks before all pages were here; they were not used",
        "see whether this engine's queue is longer than lease_seconds or its network stood still; "
        "raise lease_seconds on the prefill engine, or add decode engines",
    ),
    Reason(
        "checksum_mismatch",
        "bytes arrived that the prefill engine had not stated; they were not used",
        "report it with this line; set checksum to all on both engines to see which loads differ",
    ),
    Reason(
        "checksum_missing",
        "this engine asks for checksums of all loads, and there were none to compare this one with",
        "the text in this line says what was missing; look at a prefill engine whose steps take "
        "seconds or that holds more than a thousand prefills; checksum sample loads what it "
        "cannot compare",
    ),
    Reason(
        "deadline",
        "the read did not end in time",
        "see whether the prefill engine is frozen or the network is cut, and look at "
        "hybridpd_link_bytes_per_second",
    ),
    Reason(
        UNKNOWN,
        "no rank gave a reason",
        "read the logs of this engine's workers around this time",
    ),
    Reason(
        "aborted",
        "the request ended while it was being loaded",
        "nothing: its client left",
        counted=False,
    ),
    Reason(
        LEASE_EXPIRED,
        "no reader released the prefill or renewed its lease, and its blocks were freed",
        "see whether the router sent the request on to a decode engine, and whether that one can "
        "reach this pod; raise lease_seconds if decode engines queue longer than that",
        side="prefill",
        counted=False,
    ),
)

REASONS: Mapping[str, Reason] = MappingProxyType({reason.name: reason for reason in _ALL})


def known(name: str) -> str:
    """``name`` where it is in the table, else "unknown": metrics have no other values."""
    return name if name in REASONS else UNKNOWN


def join(reason: str, detail: str) -> str:
    """One text of a reason and what is known beyond it (bounded, one line; may be empty)."""
    shown = "".join(c if c.isprintable() else "?" for c in detail[:MAX_DETAIL])
    return f"{reason}: {shown}" if shown else reason


def split(text: str) -> tuple[str, str]:
    """(reason, detail) of what ``join`` made."""
    reason, _, detail = text.partition(": ")
    return reason, detail
