"""kubectl as an object: one kubeconfig, one namespace, answers as dictionaries.

The tests and the demo speak to a cluster through kubectl only, so that they run against any cluster
a kubeconfig names and every step can be repeated by hand.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridpd_cluster import settings
from tooling.binaries import program

Object = dict[str, Any]
REQUEST_SECONDS = 60
WATCH_SECONDS = 30


class KubectlError(Exception):
    """kubectl ended with an error; `stderr` is what it said."""

    def __init__(self, arguments: Sequence[str], stderr: str) -> None:
        super().__init__(f"kubectl {' '.join(arguments)}: {stderr.strip()}")
        self.stderr = stderr


@dataclasses.dataclass(frozen=True)
class Kubectl:
    """kubectl bound to a cluster and a namespace."""

    executable: Path
    kubeconfig: Path
    namespace: str = "default"

    def within(self, namespace: str) -> Kubectl:
        """The same cluster, another namespace."""
        return dataclasses.replace(self, namespace=namespace)

    def command(self, *arguments: str) -> list[str]:
        """The full command line."""
        fixed = [f"--kubeconfig={self.kubeconfig}", f"--namespace={self.namespace}"]
        return [str(self.executable), *fixed, *arguments]

    def run(self, *arguments: str, text: str = "", seconds: float = REQUEST_SECONDS) -> str:
        """Standard output of one call; KubectlError when it fails or lasts too long."""
        try:
            done = subprocess.run(
                self.command(*arguments),
                input=text,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(arguments, f"no answer within {seconds:.0f} s") from error
        if done.returncode != 0:
            raise KubectlError(arguments, done.stderr)
        return done.stdout

    def get(self, kind: str, name: str) -> Object | None:
        """One object, or None when there is none of that name."""
        text = self.run("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def find(self, kinds: str, selector: str = "") -> list[Object]:
        """Objects of one or more comma-separated kinds, sorted by kind and name."""
        chosen = [f"--selector={selector}"] if selector else []
        items = json.loads(self.run("get", kinds, "-o", "json", *chosen))["items"]
        return sorted(items, key=lambda item: (item["kind"], item["metadata"]["name"]))

    def apply(self, document: Object, *flags: str) -> str:
        """Apply one object; flags such as `--dry-run=server` pass through."""
        return self.run("apply", "-f", "-", *flags, text=json.dumps(document))

    def create(self, document: Object, *flags: str) -> str:
        """Create one object."""
        return self.run("create", "-f", "-", *flags, text=json.dumps(document))

    def merge(self, kind: str, name: str, change: Object) -> None:
        """Merge-patch one object."""
        self.run("patch", kind, name, "--type=merge", "-p", json.dumps(change))

    def delete(self, kind: str, name: str, *flags: str) -> None:
        """Ask for the deletion of one object and return at once."""
        self.run("delete", kind, name, "--ignore-not-found", "--wait=false", *flags)

    def make_namespace(self, name: str, labels: dict[str, str] | None = None) -> Kubectl:
        """Create a namespace unless it exists, and give a kubectl bound to it."""
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {"name": name, "labels": labels or {}},
            }
        )
        return self.within(name)


class Watch:
    """Every change of some kinds, in order, from the moment `with` begins.

    A test that polls can miss a state that lasts less than its pause; a watch cannot. There must be
    at least one object of each kind when it begins.
    """

    def __init__(self, kubectl: Kubectl, kinds: str, selector: str) -> None:
        self.events: list[tuple[str, Object]] = []
        self._commands = [
            kubectl.command(
                "get",
                kind,
                f"--selector={selector}",
                "--watch",
                "--output-watch-events",
                "-o",
                "json",
            )
            for kind in kinds.split(",")
        ]
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Watch:
        for command in self._commands:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            begun = threading.Event()
            thread = threading.Thread(target=self._read, args=(process, begun), daemon=True)
            thread.start()
            self._processes.append(process)
            self._threads.append(thread)
            # A watch that has not begun misses what happens next.
            if not begun.wait(WATCH_SECONDS):
                self.__exit__()
                raise KubectlError(command[3:], f"no object within {WATCH_SECONDS} s")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process, thread in zip(self._processes, self._threads, strict=True):
            process.wait(timeout=10)
            thread.join(timeout=10)
            if process.stdout:
                process.stdout.close()

    def seen(self) -> list[tuple[str, Object]]:
        """A copy of (ADDED | MODIFIED | DELETED, object) so far."""
        with self._lock:
            return list(self.events)

    def _read(self, process: subprocess.Popen[str], begun: threading.Event) -> None:
        # kubectl prints one event a line, what exists already first.
        for line in process.stdout or ():
            event = json.loads(line)
            with self._lock:
                self.events.append((event["type"], event["object"]))
            begun.set()


def connect() -> Kubectl:
    """kubectl for the cluster of KUBECONFIG, or of `make cluster-up`."""
    return Kubectl(executable=program("kubectl"), kubeconfig=kubeconfig_path())


def kubeconfig_path() -> Path:
    """The kubeconfig in use; ends the program when there is none."""
    named = os.environ.get("KUBECONFIG")
    if named:
        return Path(named)
    path = settings.kubeconfig_path()
    if not path.exists():
        sys.exit(f"kubeconfig: no cluster at {path}; run `make cluster-up` or set KUBECONFIG")
    return path
