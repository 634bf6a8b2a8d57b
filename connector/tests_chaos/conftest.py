"""Real engines on hosts of their own. Needs root: it makes network namespaces."""

import os

import pytest
from chaos_stage import Stage
from chaos_table import NAMED

from hybridpd_testkit.network import network


def pytest_addoption(parser):
    parser.addoption(
        "--failures", choices=("named", "all"), default="named", help="rows of the failure table"
    )
    parser.addoption("--soak-seconds", type=float, default=60.0, help="how long the soak lasts")
    parser.addoption("--soak-seed", type=int, default=None, help="the seed of an earlier soak")


def pytest_collection_modifyitems(config, items):
    """The soak comes last. Rows that are not asked for are deselected, unless named with -k."""
    items.sort(key=lambda item: item.name == "test_chaos_soak")
    if config.getoption("--failures") == "all" or config.getoption("-k"):
        return
    left = [item for item in items if _row(item) not in (None, *NAMED)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def _row(item):
    row = getattr(item, "callspec", None) and item.callspec.params.get("row")
    return row.name if row else None


@pytest.fixture(scope="session")
def report(request):
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def report(line):
        """A line for who watches, also when pytest captures output."""
        with capture.global_and_fixture_disabled():
            print(line, flush=True)

    return report


@pytest.fixture(scope="session")
def wire():
    if os.geteuid() != 0:
        pytest.fail("the chaos suite makes network namespaces: run it as root")
    with network() as made:
        yield made


@pytest.fixture(scope="session")
def stage(wire, tmp_path_factory, report):
    stage = Stage(wire, tmp_path_factory.mktemp("chaos"), report)
    try:
        stage.start("prefill", "decode")
        yield stage
    finally:
        stage.close()
