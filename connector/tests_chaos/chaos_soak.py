"""Many clients while engines and the link fail at random: what they get, and what is left."""

import collections
import contextlib
import dataclasses
import itertools
import random
import signal
import threading
import time

from chaos_stage import ANSWER, ERROR, HUNG, TOKENS, ask

from hybridpd_testkit.expectations import random_prompt
from hybridpd_testkit.pd_client import PREFILL_PARAMS, completion_request
from hybridpd_testkit.processes import HttpError
from hybridpd_testkit.relay import Weather

IN_FLIGHT = 64
HUNG_SECONDS = 120.0
POLICY = "recompute"
PROMPTS = 32
LENGTHS = (2, 40, 129, 250, 400, 600)
# Batches of another size sum in another order: prompts whose best token leads by less are left out.
SMALLEST_LEAD = 0.02
COUNTERS = ("hybridpd_loads_total", "hybridpd_recomputed_requests_total")
FAILURES = "hybridpd_load_failures_total"


def certain_prompts(engine):
    """Prompts with the tokens of a single engine, which no order of sums can change."""
    found = []
    for seed in itertools.count(1000):
        prompt = random_prompt(LENGTHS[seed % len(LENGTHS)], seed)
        document = engine.post("/v1/completions", completion_request(prompt, TOKENS, logprobs=2))
        (choice,) = document["choices"]
        tops = [sorted(top.values()) for top in choice["logprobs"]["top_logprobs"]]
        if min(top[-1] - top[-2] for top in tops) >= SMALLEST_LEAD:
            found.append((prompt, tuple(choice["token_ids"])))
        if len(found) == PROMPTS:
            return found
    raise AssertionError("itertools.count ended")


class Clients:
    """``IN_FLIGHT`` clients, each with one request after the other through both engines."""

    def __init__(self, stage, prompts, seed):
        self.seen = collections.Counter()
        self.wrong = []
        self.errors = collections.Counter()
        self._stage = stage
        self._prompts = prompts
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed + index),), daemon=True)
            for index in range(IN_FLIGHT)
        ]
        for thread in self._threads:
            thread.start()

    def finish(self):
        """Let every client end its request; clients that do not come back are hung."""
        self._stop.set()
        deadline = time.monotonic() + HUNG_SECONDS + 30
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.seen[HUNG] += sum(thread.is_alive() for thread in self._threads)

    def _run(self, source):
        while not self._stop.is_set():
            what = self._one(*source.choice(self._prompts))
            self.seen[what] += 1
            if what == ERROR:
                # Clients that call a dead engine all the time take the time it needs to start.
                self._stop.wait(source.uniform(1.0, 2.0))

    def _one(self, prompt, expected):
        stage = self._stage
        first = ask(
            stage.prefill, prompt, dict(PREFILL_PARAMS), max_tokens=1, within_seconds=HUNG_SECONDS
        )
        if first.what != ANSWER:
            self.errors["prefill"] += 1
            return first.what
        seen = ask(stage.decode, prompt, first.params, within_seconds=HUNG_SECONDS)
        if seen.what == ANSWER and seen.tokens != expected:
            self.wrong.append((len(prompt), seen.tokens, expected))
        elif seen.what == ERROR:
            self.errors["decode"] += 1
        return seen.what


class Counts:
    """Decode's counters, added up over its lives. What it counts between the last look and its
    death is lost."""

    def __init__(self, stage):
        self.totals = collections.Counter()
        self._last = collections.Counter()
        self._stage = stage
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def look(self):
        with self._lock, contextlib.suppress(OSError, HttpError):
            metrics = self._stage.decode.metrics()
            now = collections.Counter(
                {
                    (name, dict(labels).get("reason", "")): value
                    for (name, labels), value in metrics.samples.items()
                    if name in (*COUNTERS, FAILURES)
                }
            )
            restarted = any(now[key] < value for key, value in self._last.items())
            self.totals.update(now if restarted else now - self._last)
            self._last = now

    def close(self):
        self._stop.set()
        self._thread.join()
        self.look()

    def total(self, name):
        return int(sum(value for (found, _), value in self.totals.items() if found == name))

    def failures(self):
        return {reason: int(n) for (name, reason), n in self.totals.items() if name == FAILURES}

    def _run(self):
        while not self._stop.wait(0.5):
            self.look()


class Faults:
    """What goes wrong, by a seed: first every kind of failure once, then any."""

    def __init__(self, stage, seed, counts):
        self.played = collections.Counter()
        self.unexpected_deaths = []
        self._stage = stage
        self._counts = counts
        self._random = random.Random(seed)
        self._kinds = {
            "prefill killed": lambda: self._restart("prefill"),
            "decode killed": lambda: self._restart("decode"),
            "link cut": self._cut,
            "link slow": lambda: self._link(lambda: stage.network.throttle(8000)),
            "link lossy": lambda: self._link(lambda: stage.network.weather(self._weather())),
            "prefill frozen": lambda: self._freeze("prefill"),
            "decode frozen": lambda: self._freeze("decode"),
        }

    def play(self, seconds):
        deadline = time.monotonic() + seconds
        first = ["prefill killed", "decode killed", "link cut"]
        self._random.shuffle(first)
        while time.monotonic() < deadline:
            time.sleep(self._random.uniform(1.0, 3.0))
            self._look_for_deaths()
            kind = first.pop() if first else self._random.choice(sorted(self._kinds))
            self._kinds[kind]()
            self.played[kind] += 1
        self._stage.network.calm()
        self._look_for_deaths()

    def _look_for_deaths(self):
        for side in ("prefill", "decode"):
            if not self._stage.runs(side):
                self.unexpected_deaths.append(side)
                self._stage.start(side, policy=POLICY)

    def _restart(self, side):
        self._counts.look()
        self._stage.kill(side)
        self._stage.start(side, policy=POLICY)

    def _cut(self):
        self._stage.network.cut()
        time.sleep(self._random.uniform(0.5, 5.0))
        self._stage.network.mend()

    def _link(self, spoil):
        spoil()
        time.sleep(self._random.uniform(2.0, 5.0))
        self._stage.network.calm()

    def _weather(self):
        return Weather(0.2, 0.02, self._random.randrange(1000))

    def _freeze(self, side):
        engine = getattr(self._stage, side)
        engine.send_signal(signal.SIGSTOP)
        time.sleep(self._random.uniform(0.5, 4.0))
        engine.send_signal(signal.SIGCONT)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a soak has shown; ``leaked``: what an engine still held at the end, or nothing."""

    right: int
    wrong: list
    errors: int
    hung: int
    loaded: int
    recomputed: int
    leaked: str
    deaths: list
    table: str


def soak(stage, seed, seconds):
    """Run one; everything random comes from ``seed``, except what the machine adds."""
    stage.start("prefill", "decode", policy=POLICY)
    prompts = certain_prompts(stage.prefill)
    counts = Counts(stage)
    faults = Faults(stage, seed, counts)
    clients = Clients(stage, prompts, seed)
    started = time.monotonic()
    try:
        faults.play(seconds)
    finally:
        clients.finish()
        counts.close()
    lasted = time.monotonic() - started
    leaked = ""
    try:
        stage.require_idle()
    except TimeoutError as error:
        leaked = str(error)
    result = Result(
        right=clients.seen[ANSWER] - len(clients.wrong),
        wrong=clients.wrong,
        errors=clients.seen[ERROR],
        hung=clients.seen[HUNG],
        loaded=counts.total(COUNTERS[0]),
        recomputed=counts.total(COUNTERS[1]),
        leaked=leaked,
        deaths=faults.unexpected_deaths,
        table="",
    )
    lines = [
        ("soak", f"{lasted:.0f} s, {IN_FLIGHT} in flight, --soak-seed {seed}"),
        ("faults", _list(faults.played)),
        ("right answers", result.right),
        ("wrong answers", len(result.wrong)),
        ("errors", f"{result.errors} ({_list(clients.errors)})"),
        ("hung", result.hung),
        ("loaded", result.loaded),
        ("recomputed", result.recomputed),
        ("failed loads", _list(counts.failures())),
        ("leaked", leaked or "nothing"),
        ("unexpected deaths", ", ".join(result.deaths) or "none"),
    ]
    return dataclasses.replace(result, table="\n".join(f"{name:<18} {v}" for name, v in lines))


def _list(counts):
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
