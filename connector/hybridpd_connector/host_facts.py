"""What this process can say of its surroundings, for whoever reads its memory."""

import pathlib
from collections.abc import Mapping

from hybridpd_connector.handshake import MAX_SHORT_TEXT, HostFacts

_PROC = pathlib.Path("/proc")


def read_host_facts(
    environment: Mapping[str, str], *, remappable: bool, proc: pathlib.Path = _PROC
) -> HostFacts:
    """Never fails: what cannot be read is left out."""
    return HostFacts(
        boot_id=_boot_id(proc),
        pid_namespace=_pid_namespace(proc),
        transports=environment.get("UCX_TLS", "")[:MAX_SHORT_TEXT],
        remappable=remappable,
    )


def _boot_id(proc: pathlib.Path) -> str:
    try:
        text = (proc / "sys/kernel/random/boot_id").read_text("ascii", "replace")
    except OSError:
        return ""
    return text.strip()[:MAX_SHORT_TEXT]


def _pid_namespace(proc: pathlib.Path) -> int:
    try:
        return (proc / "self/ns/pid").stat().st_ino
    except OSError:
        return 0
