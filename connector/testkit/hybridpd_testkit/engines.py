"""Start and stop real vLLM engines as processes.

One `Engine` is one ``python -m vllm.entrypoints.openai.api_server`` with its log in a file. Start
several before waiting for any: they load in parallel.

    spec = EngineSpec("p", checkpoint, role="kv_producer")
    with running([spec, EngineSpec("d", checkpoint, role="kv_consumer")], logs) as (p, d):
        ...
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridpd_testkit.metrics import Metrics, parse_metrics
from hybridpd_testkit.nursery import Nursery
from hybridpd_testkit.processes import (
    HttpError,
    Leader,
    die_with_parent,
    end_sessions,
    free_port,
    http_get,
    http_post,
    log_tail,
    session_members,
)

CONNECTOR_ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 300.0
ENGINE_PYTHON_VARIABLE = "HYBRIDPD_ENGINE_PYTHON"
CACHE_VARIABLE = "HYBRIDPD_CACHE"


@dataclass(frozen=True, slots=True)
class ConnectorClass:
    """A connector as vLLM's kv-transfer-config names it; no module path for an in-tree one."""

    name: str
    module: str | None


SHIPPED = ConnectorClass("HybridNixlConnector", "hybridpd_connector.connector")
PROBE = ConnectorClass("ProbeConnector", "hybridpd_testkit.probe_connector")
UPSTREAM = ConnectorClass("NixlConnector", None)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server runs: its network (None: ours) and addresses; ports None are picked.

    ``clock_ahead_seconds``: how far its steady clocks (monotonic and boot time) are ahead of ours.
    """

    namespace: str | None = None
    http_host: str = "127.0.0.1"
    http_port: int | None = None
    data_host: str = "127.0.0.1"
    side_channel_port: int | None = None
    clock_ahead_seconds: int = 0


HERE = Place()


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What to start. ``role`` None is a plain engine without any connector."""

    name: str
    checkpoint: Path
    tp_size: int = 1
    role: str | None = None
    failure_policy: str = "fail"
    connector: ConnectorClass = SHIPPED
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    num_blocks: int = 512
    max_model_len: int = 2048
    place: Place = HERE
    dtype: str = "float32"

    def transfer_config(self) -> dict[str, Any] | None:
        """The value of ``--kv-transfer-config``."""
        if self.role is None:
            return None
        config = {
            "kv_connector": self.connector.name,
            "kv_role": self.role,
            "kv_load_failure_policy": self.failure_policy,
            "kv_connector_extra_config": dict(self.extra_config),
        }
        if self.connector.module is not None:
            config["kv_connector_module_path"] = self.connector.module
        return config

    def server_arguments(self, port: int) -> list[str]:
        """The server's command line after the module name."""
        transfer = self.transfer_config()
        return [
            *("--model", str(self.checkpoint), "--served-model-name", "tiny"),
            *("--host", self.place.http_host, "--port", str(port)),
            *("--dtype", self.dtype, "--max-model-len", str(self.max_model_len)),
            *("--tensor-parallel-size", str(self.tp_size)),
            *("--num-gpu-blocks-override", str(self.num_blocks)),
            # Compiling is not worth it for a model of a megabyte: 3 layers run faster than they
            # compile, and a start is 10 s shorter.
            "--enforce-eager",
            # The CPU scan of Mamba-2 returns no state in the middle of a prompt, which prefix
            # caching needs.
            "--no-enable-prefix-caching",
            *("--disable-uvicorn-access-log", "--enable-prompt-tokens-details"),
            *("--worker-extension-cls", "hybridpd_testkit.worker_report.WorkerReport"),
            *(("--kv-transfer-config", json.dumps(transfer)) if transfer else ()),
            *self.arguments,
        ]


def engine_python() -> str:
    """The interpreter that has vLLM: HYBRIDPD_ENGINE_PYTHON, else the running one."""
    return os.environ.get(ENGINE_PYTHON_VARIABLE) or sys.executable


def base_environment() -> dict[str, str]:
    """What every engine needs on a small machine without a GPU or a network."""
    cache = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "hybridpd")
    compiled = cache / "compile" / "vllm-cpu"
    paths = [str(CONNECTOR_ROOT), str(CONNECTOR_ROOT / "testkit"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        # Binding ranks to cores stalls threads for seconds when engines share two cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Opens /collective_rpc, through which WorkerReport answers.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CACHE_ROOT": str(compiled / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def engine_environment(spec: EngineSpec, side_channel_port: int) -> dict[str, str]:
    """The environment of one engine."""
    return {
        **base_environment(),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": spec.place.data_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        **spec.environment,
    }


class EngineFailedError(RuntimeError):
    """An engine ended or did not come up; the message has the end of its log."""


class Engine:
    """One running server. `start` returns at once; `wait_ready` blocks until it answers."""

    def __init__(
        self, spec: EngineSpec, log_directory: Path, nursery: Nursery | None = None
    ) -> None:
        """With a ``nursery`` the server is forked from it, else it is a process of its own (and
        lives in our network)."""
        self.spec = spec
        self.port = spec.place.http_port or free_port()
        self.url = f"http://{spec.place.http_host}:{self.port}"
        self.log_path = log_directory / f"{spec.name}.log"
        self._nursery = nursery
        self._process: Leader | None = None
        self._started = 0.0

    def start(self) -> None:
        """Start the server process. Call it from a thread that outlives the engine."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        arguments = self.spec.server_arguments(self.port)
        place = self.spec.place
        environment = engine_environment(self.spec, place.side_channel_port or free_port())
        if self._nursery is not None:
            self._process = self._nursery.start(
                arguments, environment, self.log_path, place.namespace, place.clock_ahead_seconds
            )
        else:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    [engine_python(), "-m", "vllm.entrypoints.openai.api_server", *arguments],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, no locks
                )
        self._started = time.monotonic()

    def wait_ready(self, timeout_seconds: float = START_SECONDS) -> float:
        """Wait until /health answers; seconds since the start."""
        while True:
            self.check_alive()
            seconds = time.monotonic() - self._started
            with contextlib.suppress(OSError, HttpError):
                http_get(f"{self.url}/health", 2.0)
                return seconds
            if seconds > timeout_seconds:
                raise self._failed(f"not ready after {timeout_seconds:.0f} s")
            time.sleep(0.3)

    def describe(self) -> str:
        """One line for people: name, TP, role, port."""
        role = self.spec.role or "plain"
        return f"{self.spec.name} (TP{self.spec.tp_size}, {role}, port {self.port})"

    @property
    def pid(self) -> int:
        """The API server's process."""
        return self._running().pid

    def check_alive(self) -> None:
        """Raise ``EngineFailedError`` with the end of the log when the process is gone."""
        process = self._running()
        if process.poll() is not None:
            raise self._failed(f"ended with exit code {process.poll()}")

    def _failed(self, what: str) -> EngineFailedError:
        tail = log_tail(self.log_path)
        return EngineFailedError(
            f"engine {self.describe()} {what}; end of {self.log_path}:\n{tail}"
        )

    def post(
        self,
        path: str,
        document: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 120.0,
    ) -> Any:
        """POST to the server; a dead engine is reported as such, with its log."""
        try:
            return http_post(self.url + path, document, headers, timeout_seconds)
        except HttpError:
            raise
        except OSError:
            time.sleep(0.5)  # a crash closes its sockets a moment before the process is gone
            self.check_alive()
            raise

    def metrics(self) -> Metrics:
        """The server's metrics as they are now."""
        return parse_metrics(http_get(f"{self.url}/metrics"))

    def worker_reports(self, method: str = "report_cache", *arguments: str) -> list[Any]:
        """What every rank answers to a method of ``WorkerReport``, in rank order."""
        answer = self.post("/collective_rpc", {"method": method, "args": list(arguments)})
        results: list[Any] = answer["results"]
        return results

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to every process of the engine (freeze with SIGSTOP, thaw with SIGCONT)."""
        for pid in session_members(self._running().pid):
            os.kill(pid, signal_number)

    def _running(self) -> Leader:
        if self._process is None:
            raise EngineFailedError(f"engine {self.describe()} was never started")
        return self._process


def stop_all(engines: Iterable[Engine]) -> None:
    """End engines and everything they started, together."""
    end_sessions([e._process for e in engines if e._process is not None])


@contextlib.contextmanager
def running(
    specs: Sequence[EngineSpec], log_directory: Path, nursery: Nursery | None = None
) -> Iterator[tuple[Engine, ...]]:
    """Engines that start together, are ready inside the block, and are gone after it."""
    engines = tuple(Engine(spec, log_directory, nursery) for spec in specs)
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        yield engines
    finally:
        stop_all(engines)
