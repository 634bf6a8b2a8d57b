"""Start vLLM servers by forking one process that has imported vLLM already.

Importing vLLM takes about 12 s of a core, and a plain server does it in each of its three or more
processes. Here it happens once: the nursery imports, every server is a fork of it, and a server's
engine core and workers are forks of the server (vLLM's own default; its CPU platform asks for
``spawn`` only to preload allocator libraries). What runs is otherwise what
``python -m vllm.entrypoints.openai.api_server`` runs, with the same command line.

The nursery is a child of the tests and talks JSON, a line each, over its standard input and output:

    {"start": {"arguments": [...], "environment": {...}, "log": "path"}}  ->  {"pid": 123}
    {"poll": 123}                                           ->  {"status": null or exit code}
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hybridpd_testkit.processes import (
    die_with_parent,
    end_sessions,
    enter_namespace,
    set_clock_ahead,
)

_SERVER = "vllm.entrypoints.openai.api_server"
_SPIN_SECONDS = 0.0002


class Server:
    """A forked server, used like a ``subprocess.Popen`` that leads its own session."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask({"poll": self.pid})["status"]
        return self.returncode


class Nursery:
    """The tests' side: starts the nursery process on first use."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        self._command = [python, "-m", "hybridpd_testkit.nursery"]
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        namespace: str | None = None,
        clock_ahead_seconds: int = 0,
    ) -> Server:
        """Fork a server. ``arguments`` are those after the module name; ``namespace`` is the
        network it lives in, ``clock_ahead_seconds`` how far its steady clocks are ahead."""
        order = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "log": str(log),
            "namespace": namespace,
            "clock_ahead_seconds": clock_ahead_seconds,
        }
        return Server(self, int(self.ask({"start": order})["pid"]))

    def ask(self, question: Mapping[str, Any]) -> Any:
        """One question, one answer."""
        with self._lock:
            process = self._running()
            if process.stdin is None or process.stdout is None:
                raise RuntimeError("nursery: expected pipes, got none")
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"nursery ended with exit code {process.wait()}")
        return json.loads(line)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, no locks
            )
        return self._process

    def close(self) -> None:
        """End the nursery; its servers must have been stopped."""
        if self._process is not None:
            end_sessions([self._process])
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None


def main() -> None:
    """The nursery process: import, then answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints must not look like an answer
    _import_all()
    for line in sys.stdin:
        question = json.loads(line)
        if "start" in question:
            answer: dict[str, Any] = {"pid": _fork(question["start"], answers.fileno())}
        else:
            pid, status = os.waitpid(question["poll"], os.WNOHANG)
            answer = {"status": os.waitstatus_to_exitcode(status) if pid else None}
        print(json.dumps(answer), file=answers, flush=True)


def _import_all() -> None:
    """Import what a server, its engine core and its workers need; nothing may start a thread."""
    import importlib

    for module in (
        _SERVER,
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.model_executor.models.nemotron_h",
        "vllm.model_executor.models.falcon_h1",
        "vllm.model_executor.models.llama",
        "hybridpd_connector.connector",
    ):
        importlib.import_module(module)
    context = multiprocessing.get_context("fork")
    for module in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
        vars(importlib.import_module(module))["get_mp_context"] = lambda: context
    # Ranks that spin for each other's part of a sum lose whole time slices when they outnumber the
    # cores; over sockets, vLLM's own other way, they sleep.
    communicator = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
    communicator.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    # An engine core and its workers spin on sched_yield for each other's messages. A pair has more
    # of them than two cores; then what is to be waited for gets no processor, for minutes at worst.
    messages = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    vars(messages)["sched_yield"] = lambda: time.sleep(_SPIN_SECONDS)


def _mask_bf16_on_old_versions(arguments: Sequence[str]) -> None:
    """vLLM before 0.32 packs convolution weights for AVX512-BF16 also when they are float32, and
    then has no kernel for them: let a server of a float32 model see a CPU without."""
    import torch
    from vllm import __version__

    old = tuple(int(part) for part in __version__.split(".")[:2]) < (0, 32)
    dtypes = [value for name, value in pairwise(arguments) if name == "--dtype"]
    if old and dtypes[-1:] == ["float32"]:
        vars(torch.cpu)["_is_avx512_bf16_supported"] = lambda: False


def _fork(order: Mapping[str, Any], answers_fd: int) -> int:
    """Fork a server; returns its process id in the nursery and never returns in the child."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.close(answers_fd)
        _become_server(order)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _become_server(order: Mapping[str, Any]) -> None:
    os.setsid()
    die_with_parent()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    if order["namespace"] is not None:
        enter_namespace(order["namespace"])
    if order["clock_ahead_seconds"]:
        set_clock_ahead(order["clock_ahead_seconds"])
    os.environ.update(order["environment"])
    _mask_bf16_on_old_versions(order["arguments"])
    sys.argv = [_SERVER, *order["arguments"]]
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
