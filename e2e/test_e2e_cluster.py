"""The cluster itself: what the other end-to-end tests build on, and that it leaves nothing behind.

The tests of the node use the cluster that is up; those of `up` and `down` start a second one beside
it, with its own number, so that the first is left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import nodefiles
import waits
from hybridpd_cluster import lifecycle
from kubectl import Kubectl, KubectlError, Object

# Not a gap: these kill programs of the node, which nobody wants of a cluster of theirs. `make test`
# runs all of them, on the cluster that it starts.
pytestmark = pytest.mark.skipif(
    not nodefiles.node_is_here(),
    reason="about the cluster this checkout starts; runs when KUBECONFIG names no other one",
)
NAMESPACE = "hybridpd-cluster-test"
IMAGE = "localhost/hybridpd-engine-base:dev"
SERVER = "print('serving', flush=True)\nimport http.server as h\nh.test(h.SimpleHTTPRequestHandler)"
E2E = Path(__file__).resolve().parent
SECOND = {"HYBRIDPD_CLUSTER_NUMBER": "1", "PYTHONPATH": str(E2E), "PYTHONUNBUFFERED": "1"}
SECOND_NAME = "hybridpd-node-1"


def pod(name: str, gpus: int, **security: object) -> Object:
    """A pod that serves its /etc, allowed by the restricted policy unless `security` differs."""
    context = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", SERVER],
        "workingDir": "/etc",
        "readinessProbe": {"httpGet": {"port": 8000, "path": "/hostname"}, "periodSeconds": 1},
        "resources": {"limits": {"nvidia.com/gpu": str(gpus)}},
        "securityContext": {**context, **security},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": 0,
            "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
            "automountServiceAccountToken": False,
        },
    }


SERVICE: Object = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web"},
    "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8000}]},
}


@pytest.fixture(scope="module")
def web(admin: Kubectl) -> Iterator[Kubectl]:
    """A namespace under the restricted policy, with a Ready pod `web` behind a Service `web`."""
    policy = {"pod-security.kubernetes.io/enforce": "restricted"}
    bound = admin.make_namespace(NAMESPACE, policy)
    waits.until("default account", lambda: found(bound.get("serviceaccount", "default")), 60)
    bound.apply(SERVICE)
    bound.apply(pod("web", gpus=1))
    bound.run("wait", "pod/web", "--for=condition=Ready", "--timeout=60s", seconds=90)
    yield bound
    admin.run("delete", "namespace", NAMESPACE, seconds=120)


def found(answer: Object | None) -> tuple[bool, Object | None]:
    return answer is not None, answer


def python_in_pod(web: Kubectl, code: str) -> str:
    return web.run("exec", "web", "--", "python3", "-c", code).strip()


def test_node_is_ready_and_offers_h200_gpus(admin: Kubectl) -> None:
    (node,) = admin.find("nodes", "nvidia.com/gpu.product=NVIDIA-H200")
    conditions = {entry["type"]: entry["status"] for entry in node["status"]["conditions"]}
    assert conditions["Ready"] == "True"
    assert conditions["DiskPressure"] == "False"
    assert node["status"]["capacity"]["nvidia.com/gpu"] == "8"
    assert node["status"]["allocatable"]["nvidia.com/gpu"] == "8"


def test_restricted_pod_runs_as_its_user_with_a_read_only_root(web: Kubectl) -> None:
    said = python_in_pod(web, "import os; print(os.getuid(), os.access('/', os.W_OK))")
    assert said == "65532 False"


def test_pod_that_breaks_the_namespace_policy_is_refused(web: Kubectl) -> None:
    with pytest.raises(KubectlError, match="violates PodSecurity"):
        web.create(pod("root", gpus=0, runAsNonRoot=False, runAsUser=0))


def test_more_gpus_than_the_node_has_are_not_scheduled(web: Kubectl) -> None:
    web.apply(pod("greedy", gpus=8))  # one of the eight belongs to `web`

    def refused() -> tuple[bool, Object | None]:
        greedy = web.get("pod", "greedy")
        return "Insufficient nvidia.com/gpu" in json.dumps(greedy), greedy

    try:
        waits.until("greedy is refused by the scheduler", refused, 30)
    finally:
        web.delete("pod", "greedy", "--force")


def test_service_name_resolves_in_a_pod_and_leads_back_to_it(web: Kubectl) -> None:
    service = web.get("service", "web")
    assert service is not None
    name = f"web.{NAMESPACE}.svc.cluster.local"
    resolved = python_in_pod(web, f"import socket; print(socket.gethostbyname({name!r}))")
    assert resolved == service["spec"]["clusterIP"]
    read = f"import urllib.request as u; print(u.urlopen('http://{name}/hostname').read().decode())"

    def answered() -> tuple[bool, str]:
        said = python_in_pod(web, read)
        return said == "web", said

    # A pod that is Ready gets into the node's rules a moment later.
    waits.until("the service leads to the pod", answered, 20)


def test_node_has_no_way_out() -> None:
    # 203.0.113.0/24 is for documentation, so it stands for any address elsewhere.
    command = [
        sys.executable,
        "-m",
        "hybridpd_cluster",
        "exec",
        "ip",
        "route",
        "get",
        "203.0.113.1",
    ]
    environment = {**os.environ, "PYTHONPATH": str(E2E)}
    asked = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert asked.returncode != 0
    assert "Network is unreachable" in asked.stderr


def test_logs_are_served(web: Kubectl) -> None:
    assert "serving" in web.run("logs", "web").splitlines()


def test_port_forward_reaches_the_pod(web: Kubectl) -> None:
    command = web.command("port-forward", "pod/web", ":8000")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forward:
        try:
            assert forward.stdout is not None
            # "Forwarding from 127.0.0.1:PORT -> 8000"
            port = int(forward.stdout.readline().split("127.0.0.1:")[1].split(" ")[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/hostname", timeout=10) as answer:
                assert answer.read().decode().strip() == "web"
        finally:
            forward.terminate()


def hear_interrupts() -> None:
    """In the child: a shell that starts its jobs in the background has them ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def second_cluster(command: str) -> Iterator[subprocess.Popen[str]]:
    """The tool at work on a second cluster, as a process group of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "hybridpd_cluster", command],
        env={**os.environ, **SECOND},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=hear_interrupts,  # noqa: PLW1509 - one system call, no locks
    ) as process:
        yield process


def run_second(command: str) -> int:
    """Exit status of one command for the second cluster."""
    with second_cluster(command) as process:
        process.communicate(timeout=60)
        return process.returncode


def interrupt_at(line: str, sent: signal.Signals) -> int:
    """Sends a signal to `up` when it prints a line; gives its exit status."""
    with second_cluster("up") as process:
        assert process.stderr is not None
        for printed in process.stderr:
            if line in printed:
                os.killpg(process.pid, sent)
                break
        else:
            pytest.fail(f"`up` ended without printing {line!r}")
        process.communicate(timeout=60)
        return process.returncode


def leftovers() -> list[str]:
    """Processes, mounts, control groups, network and folders of the second cluster."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cgroup"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if f"/{SECOND_NAME}/" in entry.read_text():
                found.append(f"process {entry.parent.name}")
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    found += [line for line in mounts if SECOND_NAME in line or "/cluster-1/" in line]
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    found += [line for line in links.splitlines() if line.startswith("hybridpd1")]
    groups = Path("/sys/fs/cgroup")
    places = [Path("/run/netns") / SECOND_NAME, Path("/run") / SECOND_NAME]
    places += [groups / SECOND_NAME, *groups.glob(f"*/{SECOND_NAME}")]
    return found + [str(place) for place in places if place.exists()]


@pytest.fixture
def second() -> Iterator[None]:
    """Nothing of the second cluster before, and nothing after, whatever the test did."""
    assert run_second("down") == 0
    yield
    assert run_second("down") == 0


@pytest.mark.usefixtures("second")
@pytest.mark.parametrize("line", ["network, namespaces", "starting kube-apiserver", "it is Ready"])
def test_interrupted_up_clears_up_by_itself(line: str) -> None:
    assert interrupt_at(line, signal.SIGINT) == 130
    assert leftovers() == []


@pytest.mark.usefixtures("second")
def test_killed_up_is_cleared_by_down(admin: Kubectl) -> None:
    assert interrupt_at("starting coredns", signal.SIGKILL) == -signal.SIGKILL
    time.sleep(5)  # its programs run on without it
    assert leftovers() != []
    assert run_second("status") == 2  # also when all of them came up
    assert run_second("down") == 0
    assert leftovers() == []
    assert run_second("status") == 1
    assert admin.find("nodes")  # the first cluster did not notice


def test_folders_are_removed_without_touching_what_is_mounted_in_them(tmp_path: Path) -> None:
    data, tree = tmp_path / "data", tmp_path / "tree"
    (tree / "volume").mkdir(parents=True)
    data.mkdir()
    (data / "checkpoint").write_text("precious")
    subprocess.run(["mount", "--bind", str(data), str(tree / "volume")], check=True)
    lifecycle.remove_tree(tree)
    assert not tree.exists()
    assert (data / "checkpoint").read_text() == "precious"
