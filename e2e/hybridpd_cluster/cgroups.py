"""The cluster's control groups: the kernel's own record of every process the cluster has started.

Programs of the node join `<CGROUP>/system/<name>` before they run, the kubelet puts pods below
`<CGROUP>/kubepods`. So the processes that belong to the cluster are known without pid files or
names, also after `up` was killed between two steps. Made for cgroup v1 (all hierarchies) and v2.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from hybridpd_cluster.errors import ClusterError
from hybridpd_cluster.settings import CGROUP

_MOUNT = Path("/sys/fs/cgroup")
_KILL_SECONDS = 20.0
_V2_CONTROLLERS = "+cpu +cpuset +memory +pids +io"


def _is_v2() -> bool:
    return (_MOUNT / "cgroup.controllers").is_file()


def _hierarchies() -> list[Path]:
    """Roots of all hierarchies; under v1 several names may be links to one."""
    if _is_v2():
        return [_MOUNT]
    return sorted({path.resolve() for path in _MOUNT.iterdir() if (path / "cgroup.procs").exists()})


def _tracking_root() -> Path:
    """The hierarchy whose membership counts as the record."""
    return (_MOUNT if _is_v2() else _MOUNT / "pids") / CGROUP


def create() -> None:
    """Makes the cluster's group in every hierarchy; the kubelet demands that its root exists."""
    for root in _hierarchies():
        group = root / CGROUP
        group.mkdir(exist_ok=True)
        if root.name == "cpuset":  # a new v1 cpuset is empty and accepts no process
            for name in ("cpuset.cpus", "cpuset.mems"):
                (group / name).write_text((root / name).read_text())
    if _is_v2():
        for folder in (_MOUNT, _MOUNT / CGROUP):
            (folder / "cgroup.subtree_control").write_text(_V2_CONTROLLERS)


def component_group(name: str) -> Path:
    """The group one program of the node joins; made here so that the program can."""
    group = _tracking_root() / "system" / name
    group.mkdir(parents=True, exist_ok=True)
    return group


def _pids_below(root: Path) -> Iterator[int]:
    for folder, _, files in os.walk(root):
        if "cgroup.procs" in files:
            try:
                text = (Path(folder) / "cgroup.procs").read_text()
            except OSError:  # the group went away between walk and read
                continue
            yield from (int(word) for word in text.split() if word != "0")


def component_runs(name: str, program: Path) -> bool:
    """Whether a process of that component's group runs that very program file."""
    for pid in _pids_below(_tracking_root() / "system" / name):
        try:
            if Path(f"/proc/{pid}/exe").resolve() == program.resolve():
                return True
        except OSError:  # ended meanwhile
            continue
    return False


def supervisor_pid() -> int | None:
    """Pid, as the host sees it, of the process that is pid 1 of the node's namespace."""
    for pid in _pids_below(_tracking_root() / "system" / "supervisor"):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        for line in status.splitlines():
            if line.startswith("NSpid:") and len(line.split()) > 2 and line.split()[-1] == "1":
                return pid
    return None


def processes() -> list[int]:
    """All processes of the cluster, pods included."""
    return sorted(set(_pids_below(_tracking_root())))


def kill_all() -> None:
    """Ends every process of the cluster and waits until none is left."""
    deadline = time.monotonic() + _KILL_SECONDS
    supervisor = supervisor_pid()
    if supervisor is not None:  # the kernel ends the whole pid namespace with it
        _kill(supervisor)
    while left := processes():
        if time.monotonic() > deadline:
            raise ClusterError(f"processes: expected all to end in {_KILL_SECONDS} s, left: {left}")
        for pid in left:
            _kill(pid)
        time.sleep(0.05)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def remove() -> None:
    """Removes the emptied groups, deepest first."""
    for root in _hierarchies():
        for folder, _, _ in os.walk(root / CGROUP, topdown=False):
            _remove_group(Path(folder))


def _remove_group(group: Path) -> None:
    deadline = time.monotonic() + _KILL_SECONDS
    while group.exists():
        try:
            group.rmdir()
        except OSError as error:  # busy while the last process is being reaped
            if time.monotonic() > deadline:
                raise ClusterError(f"control group: cannot remove {group}: {error}") from error
            time.sleep(0.05)


def exist() -> bool:
    """Whether any group of the cluster is left."""
    return any((root / CGROUP).exists() for root in _hierarchies())
