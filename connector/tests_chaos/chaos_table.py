"""The failure table: what is done to two engines and a link, and what clients then see.

For every row the suite also checks that blocks of both engines are back at their idle count within
a lease time and five seconds, that peers, NIXL's lists and registrations and open files have not
grown, and that the next request is loaded and right.
"""

import dataclasses
from collections.abc import Callable

import chaos_frozen as frozen
import chaos_processes as processes
import chaos_requests as requests
import chaos_strangers as strangers
from chaos_stage import (
    ANSWER,
    ERROR,
    GONE,
    HANDSHAKE_SECONDS,
    LEASE_SECONDS,
    READ_SECONDS,
    SLACK_SECONDS,
    Seen,
    Stage,
)

NONE_WAITS = 0
QUICK = SLACK_SECONDS
HANDSHAKE = HANDSHAKE_SECONDS + SLACK_SECONDS
READ = READ_SECONDS + SLACK_SECONDS


@dataclasses.dataclass(frozen=True)
class Row:
    """``sees``: what the client of decode may see, within ``within_seconds`` (0: none waits).
    ``reasons``: why decode may count a failed load."""

    name: str
    fault: Callable[[Stage], Seen]
    sees: tuple[str, ...]
    within_seconds: float
    reasons: tuple[str, ...] = ()


DEAD = ("read_failed", "post_failed", "peer_unreachable", "lease_check_failed")
FED = strangers.side_channel_fed

ROWS = (
    Row(
        "prefill killed before the read",
        processes.prefill_killed_before_the_read,
        (ERROR,),
        HANDSHAKE,
        DEAD,
    ),
    Row(
        "prefill killed during the read",
        processes.prefill_killed_during_the_read,
        (ERROR,),
        HANDSHAKE,
        DEAD,
    ),
    Row("prefill killed after the read", processes.prefill_killed_after_the_read, (ANSWER,), 60),
    Row(
        "decode killed while prefill holds blocks",
        processes.decode_killed_while_prefill_holds_blocks,
        (ERROR,),
        QUICK,
    ),
    Row(
        "prefill restarted on its address",
        processes.prefill_restarted_on_its_address,
        (ERROR,),
        HANDSHAKE,
        ("peer_refused", *DEAD),
    ),
    Row(
        "decode restarted on its address",
        processes.decode_restarted_on_its_address,
        (ERROR,),
        QUICK,
        ("lease_ended",),
    ),
    Row("both restarted", processes.both_restarted, (ERROR,), HANDSHAKE, ("peer_refused",)),
    Row(
        "prefill frozen during the read",
        processes.prefill_frozen_during_the_read,
        (ANSWER,),
        LEASE_SECONDS + 2 + 2 * SLACK_SECONDS,
    ),
    Row(
        "prefill frozen before the read",
        frozen.before_the_read,
        (ANSWER,),
        LEASE_SECONDS + 2 + 2 * SLACK_SECONDS,
    ),
    Row(
        "prefill frozen before the handshake",
        frozen.before_the_handshake,
        (ERROR,),
        HANDSHAKE,
        ("peer_unreachable",),
    ),
    Row(
        "prefill frozen past the read, fail",
        frozen.past_the_read("fail", tp_size=1),
        (ERROR,),
        READ,
        ("deadline",),
    ),
    Row(
        "prefill frozen past the read, recompute",
        frozen.past_the_read("recompute", tp_size=2),
        (ANSWER,),
        READ,
        ("deadline",),
    ),
    Row(
        "link cut for 3 s before the read",
        processes.link_cut_for(3, reading=False),
        (ANSWER,),
        3 + QUICK,
    ),
    Row(
        "link cut for 3 s during the read",
        processes.link_cut_for(3, reading=True),
        (ANSWER, ERROR),
        LEASE_SECONDS + 3 + QUICK,
        ("lease_ended",),
    ),
    Row(
        "link cut for 60 s before the read",
        processes.link_cut_for(60, reading=False),
        (ERROR,),
        READ,
        ("lease_ended", "deadline", "peer_unreachable", *DEAD),
    ),
    Row(
        "link cut for 60 s during the read",
        processes.link_cut_for(60, reading=True),
        (ERROR,),
        READ,
        ("lease_ended", "deadline", *DEAD),
    ),
    Row(
        "link with 200 ms delay and loss",
        processes.link_long_and_lossy,
        (ANSWER, ERROR),
        LEASE_SECONDS + 2 * SLACK_SECONDS,
        ("lease_ended",),
    ),
    Row("side channel fed garbage", FED(strangers.garbage), (ANSWER,), QUICK),
    Row("side channel fed another version", FED(strangers.wrong_version), (ANSWER,), QUICK),
    Row("side channel fed a wrong size", FED(strangers.wrong_size), (ANSWER,), QUICK),
    Row("side channel half open", FED(strangers.half_open), (ANSWER,), QUICK),
    Row("side channel fed one byte a second", FED(strangers.one_byte_a_second), (ANSWER,), QUICK),
    Row(
        "side channel with 1000 strangers", FED(strangers.a_thousand_connections), (ANSWER,), QUICK
    ),
    Row(
        "decode sent to a stranger",
        strangers.decode_sent_to_a_stranger,
        (ERROR,),
        HANDSHAKE,
        ("peer_unreachable", "peer_refused"),
    ),
    Row(
        "decode sent to made-up addresses",
        strangers.decode_sent_to_made_up_addresses,
        (ANSWER,),
        HANDSHAKE_SECONDS,
        ("peer_unreachable",),
    ),
    Row(
        "lease expired before the read",
        processes.lease_expired_before_the_read,
        (ERROR,),
        QUICK,
        ("lease_ended",),
    ),
    Row(
        "lease expired during the read",
        processes.lease_expired_during_the_read,
        (ERROR,),
        LEASE_SECONDS + 2 * SLACK_SECONDS,
        ("lease_ended", *DEAD),
    ),
    Row("router never calls decode", requests.router_never_calls_decode, (GONE,), NONE_WAITS),
    Row(
        "client gone before decode is called",
        requests.client_gone_before_decode_is_called,
        (GONE,),
        NONE_WAITS,
    ),
    Row("client gone during the load", processes.client_gone_during_the_load, (GONE,), NONE_WAITS),
    Row(
        "two decodes of one prefill",
        requests.two_decodes_of_one_prefill,
        (ANSWER, ERROR),
        QUICK,
        ("already_released", "lease_ended"),
    ),
    Row("prefill retried with one id", requests.prefill_retried_with_one_id, (ANSWER,), QUICK),
    Row("ids without randomisation", requests.ids_without_randomisation, (ERROR,), NONE_WAITS),
    Row("clocks minutes apart", processes.clocks_minutes_apart, (ANSWER,), QUICK),
    Row(
        "params of every wrong kind",
        requests.params_of_every_wrong_kind,
        (ANSWER, ERROR),
        HANDSHAKE,
        ("bad_params", "changed_params", "other_prompt", "peer_refused", "lease_ended"),
    ),
)

NAMED = (
    "prefill killed during the read",
    "decode killed while prefill holds blocks",
    "prefill restarted on its address",
    "link cut for 3 s before the read",
    "lease expired before the read",
    "prefill retried with one id",
)
"""The rows that every run of the suite plays."""
