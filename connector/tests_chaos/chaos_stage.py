"""Two real engines on hosts of their own, and a client that notes what it sees of them."""

import contextlib
import dataclasses
import signal
import socket
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor

from hybridpd_testkit.checkpoints import write_checkpoint
from hybridpd_testkit.engines import (
    PROBE,
    Engine,
    EngineFailedError,
    EngineSpec,
    base_environment,
    engine_python,
    stop_all,
)
from hybridpd_testkit.expectations import random_prompt
from hybridpd_testkit.nursery import Nursery
from hybridpd_testkit.pd_client import (
    PREFILL_PARAMS,
    complete,
    completion_request,
    evidence,
    require_nothing_left,
    wait_until,
)
from hybridpd_testkit.probe_orders import ProbeOrders
from hybridpd_testkit.processes import HttpError, inside_namespace

LEASE_SECONDS = 6
HANDSHAKE_SECONDS = 12
READ_SECONDS = 60
# How soon blocks are promised to be back, and what a loaded machine may add to it.
IDLE_SECONDS = LEASE_SECONDS + 5
SLACK_SECONDS = 20
LENGTH = 600  # tokens: 715 kB of state, 3 s on a link of 2 Mbit/s
SLOW_KILOBITS = 2000
TOKENS = 8
# UCX would use shared memory between processes of one machine: only TCP, and only on the wire.
TRANSPORT = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "data0"}
ANSWER, ERROR, HUNG, GONE = "answer", "error", "hung", "gone"


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a client saw: an answer with tokens, an error, nothing (hung), or it left (gone)."""

    what: str
    seconds: float = 0.0
    tokens: tuple[int, ...] = ()
    detail: str = ""
    params: dict | None = None


def ask(engine, prompt, params, *, max_tokens=TOKENS, request_id=None, within_seconds=150.0):
    """One completion on an engine that may be dead or die; never raises."""
    started = time.monotonic()
    try:
        document = engine.post(
            "/v1/completions",
            completion_request(prompt, max_tokens, kv_transfer_params=params),
            {"X-Request-Id": request_id or uuid.uuid4().hex},
            within_seconds,
        )
    except TimeoutError as error:
        return Seen(HUNG, time.monotonic() - started, detail=str(error))
    except (OSError, HttpError, EngineFailedError, ValueError) as error:
        return Seen(ERROR, time.monotonic() - started, detail=str(error)[:300])
    tokens = tuple(document["choices"][0]["token_ids"])
    params = document.get("kv_transfer_params")
    return Seen(ANSWER, time.monotonic() - started, tokens, params=params)


class Stage:
    """Prefill and decode, restarted as rows wish. ``settings`` replaces fields of both specs."""

    def __init__(self, network, directory, report):
        self.network = network
        self.nursery = Nursery(engine_python(), base_environment())
        self._directory = directory
        self.report = report
        self._checkpoint = write_checkpoint("nemotron-h", directory / "checkpoint")
        self._starts = 0
        self._engines = {}
        self._settings = {}
        self._workers = ThreadPoolExecutor(8)

    prefill = property(lambda self: self._engines["prefill"])
    decode = property(lambda self: self._engines["decode"])

    def orders(self, side):
        """Where the probe connector of a side looks for orders to stall."""
        return ProbeOrders(self._directory / "orders" / side)

    def _spec(self, side, policy, environment, clock_ahead_seconds, tp_size):
        prefill = side == "prefill"
        return EngineSpec(
            side,
            self._checkpoint,
            tp_size=tp_size,
            role="kv_producer" if prefill else "kv_consumer",
            connector=PROBE,
            failure_policy=policy,
            extra_config={
                "lease_seconds": LEASE_SECONDS,
                "handshake_timeout_seconds": HANDSHAKE_SECONDS,
            },
            environment={**TRANSPORT, **self.orders(side).environment(), **environment},
            place=dataclasses.replace(
                getattr(self.network, side).place(), clock_ahead_seconds=clock_ahead_seconds
            ),
        )

    def start(self, *sides, policy="fail", environment=None, clock_ahead_seconds=0, tp_size=1):
        """Start what does not run, with these settings; restart what runs with others."""
        wanted = {
            "policy": policy,
            "environment": environment or {},
            "clock_ahead_seconds": clock_ahead_seconds,
            "tp_size": tp_size,
        }
        for side in sides:
            if self.runs(side) and self._settings[side] == wanted:
                continue
            if side in self._engines:
                stop_all([self._engines[side]])
                wait_until(lambda side=side: self._address_is_free(side), "the address is free")
            self._starts += 1
            logs = self._directory / "logs" / f"{self._starts:03}"
            self._engines[side] = Engine(self._spec(side, **wanted), logs, self.nursery)
            self._settings[side] = wanted
            self._engines[side].start()
        for side in sides:
            self._engines[side].wait_ready()

    def runs(self, side):
        try:
            self._engines[side].check_alive()
        except (KeyError, EngineFailedError):
            return False
        return True

    def kill(self, *sides):
        """Every process of an engine at once, as a node that loses power."""
        for side in sides:
            self._engines[side].send_signal(signal.SIGKILL)
        for side in sides:
            wait_until(lambda side=side: not self.runs(side), f"{side} is dead")
            stop_all([self._engines[side]])
            wait_until(lambda side=side: self._address_is_free(side), f"{side} left its address")

    def _address_is_free(self, side):
        """A killed process is gone a moment before the last of its threads, and its sockets."""
        place = self._engines[side].spec.place
        with inside_namespace(place.namespace):
            try:
                socket.create_server((place.http_host, place.http_port)).close()
            except OSError:
                return False
        return True

    def calm(self):
        """Undo what a row did to the link and to the engines' lives."""
        self.network.calm()
        self.start("prefill", "decode")

    def later(self, action, *arguments, **named) -> Future:
        return self._workers.submit(action, *arguments, **named)

    def after(self, seconds, action):
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()
        return timer

    def prompt(self, seed, length=LENGTH):
        """A prompt and what a single engine answers to it."""
        prompt = random_prompt(length, seed)
        return prompt, complete(self.prefill, prompt, TOKENS).tokens

    def prefilled(self, prompt, request_id=None):
        """Parameters of a finished prefill."""
        answer = complete(
            self.prefill, prompt, 1, request_id, kv_transfer_params=dict(PREFILL_PARAMS)
        )
        return answer.transfer_params

    def load(self, prompt, params, **named):
        return ask(self.decode, prompt, params, **named)

    def during_read(self, prompt, params, fault, **named):
        """Start a load on a slow link, play ``fault`` when its bytes flow; what its client saw."""
        self.network.throttle(SLOW_KILOBITS)
        before = self.network.bytes_to_decode()
        answer = self.later(self.load, prompt, params, **named)
        wait_until(lambda: self.network.bytes_to_decode() - before > 50_000, "bytes flow to decode")
        assert not answer.done(), answer.result()
        fault()
        return answer.result()

    def held(self):
        """What NIXL and the processes hold on either side."""
        return {
            side: engine.worker_reports("report_agent")[0] for side, engine in self._engines.items()
        }

    def grown_since(self, before, files_more):
        """What is held now and was not before. Closed connections take a moment to go."""
        allowed = {"files": files_more}

        def growth():
            return {
                f"{side}: {what}": (before[side][what], count)
                for side, counts in self.held().items()
                for what, count in counts.items()
                if count > before[side][what] + allowed.get(what, 0)
            }

        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not growth(), "what a row used is given back")
        return growth()

    def require_idle(self, timeout_seconds=IDLE_SECONDS + SLACK_SECONDS):
        """Both engines hold no block and no lease; seconds until it was so."""
        started = time.monotonic()
        require_nothing_left(self.prefill, self.decode, timeout_seconds=timeout_seconds)
        return time.monotonic() - started

    def counted(self, before):
        return evidence(self.decode.metrics().since(before))

    def reasons(self, before):
        """Why loads failed on decode since ``before`` (None: its start), by its own counter."""
        now = self.decode.metrics()
        growth = now.since(before) if before is not None else now
        return {
            dict(labels)["reason"]
            for (name, labels), value in growth.samples.items()
            if name == "hybridpd_load_failures_total" and value > 0
        }

    def close(self):
        self._workers.shutdown(wait=False, cancel_futures=True)
        stop_all(self._engines.values())
        self.nursery.close()
