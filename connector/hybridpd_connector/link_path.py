"""Which path a link takes, how that is told from one measurement, and why it may be the slow one.

Nothing says what the transfer library chose: UCX falls back in silence, by a factor of 500. What
can be known is how fast a read was, whether both ranks run on one host and in one PID namespace,
and which transports their environment allows. From these, per kind of memory:

    memory  host   speed of a 2 MiB read      path       slow
    VRAM    same   below about 0.2 ms         cuda_ipc   no
    VRAM    other  above 4 GB/s               rdma       no
    VRAM    any    slower, above 2 GB/s       staged     yes (pipelined through host memory)
    VRAM    any    slower                     tcp        yes
    DRAM    same   above 2 GB/s               shm        no
    DRAM    other  above 4 GB/s               rdma       no
    DRAM    any    slower                     tcp where no other transport is possible, or between
                                              hosts; else unknown (a busy CPU looks the same)

Within a host, memory that was not made to be shared is read with the kernel's help (cma), which
needs one PID namespace; from another one tcp is left, however fast that is on the loopback.

DRAM caches are for CPUs, where no path is called slow. Pure.
"""

import dataclasses
import enum

from hybridpd_connector.agent_api import Memory
from hybridpd_connector.handshake import HostFacts

GPU_LATENCY_SECONDS = 40e-6
GPU_BYTES_PER_SECOND = 12.5e9
RDMA_BYTES_PER_SECOND = 4e9
STAGED_BYTES_PER_SECOND = 2e9
SHM_BYTES_PER_SECOND = 2e9

OTHER_NAMESPACE = (
    "P and D run on one host in different PID namespaces, where UCX has no cuda_ipc: give both "
    "pods hostPID, or run P and D as containers of one pod with shareProcessNamespace"
)
NO_CUDA_IPC = "UCX_TLS has no cuda_ipc {where}: unset it, or add cuda_ipc and cuda_copy"
REMAPPABLE = (
    "the cache {where} lies in memory of a virtual memory allocator, where UCX has no cuda_ipc: "
    "turn off expandable_segments and enable_cumem_allocator"
)
NO_RDMA = "UCX_TLS leaves out RDMA {where}: unset it, or add rc and dc"
OTHER_HOST = (
    "P and D run on different hosts and no RDMA path was found: look for devices with ucx_info -d "
    "in both pods, and for GPUDirect RDMA (nvidia-peermem or dma-buf)"
)
NOT_KNOWN = "the cause is not known: start both engines with UCX_PROTO_INFO=y and read their logs"
CAUSES = (OTHER_NAMESPACE, NO_CUDA_IPC, REMAPPABLE, NO_RDMA, OTHER_HOST, NOT_KNOWN)
"""All of them; ``{where}`` is a side."""

_CUDA_IPC = frozenset({"cuda_ipc", "cuda"})
_RDMA = frozenset({"ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5"})
_SHM = frozenset({"sm", "shm", "mm", "sysv", "posix", "cma", "knem", "xpmem"})


class LinkPath(enum.Enum):
    """How the bytes of a link travel, as far as it can be told."""

    CUDA_IPC = "cuda_ipc"
    RDMA = "rdma"
    SHM = "shm"
    STAGED = "staged"
    TCP = "tcp"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The best of a few reads of ``bytes`` bytes: from the post until its end was seen."""

    bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """``slow``: a GPU's memory is read through the host or the network stack; ``cause`` then says
    why, as far as that is known, and what to do."""

    path: LinkPath
    slow: bool = False
    cause: str = ""


def diagnose(
    ours: HostFacts, theirs: HostFacts, measured: Measurement, memory: Memory
) -> Diagnosis:
    """The path between two ranks. See the module for the rules."""
    same_host = bool(ours.boot_id) and ours.boot_id == theirs.boot_id
    rate = measured.bytes_per_second
    if memory is Memory.DRAM:
        return Diagnosis(_host_path(ours, theirs, rate, same_host))
    allowed = GPU_LATENCY_SECONDS + measured.bytes / GPU_BYTES_PER_SECOND
    if same_host and measured.seconds <= allowed:
        return Diagnosis(LinkPath.CUDA_IPC)
    if not same_host and rate >= RDMA_BYTES_PER_SECOND:
        return Diagnosis(LinkPath.RDMA)
    path = LinkPath.STAGED if rate >= STAGED_BYTES_PER_SECOND else LinkPath.TCP
    cause = _same_host_cause(ours, theirs) if same_host else _other_host_cause(ours, theirs)
    return Diagnosis(path, slow=True, cause=cause)


def _host_path(ours: HostFacts, theirs: HostFacts, rate: float, same_host: bool) -> LinkPath:
    if same_host:
        if _other_namespace(ours, theirs):
            return LinkPath.TCP
        if not _missing(_SHM, ours, theirs):
            return LinkPath.SHM if rate >= SHM_BYTES_PER_SECOND else LinkPath.UNKNOWN
        return LinkPath.TCP if _missing(_RDMA, ours, theirs) else LinkPath.UNKNOWN
    if rate >= RDMA_BYTES_PER_SECOND and not _missing(_RDMA, ours, theirs):
        return LinkPath.RDMA
    return LinkPath.TCP


def _same_host_cause(ours: HostFacts, theirs: HostFacts) -> str:
    where = _missing(_CUDA_IPC, ours, theirs)
    if where:
        return NO_CUDA_IPC.format(where=where)
    where = _where(ours.remappable, theirs.remappable)
    if where:
        return REMAPPABLE.format(where=where)
    return OTHER_NAMESPACE if _other_namespace(ours, theirs) else NOT_KNOWN


def _other_host_cause(ours: HostFacts, theirs: HostFacts) -> str:
    if not ours.boot_id or not theirs.boot_id:
        return NOT_KNOWN
    where = _missing(_RDMA, ours, theirs)
    return NO_RDMA.format(where=where) if where else OTHER_HOST


def _other_namespace(ours: HostFacts, theirs: HostFacts) -> bool:
    known = ours.pid_namespace and theirs.pid_namespace
    return bool(known) and ours.pid_namespace != theirs.pid_namespace


def _missing(transports: frozenset[str], ours: HostFacts, theirs: HostFacts) -> str:
    """On whose side UCX_TLS leaves all of these out; "" when on none."""
    return _where(
        not _allows(ours.transports, transports), not _allows(theirs.transports, transports)
    )


def _where(here: bool, there: bool) -> str:
    if here and there:
        return "on both sides"
    return "here" if here else "on the prefill engine" if there else ""


def _allows(setting: str, transports: frozenset[str]) -> bool:
    """Does a value of UCX_TLS allow one of them? ``^`` before a list turns it around."""
    text = setting.strip().lower()
    if not text.strip("^"):
        return True
    listed = {item.split(":")[0].strip().lstrip("\\") for item in text.lstrip("^").split(",")}
    if text.startswith("^"):
        return not listed & (transports | {"all"})
    return bool(listed & (transports | {"all"}))
