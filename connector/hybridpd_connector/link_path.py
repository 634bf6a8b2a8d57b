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
    any     any    this process had no time   unknown: neither slow nor fast (see ``link_samples``)

Within a host, memory that was not made to be shared is read with the kernel's help (cma), which
needs one PID namespace; from another one tcp is left, however fast that is on the loopback.

DRAM caches are for CPUs, where no path is called slow. Pure.
"""

import dataclasses
import enum

from hybridpd_connector.agent_api import Memory
from hybridpd_connector.handshake import HostFacts
from hybridpd_connector.link_samples import Bar, Measurement

GPU_LATENCY_SECONDS = 40e-6
GPU_BYTES_PER_SECOND = 12.5e9
RDMA_BYTES_PER_SECOND = 4e9
STAGED_BYTES_PER_SECOND = 2e9
SHM_BYTES_PER_SECOND = 2e9
BULK_BYTES = (64 << 20, 512 << 20)
"""Where a spinning thread leaves 5 ms between two looks, NVLink is seen in the second of these."""

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
NO_NVLINK = (
    "nothing is seen to keep P and D from cuda_ipc: without NVLink (one GPU, PCIe) UCX does not "
    "read with it unless both engines have UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y; if they have, start "
    "them with UCX_PROTO_INFO=y and read their logs"
)
CAUSES = (OTHER_NAMESPACE, NO_CUDA_IPC, REMAPPABLE, NO_NVLINK, NO_RDMA, OTHER_HOST, NOT_KNOWN)
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
class Diagnosis:
    """``slow``: a GPU's memory is read through the host or the network stack; ``cause`` then says
    why, as far as that is known, and what to do. ``unsure``: it may be so, or not."""

    path: LinkPath
    slow: bool = False
    cause: str = ""
    unsure: bool = False


def bar_of(ours: HostFacts, theirs: HostFacts, memory: Memory) -> Bar:
    """What a link between two ranks must reach to be a fast one."""
    same_host = _same_host(ours, theirs)
    if memory is Memory.DRAM:
        return Bar(0.0, SHM_BYTES_PER_SECOND if same_host else RDMA_BYTES_PER_SECOND)
    if same_host:
        return Bar(GPU_LATENCY_SECONDS, GPU_BYTES_PER_SECOND, BULK_BYTES)
    return Bar(0.0, RDMA_BYTES_PER_SECOND, BULK_BYTES)


def diagnose(
    ours: HostFacts, theirs: HostFacts, measured: Measurement, memory: Memory
) -> Diagnosis:
    """The path between two ranks. See the module for the rules."""
    same_host = _same_host(ours, theirs)
    fast = measured.seconds <= bar_of(ours, theirs, memory).seconds(measured.bytes)
    if memory is Memory.DRAM:
        return Diagnosis(_host_path(ours, theirs, same_host, fast, measured.sound))
    if fast:
        return Diagnosis(LinkPath.CUDA_IPC if same_host else LinkPath.RDMA)
    if not measured.sound:
        return Diagnosis(LinkPath.UNKNOWN, unsure=True)
    staged = measured.bytes_per_second >= STAGED_BYTES_PER_SECOND
    cause = _same_host_cause(ours, theirs) if same_host else _other_host_cause(ours, theirs)
    return Diagnosis(LinkPath.STAGED if staged else LinkPath.TCP, slow=True, cause=cause)


def _same_host(ours: HostFacts, theirs: HostFacts) -> bool:
    return bool(ours.boot_id) and ours.boot_id == theirs.boot_id


def _host_path(
    ours: HostFacts, theirs: HostFacts, same_host: bool, fast: bool, sound: bool
) -> LinkPath:
    no_rdma = bool(_missing(_RDMA, ours, theirs))
    if same_host:
        if _other_namespace(ours, theirs):
            return LinkPath.TCP
        if not _missing(_SHM, ours, theirs):
            return LinkPath.SHM if fast else LinkPath.UNKNOWN
        return LinkPath.TCP if no_rdma else LinkPath.UNKNOWN
    if no_rdma:
        return LinkPath.TCP
    if fast:
        return LinkPath.RDMA
    return LinkPath.TCP if sound else LinkPath.UNKNOWN


def _same_host_cause(ours: HostFacts, theirs: HostFacts) -> str:
    where = _missing(_CUDA_IPC, ours, theirs)
    if where:
        return NO_CUDA_IPC.format(where=where)
    where = _where(ours.remappable, theirs.remappable)
    if where:
        return REMAPPABLE.format(where=where)
    if not ours.pid_namespace or not theirs.pid_namespace:
        return NOT_KNOWN
    return OTHER_NAMESPACE if _other_namespace(ours, theirs) else NO_NVLINK


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
