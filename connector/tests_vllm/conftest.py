"""Real engines, shared by all tests of this folder, one family at a time."""

import contextlib
import os

import pytest

from hybridpd_testkit.adapters import write_adapter
from hybridpd_testkit.checkpoint_families import FAMILIES as MODELS
from hybridpd_testkit.checkpoints import write_checkpoint
from hybridpd_testkit.engines import (
    PROBE,
    SHIPPED,
    Engine,
    EngineFailedError,
    EngineSpec,
    base_environment,
    engine_python,
    running,
    stop_all,
)
from hybridpd_testkit.nursery import Nursery
from hybridpd_testkit.pd_client import Pair
from hybridpd_testkit.probe_orders import ProbeOrders

# UCX takes any interface of the host, and is deaf when that goes: other runs make some and take
# them away.
os.environ.setdefault("UCX_NET_DEVICES", "lo")

BRIEF_LEASE_SECONDS = 6
ADAPTERS = {"red": 1, "blue": 2}  # name → seed
# Longest first: a test's family is the first of these in its name, the last one without any.
FAMILIES = (
    "nemotron_h_mqa",
    "falcon_h1",
    "granite_4_h",
    "qwen3_next",
    "lfm2",
    "llama",
    "nemotron_h",
)


def pytest_collection_modifyitems(items):
    """Family after family, so that each engine starts once; files in order within a family."""

    def family_rank(item):
        named = [index for index, family in enumerate(FAMILIES) if family in item.name]
        return -min(named, default=len(FAMILIES) - 1), item.path.name

    items.sort(key=family_rank)


class EnginePool:
    """Engines by name. Asking for several starts the missing ones together; engines of another
    family end first."""

    def __init__(self, directory, report):
        self._directory = directory
        self._report = report
        self._nursery = Nursery(engine_python(), base_environment())
        self._alive: dict[str, Engine] = {}

    def checkpoint(self, family):
        path = self._directory / "checkpoints" / family
        return path if (path / "config.json").exists() else write_checkpoint(family, path)

    def orders(self, engine):
        """The control directory of an engine that runs the probe connector."""
        return ProbeOrders(self._directory / "orders" / engine.spec.name)

    def spec(self, family, kind):
        """One engine of a family.

        p1 prefill TP1, b1 the same with a brief lease, d1 decode TP1, e2 both roles TP2,
        r1 decode TP1 that recomputes what it cannot load and runs one request at a time,
        t1 decode TP1 with a tiny cache, c1 prefill TP1 and v1 decode TP1 with all loads compared,
        v2 the same at TP2, recomputing;
        k1 both roles TP1 with blocks of 96 tokens.
        """
        name = f"{family}-{kind}"
        settings = {
            "p1": {"role": "kv_producer", "connector": PROBE},
            "b1": {
                "role": "kv_producer",
                "connector": PROBE,
                "extra_config": {"lease_seconds": BRIEF_LEASE_SECONDS},
            },
            "d1": {"role": "kv_consumer", "connector": SHIPPED},
            "e2": {"role": "kv_both", "connector": PROBE, "tp_size": 2},
            "k1": {"role": "kv_both", "connector": SHIPPED, "arguments": ("--block-size", "96")},
            "c1": {
                "role": "kv_producer",
                "connector": PROBE,
                "extra_config": {"checksum": "all"},
            },
            "v1": {
                "role": "kv_consumer",
                "connector": SHIPPED,
                "extra_config": {"checksum": "all"},
            },
            "v2": {
                "role": "kv_consumer",
                "connector": SHIPPED,
                "tp_size": 2,
                "failure_policy": "recompute",
                "extra_config": {"checksum": "all"},
            },
            "t1": {"role": "kv_consumer", "connector": SHIPPED, "num_blocks": 26},
            "r1": {
                "role": "kv_consumer",
                "connector": SHIPPED,
                "failure_policy": "recompute",
                "arguments": ("--max-num-seqs", "1"),
            },
        }[kind]
        if family == "llama" and kind in ("p1", "d1"):
            settings["arguments"] = self._adapter_arguments()
        return EngineSpec(
            name,
            self.checkpoint(family),
            dtype=MODELS[family].dtype,
            environment=ProbeOrders(self._directory / "orders" / name).environment(),
            **settings,
        )

    def _adapter_arguments(self):
        directory = self._directory / "adapters"
        modules = [
            f"{name}={write_adapter(directory / name, seed)}" for name, seed in ADAPTERS.items()
        ]
        return ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", *modules)

    def engines(self, family, *kinds):
        specs = [self.spec(family, kind) for kind in kinds]
        self._stop_other_families(family)
        missing = [spec for spec in specs if spec.name not in self._alive]
        for spec in missing:
            self._alive[spec.name] = Engine(spec, self._directory / "logs", self._nursery)
            self._alive[spec.name].start()
        for spec in specs:
            engine = self._alive[spec.name]
            try:
                if spec in missing:
                    seconds = engine.wait_ready()
                    self._report(f"engine {engine.describe()}: ready after {seconds:.0f} s")
                engine.check_alive()
            except EngineFailedError:
                stop_all([self._alive.pop(spec.name)])
                raise
        return tuple(self._alive[spec.name] for spec in specs)

    @contextlib.contextmanager
    def own(self, *specs):
        """Engines for one module's tests, beside the shared ones of the family: gone after it."""
        with running(specs, self._directory / "logs", self._nursery) as engines:
            yield engines

    def log_of(self, name):
        """What an engine of this pool has printed, also when it has ended."""
        return (self._directory / "logs" / f"{name}.log").read_text()

    def fresh(self, family, kind):
        """One engine that no other test has used: started anew if it is running."""
        running = self._alive.pop(self.spec(family, kind).name, None)
        if running is not None:
            stop_all([running])
        (engine,) = self.engines(family, kind)
        return engine

    def _stop_other_families(self, family):
        """Tests run family by family, see `pytest_collection_modifyitems`."""
        others = [e for e in self._alive.values() if e.spec.checkpoint.name != family]
        stop_all([self._alive.pop(engine.spec.name) for engine in others])

    def stop(self):
        stop_all(self._alive.values())
        self._nursery.close()


@pytest.fixture(scope="session")
def pool(request, tmp_path_factory):
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def report(line):
        """A line for who watches, also when pytest captures output."""
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", flush=True)

    pool = EnginePool(tmp_path_factory.mktemp("engines"), report)
    try:
        yield pool
    finally:
        pool.stop()


@pytest.fixture
def nemotron(pool):
    """P and D of the two-group hybrid, TP 1 each, on the shipped failure policy."""
    return Pair(*pool.engines("nemotron-h", "p1", "d1"))


@pytest.fixture
def brief(pool):
    """The same D behind a P whose leases end soon when nobody renews them."""
    return acquainted(Pair(*pool.engines("nemotron-h", "b1", "d1")))


@pytest.fixture
def brief_queue(pool):
    """A P with brief leases; a D that recomputes what it cannot load, one request at a time."""
    return acquainted(Pair(*pool.engines("nemotron-h", "b1", "r1")))


def acquainted(pair):
    """A pair that has met: D can renew a lease only after the first handshake, which may take
    seconds on busy cores, and the leases here are shorter than any real one."""
    pair.complete([5, 6, 7], 2)
    return pair
