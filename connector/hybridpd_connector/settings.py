"""The keys of ``kv_connector_extra_config``: defaults, what is accepted, and what they do.

``vllm_engine`` reads them; a test holds this table to the keys and defaults that it reads.
``docs/reference/connector.md`` shows it.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Setting:
    """``side``: the engines it matters on. ``accepted`` and ``meaning`` are for readers."""

    name: str
    default: object
    accepted: str
    side: str
    meaning: str


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "lease_seconds",
        30,
        "1 to 86400",
        "prefill",
        "How long blocks of a finished prefill wait for a reader that says nothing. A reader "
        "renews four times in that time, from the arrival of its request on",
    ),
    Setting(
        "handshake_timeout_seconds",
        30.0,
        "1 to 3600",
        "decode",
        "How long a load waits for a handshake with its prefill engine, and how long waking up "
        "the link may take",
    ),
    Setting(
        "require_fast_link",
        False,
        "true, false",
        "decode",
        "Refuse a prefill engine whose GPU memory can only be read through the host or the "
        "network stack; its requests fail as peer_refused",
    ),
    Setting(
        "prefill_peers",
        (),
        "a list of host:port or host:first-last",
        "decode",
        "Prefill engines to meet before a request names them, so that no request pays for the "
        "handshake. A host may have many addresses, such as a headless Service, which are looked "
        "up again and again; at most 256 are met ahead",
    ),
    Setting(
        "checksum",
        "sample",
        "off, sample, all",
        "both",
        "Which loads are compared with the prefill engine's checksums before they are used: none, "
        "one in 128, or all. The lower of the two engines' rates counts, but a decode engine with "
        "all refuses a prefill engine without, and a load that cannot be compared",
    ),
    Setting(
        "side_channel_key_file",
        None,
        "an absolute path",
        "both",
        "A file of shared secrets, one a line: with it the side channel is encrypted and answers "
        "only who has one of them. Without it whoever reaches the port can read the cache",
    ),
    Setting(
        "step_wait_seconds",
        0.0005,
        "0 to 1",
        "decode",
        "How long a step may wait for the end of reads that were begun in it",
    ),
    Setting(
        "poll_interval_seconds",
        0.1,
        "0.001 to 60",
        "prefill",
        "How often a thread empties the mailbox of renewals and releases, whatever the engine does",
    ),
    Setting(
        "outlive_readers",
        True,
        "true, false",
        "prefill",
        "Over TCP, outlive decode engines that die in the middle of a load. It changes how the UCX "
        "of this process ends connections (ADR 23); false leaves UCX as it is",
    ),
    Setting(
        "unproven",
        (),
        "a list of hybrid_ngram",
        "both",
        "Combinations to carry although no test has shown their tokens right, to measure them; "
        "a warning at start names them. HybridPDService never sets it. fp8_on_gpu is still taken "
        "and does nothing: it is carried without",
    ),
    Setting(
        "backends",
        ("UCX",),
        "a list of NIXL backends",
        "both",
        "The NIXL backends to create. Only UCX is tested",
    ),
)
