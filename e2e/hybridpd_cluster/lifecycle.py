"""`up`, `down` and `status`: each works from whatever state an interrupted run has left."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from hybridpd_cluster import cgroups, components, network, node, pki
from hybridpd_cluster.archive import one_program_image
from hybridpd_cluster.command import run, succeeds
from hybridpd_cluster.errors import ClusterError
from hybridpd_cluster.packages import ensure_packages
from hybridpd_cluster.settings import (
    GPU_COUNT,
    GPU_RESOURCE,
    IMAGE_NAMESPACE,
    NODE_NAME,
    PAUSE_IMAGE,
    cluster_folder,
    containerd_socket,
    kubeconfig_path,
    lock_path,
    runtime_folder,
    state_folder,
)
from tooling.binaries import build_all, program, say

# The kubelet sets these for the whole machine; `down` puts them back.
_CHANGED_BY_KUBELET = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)


@contextmanager
def locked() -> Iterator[None]:
    """One change of the cluster at a time on this machine."""
    path = lock_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another run of this tool to end")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _kubectl_words(*words: str) -> list[str | Path]:
    return [program("kubectl"), f"--kubeconfig={kubeconfig_path()}", *words]


def kubectl(*words: str, input_text: str | None = None) -> str:
    """Runs kubectl as the cluster's administrator."""
    return run(_kubectl_words(*words), input_text=input_text, timeout_seconds=60)


def _kubectl_succeeds(*words: str) -> bool:
    return succeeds(_kubectl_words("--request-timeout=5s", *words))


def _ends_by_exception(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _ignore_interrupts() -> None:
    """From here on the clearing runs to its end: a second interrupt would stop it half-way."""
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)


def up() -> None:
    """Brings the cluster up, or does nothing when it runs; leaves nothing behind when it fails."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _ends_by_exception)
    ensure_packages()
    build_all()
    with locked():
        if not problems():
            say("cluster: already up")
            return
        if traces():
            say("cluster: clearing what an earlier run has left")
            _down()
        start = time.monotonic()
        try:
            _up()
        except BaseException as error:
            _ignore_interrupts()
            say("cluster: did not come up; clearing")
            if isinstance(error, ClusterError):
                _keep_logs()
            _down()
            raise
        say(f"cluster: up in {time.monotonic() - start:.1f} s")


def _up() -> None:
    _record_settings()
    cgroups.create()
    say("node: keys, network, namespaces")
    pki.create(components.keys())
    shutil.copy(components.keys() / "admin.kubeconfig", kubeconfig_path())
    network.create()
    node.start_supervisor()
    started = [_start(name) for name in ("etcd", "containerd", "kube-apiserver")]
    _import_pause_image(started)
    node.wait_for("API server", lambda: _kubectl_succeeds("get", "--raw=/readyz"), 90, started)
    kubectl("apply", "-f", "-", input_text=components.coredns_rights())
    rest = ("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "coredns")
    started += [_start(name) for name in rest]
    say("node: waiting until it is Ready")
    node.wait_for("node", lambda: _kubectl_succeeds("get", "node", NODE_NAME), 60, started)
    _advertise_gpus()
    node.wait_for("Ready node", _node_is_ready, 60, started)
    node.wait_for("default service account", _default_account_exists, 60, started)
    _finished_mark().touch()


def _finished_mark() -> Path:
    """There once `up` has done all it does: what it started runs on when it is killed."""
    return state_folder() / "up-finished"


def _start(name: str) -> tuple[str, "subprocess.Popen[bytes]"]:
    say(f"node: starting {name}")
    return name, node.start(name, components.COMPONENTS[name]())


def _record_settings() -> None:
    """Notes the machine-wide settings before anything can change them."""
    state_folder().mkdir(parents=True)
    runtime_folder().mkdir(parents=True, exist_ok=True)
    (runtime_folder() / "cluster-folder").write_text(str(cluster_folder()))
    values = {}
    for name in _CHANGED_BY_KUBELET:
        path = Path("/proc/sys") / name
        if path.exists():
            values[name] = path.read_text().strip()
    (runtime_folder() / "settings.json").write_text(json.dumps(values))


def _import_pause_image(started: list[tuple[str, "subprocess.Popen[bytes]"]]) -> None:
    archive = state_folder() / "pause.tar"
    one_program_image(program("pause"), PAUSE_IMAGE, archive)
    node.wait_for("containerd", lambda: succeeds(ctr("version")), 30, started)
    import_archive(archive)


def ctr(*words: str | Path) -> list[str | Path]:
    """Words of a `ctr` call to the cluster's containerd, in the namespace the kubelet uses."""
    return ["ctr", "-a", containerd_socket(), "-n", IMAGE_NAMESPACE, *words]


def import_archive(archive: Path) -> None:
    """Gives an image archive to the cluster."""
    run(ctr("images", "import", archive), timeout_seconds=900)


def _advertise_gpus() -> None:
    """Says that the node has GPUs, as a device plugin would, so that requests for them count."""
    key = GPU_RESOURCE.replace("/", "~1")
    patch = [
        {"op": "add", "path": f"/status/{part}/{key}", "value": str(GPU_COUNT)}
        for part in ("capacity", "allocatable")
    ]
    words = ("--subresource=status", "--type=json", "-p", json.dumps(patch))
    kubectl("patch", "node", NODE_NAME, *words)


def _node_is_ready() -> bool:
    return _kubectl_succeeds("wait", f"node/{NODE_NAME}", "--for=condition=Ready", "--timeout=1s")


def _default_account_exists() -> bool:
    """Pods are refused until the controller has made it."""
    return _kubectl_succeeds("get", "serviceaccount", "default")


def _keep_logs() -> None:
    """After a failure the logs are worth more than an empty folder."""
    logs, kept = state_folder() / "logs", cluster_folder() / "last-logs"
    shutil.rmtree(kept, ignore_errors=True)
    if logs.is_dir():
        shutil.copytree(logs, kept)
        say(f"cluster: logs kept in {kept}")


def down() -> None:
    """Ends the cluster and removes every trace but the unreachable routes."""
    with locked():
        if not traces():
            say("cluster: already down")
            return
        _ignore_interrupts()
        start = time.monotonic()
        _down()
        say(f"cluster: down in {time.monotonic() - start:.1f} s")


def _down() -> None:
    cgroups.kill_all()
    network.remove()
    cgroups.remove()
    _restore_settings()
    for folder in (_recorded_cluster_folder() / "state", state_folder(), runtime_folder()):
        remove_tree(folder)
    kubeconfig_path().unlink(missing_ok=True)
    with suppress(OSError):  # absent, or with the logs of a failure in it
        cluster_folder().rmdir()


def _restore_settings() -> None:
    record = runtime_folder() / "settings.json"
    if not record.exists():
        return
    for name, value in json.loads(record.read_text()).items():
        path = Path("/proc/sys") / name
        if path.read_text().strip() != value:
            path.write_text(value)


def _recorded_cluster_folder() -> Path:
    """The folder `up` used: `down` may run with another HYBRIDPD_CACHE."""
    record = runtime_folder() / "cluster-folder"
    return Path(record.read_text()) if record.exists() else cluster_folder()


def mounts_below(folder: Path) -> list[str]:
    """Mount points below a folder, as this process sees them."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4] for line in lines]
    return [point for point in points if Path(point).is_relative_to(folder)]


def remove_tree(folder: Path) -> None:
    """Removes a folder, but never through a mount: behind one lies somebody else's data."""
    for point in sorted(mounts_below(folder), key=len, reverse=True):
        run(["umount", "--lazy", point])
    if mounts_below(folder):
        raise ClusterError(f"mounts: expected none below {folder}, got {mounts_below(folder)}")
    if folder.exists():
        shutil.rmtree(folder)


def traces() -> list[str]:
    """What of a cluster is on this machine, whole or half."""
    found = [
        ("control groups", cgroups.exist()),
        ("network namespace", network.namespace_path().exists()),
        ("link", network.link_exists()),
        ("state folder", state_folder().exists()),
        ("runtime folder", runtime_folder().exists()),
    ]
    return [what for what, there in found if there]


def problems() -> list[str]:
    """Why the cluster is not usable; empty when it is."""
    if cgroups.supervisor_pid() is None:
        return ["the node's supervisor does not run"]
    gone = [
        f"{name} does not run"
        for name in components.COMPONENTS
        if not cgroups.component_runs(name, components.program_path(name))
    ]
    if not _finished_mark().exists():
        gone.append("`up` has not finished")
    if not gone and not _node_is_ready():
        gone.append("the node is not Ready")
    return gone


def status() -> int:
    """Prints what runs; gives 0 when usable, 1 when down, 2 when in between."""
    if not traces():
        print("down")
        return 1
    found = problems()
    for problem in found:
        print(problem)
    if found:
        print("neither up nor down: run `up` or `down`")
        return 2
    print(f"up\nexport KUBECONFIG={kubeconfig_path()}")
    return 0


def shell(words: list[str]) -> int:
    """Runs a command inside the node; for looking around and for network faults in tests."""
    command = [*node.enter_command(), *(words or [os.environ.get("SHELL", "/bin/sh")])]
    return subprocess.run(command, check=False).returncode


def announce() -> None:
    """Tells how to use the cluster; only this goes to standard output."""
    sys.stderr.flush()
    print(f"export KUBECONFIG={kubeconfig_path()}")
    print(f'export PATH="{program("kubectl").parent}:{program("helm").parent}:$PATH"')
