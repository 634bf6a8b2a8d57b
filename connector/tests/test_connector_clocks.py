"""No clock of one machine is compared with that of another, and no wall clock is read."""

import ast
from pathlib import Path

import pytest
from connector_engines import LEASE_SECONDS, World
from test_connector_two_engines import all_free, loaded, prefilled

import hybridpd_connector

SOURCES = sorted(Path(hybridpd_connector.__file__).parent.glob("*.py"))
STEADY = {"monotonic", "perf_counter", "sleep", "thread_time"}


@pytest.mark.parametrize("path", SOURCES, ids=[path.stem for path in SOURCES])
def test_no_wall_clock_decides_anything(path):
    """Of ``time`` only steady clocks are used, and ``datetime`` not at all."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "time":
            assert node.attr in STEADY, f"{path.name}:{node.lineno}"
        if isinstance(node, ast.ImportFrom):
            assert node.module not in ("time", "datetime"), f"{path.name}:{node.lineno}"
        if isinstance(node, ast.Import):
            assert "datetime" not in {name.name for name in node.names}


@pytest.mark.parametrize("ahead", [-3600.0, -600.0, 600.0, 3600.0])
def test_clocks_apart_change_nothing(ahead):
    """Decode's clock runs ``ahead`` seconds apart: loads are right, leases renewed and released."""
    world = World()
    try:
        p = world.engine("p", "producer")
        d = world.engine("d", "consumer")
        for rank in d.ranks:
            rank._clock = lambda: world.now + ahead
        tokens, answer, made = prefilled(p, 40)
        d.add("d1", tokens, answer)
        world.until(lambda: d.ranks[0].peers()["ready"])
        for _ in range(8):
            world.now += LEASE_SECONDS / 4
            d.step()
            p.step()
        assert "p1" in p.requests
        loaded(world, d, "d1")
        assert d.pages_equal("d1", made, 39)
        d.end("d1")
        world.until(lambda: all_free(p) and all_free(d))
    finally:
        world.close()
