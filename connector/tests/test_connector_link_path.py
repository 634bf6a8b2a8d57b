"""Which path a link takes, and why it is the slow one: one row per scenario."""

import dataclasses

import pytest

from hybridpd_connector.agent_api import Memory
from hybridpd_connector.handshake import HostFacts
from hybridpd_connector.host_facts import read_host_facts
from hybridpd_connector.link_path import Measurement, diagnose

HERE = HostFacts("boot-a", 101, "", False)
OTHER_HOST = HostFacts("boot-b", 202, "", False)
NEIGHBOUR = dataclasses.replace(HERE, pid_namespace=102)
PROBE = 2 << 20


def us(seconds, size=PROBE):
    return Measurement(size, seconds * 1e-6)


def tls(setting, host=HERE):
    return dataclasses.replace(host, transports=setting)


GPU = [
    # ours, theirs, measured, path, words of the cause ("" for a fast link)
    ("one-namespace", HERE, HERE, us(20), "cuda_ipc", ""),
    ("pcie", HERE, HERE, us(110), "cuda_ipc", ""),
    ("small-page", HERE, HERE, us(18, 16384), "cuda_ipc", ""),
    ("other-namespace", HERE, NEIGHBOUR, us(4200), "tcp", "hostPID"),
    ("other-namespace-pipelined", HERE, NEIGHBOUR, us(550), "staged", "hostPID"),
    ("namespace-but-fast", HERE, NEIGHBOUR, us(20), "cuda_ipc", ""),
    ("tls-here", tls("sm,tcp"), HERE, us(4200), "tcp", "no cuda_ipc here"),
    ("tls-there", HERE, tls("tcp"), us(4200), "tcp", "no cuda_ipc on the prefill engine"),
    ("tls-both", tls("tcp"), tls("^cuda_ipc"), us(4200), "tcp", "no cuda_ipc on both sides"),
    ("tls-names-it", tls("cuda_ipc,tcp"), tls("all"), us(4200), "tcp", "without NVLink"),
    ("tls-group", tls("cuda,tcp"), tls("^ib"), us(4200), "tcp", "without NVLink"),
    ("tls-before-namespace", tls("tcp"), NEIGHBOUR, us(4200), "tcp", "UCX_TLS"),
    ("vmm", HERE, dataclasses.replace(HERE, remappable=True), us(550), "staged", "allocator"),
    ("namespace-unknown", HERE, HostFacts("boot-a"), us(4200), "tcp", "not known"),
    ("nothing-known", HostFacts(), HostFacts(), us(4200), "tcp", "not known"),
    ("rdma", HERE, OTHER_HOST, us(110), "rdma", ""),
    ("rdma-40", HERE, OTHER_HOST, us(480), "rdma", ""),
    ("other-host-tcp", HERE, OTHER_HOST, us(4200), "tcp", "different hosts"),
    ("rdma-left-out", HERE, tls("tcp,cuda", OTHER_HOST), us(4200), "tcp", "leaves out RDMA"),
    ("old-peer", HERE, HostFacts(), us(4200), "tcp", "not known"),
]


@pytest.mark.parametrize(("ours", "theirs", "measured", "path", "words"), [r[1:] for r in GPU],
                         ids=[r[0] for r in GPU])  # fmt: skip
def test_gpu_links(ours, theirs, measured, path, words):
    found = diagnose(ours, theirs, measured, Memory.VRAM)
    assert found.path.value == path
    assert found.slow == bool(found.cause) == bool(words)
    assert words in found.cause


@pytest.mark.parametrize(
    ("ours", "theirs", "measured", "path"),
    [
        (HERE, HERE, us(300), "shm"),
        (HERE, HERE, us(9000), "unknown"),
        (HERE, NEIGHBOUR, us(300), "tcp"),
        (HERE, HostFacts("boot-a"), us(300), "shm"),
        (tls("tcp"), HERE, us(300), "tcp"),
        (tls("tcp,rc"), HERE, us(300), "unknown"),
        (tls("tcp,self"), tls("sm"), us(9000), "tcp"),
        (HERE, OTHER_HOST, us(100), "rdma"),
        (HERE, OTHER_HOST, us(2000), "tcp"),
        (HERE, tls("tcp", OTHER_HOST), us(100), "tcp"),
        (HostFacts(), HostFacts(), us(2000), "tcp"),
    ],
)
def test_host_memory_is_never_called_slow(ours, theirs, measured, path):
    found = diagnose(ours, theirs, measured, Memory.DRAM)
    assert (found.path.value, found.slow, found.cause) == (path, False, "")


def test_what_a_process_says_of_itself(tmp_path):
    here = read_host_facts({"UCX_TLS": "tcp"}, remappable=True)
    assert len(here.boot_id) == 36
    assert here.pid_namespace > 0
    assert (here.transports, here.remappable) == ("tcp", True)
    assert read_host_facts({}, remappable=False, proc=tmp_path) == HostFacts()
    long = read_host_facts({"UCX_TLS": "x" * 10_000}, remappable=False, proc=tmp_path)
    assert len(long.transports) == 128
