"""The node: one supervisor with its own namespaces, and programs started inside.

The supervisor is pid 1 of the pid namespace, so the kernel ends everything of the node with it;
mounts made inside (containers, volumes, secrets) exist only there and vanish with the last process.
Programs enter with nsenter: `ip netns exec` would mount /sys anew, which hides the control groups
from the kubelet.
"""

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hybridpd_cluster import cgroups
from hybridpd_cluster.errors import ClusterError
from hybridpd_cluster.network import namespace_path
from hybridpd_cluster.settings import clean_environment, state_folder
from tooling.binaries import program

_LOG_LINES_SHOWN = 25
# Fixed paths of kubelet and CNI: inside the node they lead to the state folder. The folders
# themselves stay on the host, empty: removing one would unmount it in another cluster's namespace.
_PRIVATE_FOLDERS = ("/var/log", "/var/lib/kubelet", "/var/lib/cni")
_JOIN_AND_RUN = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'


def log_path(name: str) -> Path:
    """Where a program of the node writes its output."""
    return state_folder() / "logs" / f"{name}.log"


def _spawn(name: str, command: Sequence[str | Path]) -> "subprocess.Popen[bytes]":
    """Starts a program that joins its control group before it becomes itself."""
    group = cgroups.component_group(name)
    words = ["sh", "-c", _JOIN_AND_RUN, "sh", str(group), *(str(word) for word in command)]
    with log_path(name).open("ab") as log:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=clean_environment(),
            start_new_session=True,
        )


def start_supervisor() -> None:
    """Makes the node's namespaces and waits until its pid 1 is there."""
    log_path("supervisor").parent.mkdir(parents=True, exist_ok=True)
    lines = ["set -e", "mount --make-rshared /", "echo 1 > /proc/sys/net/ipv4/ip_forward"]
    for folder in _PRIVATE_FOLDERS:
        private = state_folder() / "private" / folder.strip("/").replace("/", "-")
        private.mkdir(parents=True)
        Path(folder).mkdir(parents=True, exist_ok=True)
        lines.append(f"mount --bind '{private}' {folder}")
    lines += [f"touch '{state_folder()}/supervisor-ready'", f"exec '{program('pause')}'"]
    enter = ["nsenter", f"--net={namespace_path()}", "--", "unshare", "--mount", "--pid", "--fork"]
    enter += ["--kill-child", "--mount-proc", "--propagation", "slave", "--"]
    started = _spawn("supervisor", [*enter, "sh", "-c", "\n".join(lines)])
    ready = state_folder() / "supervisor-ready"
    wait_for("the node's namespaces", ready.exists, 20, [("supervisor", started)])


def enter_command() -> list[str]:
    """Words that run a program inside the node: put the program's own words behind them."""
    pid = cgroups.supervisor_pid()
    if pid is None:
        raise ClusterError("cluster: expected it to run, got no supervisor; run `up`")
    return ["nsenter", f"--target={pid}", "--net", "--mount", "--pid", "--"]


def start(name: str, command: Sequence[str | Path]) -> "subprocess.Popen[bytes]":
    """Starts a long-running program inside the node; its output goes to `log_path(name)`."""
    return _spawn(name, [*enter_command(), *command])


def wait_for(
    what: str,
    ready: Callable[[], bool],
    timeout_seconds: float,
    started: Sequence[tuple[str, "subprocess.Popen[bytes]"]] = (),
) -> None:
    """Waits until `ready()`; raises at once, with its last lines, when a program has ended."""
    deadline = time.monotonic() + timeout_seconds
    while not ready():
        for name, process in started:
            if process.poll() is not None:
                raise ClusterError(f"{name}: ended with {process.returncode}\n{last_lines(name)}")
        if time.monotonic() > deadline:
            said = "\n".join(f"--- {name}\n{last_lines(name)}" for name, _ in started)
            raise ClusterError(f"{what}: not there after {timeout_seconds:.0f} s\n{said}")
        time.sleep(0.1)


def last_lines(name: str) -> str:
    """The end of a program's log."""
    path = log_path(name)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join([f"(log: {path})", *lines[-_LOG_LINES_SHOWN:]])
