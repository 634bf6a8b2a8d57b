"""`make demo`: every part real, on this machine, in minutes.

Ends with status 1 when anything differs from what it should be, and says what.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import completions
import nodefiles
import reference
import release
import waits
from hybridpd_demo.checks import DemoError, compare, moved_bytes
from hybridpd_demo.progress import follow_until_ready
from kubectl import Kubectl, KubectlError, Object, connect
from services import EXAMPLES, example

NAMESPACE = "hybridpd-demo"
FILE = EXAMPLES / "tiny-nemotron.yaml"
CURL_PROMPT = "a sentence"


def main() -> int:
    """Run the demo; 0 when the pair's tokens and bytes are exactly right."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridpd_demo",
        description="Start a one-node Kubernetes on this machine, install the operator with helm, "
        "apply docs/examples/tiny-nemotron.yaml and compare the pair's tokens with one engine's.",
        epilog="It needs root on Debian 12. Set KUBECONFIG to use a cluster you have instead; its "
        "node must hold the images and /var/lib/hybridpd-demo.",
    )
    parser.add_argument("--down", action="store_true", help="stop the cluster when done")
    options = parser.parse_args()
    started = time.monotonic()
    try:
        run()
    except (DemoError, waits.WaitError, KubectlError, release.HelmError) as error:
        print(f"\nDEMO FAILED: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"\nDEMO FAILED: {error}", file=sys.stderr)
        return 1
    finally:
        if options.down:
            cluster("down")
    print(f"\nDone in {time.monotonic() - started:.0f} s.")
    if not options.down:
        print(f"Look around:  export KUBECONFIG={connect().kubeconfig}")
        print(f"              kubectl -n {NAMESPACE} get hpd,pods")
        print(f"Tear down:    make cluster-down   (the cache and {nodefiles.FOLDER} stay)")
    return 0


def run() -> None:
    """All steps, in order."""
    if "KUBECONFIG" not in os.environ:
        with step("A one-node Kubernetes: etcd to kubelet, in a network namespace"):
            cluster("up")
        with step("Images of operator, connector and router"):
            cluster("images")
    with step("A random hybrid checkpoint of one megabyte, and vLLM's packages"):
        nodefiles.prepare()
    admin = connect()
    with step("helm install"):
        print(release.install(admin).split("NOTES:")[-1].strip())
    kubectl = admin.make_namespace(NAMESPACE)
    service = example()
    name = service["metadata"]["name"]
    with step(f"kubectl apply -f {FILE.relative_to(release.ROOT)}"):
        print(kubectl.run("apply", "-f", str(FILE)).strip())
        follow_until_ready(kubectl, name)
    with step("Completions through the router"):
        answers = ask(kubectl, service)
    with step("The same prompts to a single engine"):
        expected = reference.answers(kubectl, service, completions.prompts())
        compare(answers, expected)
    with step("What the status says"):
        show(kubectl, name)
    with step("Bytes moved, predicted and measured"):
        print(moved_bytes(kubectl, name))


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """A headline before, the seconds after."""
    print(f"\n== {title}", flush=True)
    started = time.monotonic()
    yield
    print(f"   ({time.monotonic() - started:.0f} s)", flush=True)


def cluster(action: str) -> None:
    """Run one command of the cluster's program."""
    subprocess.run([sys.executable, "-m", "hybridpd_cluster", action], check=True)


def ask(kubectl: Kubectl, service: Object) -> dict[str, completions.Answer]:
    """Every prompt through the router; the first one by curl, shown as it is sent."""
    model = service["spec"]["model"]["servedName"]
    prompts = completions.prompts()
    with completions.port_forward(kubectl, f"svc/{service['metadata']['name']}", 8000) as url:
        try:
            answers = {CURL_PROMPT: curl(url, model, prompts[CURL_PROMPT])}
            for name, prompt in prompts.items():
                if name not in answers:
                    answers[name] = completions.complete(url, model, prompt)
        except completions.CompletionError as error:
            raise DemoError(f"no completion through the router: {error}") from error
    return answers


def curl(url: str, model: str, prompt: str) -> completions.Answer:
    """One completion the way a user asks for it."""
    body = json.dumps(completions.request_body(model, prompt, 24))
    command = ["curl", "-sS", "--max-time", "120", f"{url}/v1/completions"]
    command += ["-H", "Content-Type: application/json", "-d", body]
    print("   $ " + " ".join(command[:5]) + f" -H 'Content-Type: application/json' -d '{body}'")
    if shutil.which("curl") is None:
        print("   (curl is not installed: asking from Python)")
        return completions.complete(url, model, prompt)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DemoError(f"curl: {done.stderr.strip()}")
    answer = completions.parse(done.stdout)
    print(f"   {json.loads(done.stdout)['choices'][0]['text']!r}")
    return answer


def show(kubectl: Kubectl, name: str) -> None:
    """The printer columns and every condition."""
    waits.for_condition(kubectl, name, "KVTransferVerified", "True")
    print(kubectl.run("get", "hpd", name, "-o", "wide").rstrip())
    service = kubectl.get("hpd", name) or {}
    for entry in service["status"]["conditions"]:
        print(f"   {entry['type']:<20} {entry['status']:<8} {entry['reason']}: {entry['message']}")


if __name__ == "__main__":
    sys.exit(main())
