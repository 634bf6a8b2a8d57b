"""The process around the passes: kopf handlers, endpoint, scraper, settings, logs.

kopf itself is not started here (it needs a server); the end-to-end tests run the whole process.
"""

import asyncio
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import kopf
import pytest

from hybridpd_operator import handlers, kinds, logs, names
from hybridpd_operator.endpoint import LONGEST_WATCH_LAG_SECONDS, Endpoint, Freshness
from hybridpd_operator.metrics import Metrics
from hybridpd_operator.observed import EngineSample, Pod
from hybridpd_operator.scrape import HttpScraper
from hybridpd_operator.settings import SettingsError, from_environment
from hybridpd_operator.work_queue import (
    Key,
)

A, B = Key("ns", "a"), Key("ns", "b")
REQUIRED = {"HYBRIDPD_CONNECTOR_IMAGE": "c:1", "HYBRIDPD_ROUTER_IMAGE": "r:1"}


# --- kopf ----------------------------------------------------------------------------------------


class Asked:
    """Stands in for the controller."""

    def __init__(self) -> None:
        self.keys: list[Key] = []

    def ask(self, key: Key, delay_seconds: float = 0.0) -> None:
        self.keys.append(key)


def registered() -> tuple[kopf.OperatorRegistry, Asked, Freshness]:
    registry, asked = kopf.OperatorRegistry(), Asked()
    freshness = Freshness(60.0, 0.0)
    handlers.register(registry, asked, freshness)  # type: ignore[arg-type]
    return registry, asked, freshness


def watching_handlers(registry: kopf.OperatorRegistry) -> dict[str, Any]:
    found = registry._watching._handlers
    return {str(handler.selector.any_name or handler.selector.plural): handler for handler in found}


def test_only_event_handlers_are_registered_for_every_kind() -> None:
    registry, _, _ = registered()
    watched = watching_handlers(registry)
    wanted = {kind.plural for kind in (*kinds.CHILD_KINDS, kinds.POD, kinds.HYBRIDPD_SERVICE)}
    assert set(watched) == wanted
    for group in ("_changing", "_spawning", "_indexing", "_webhooks"):
        assert not list(getattr(registry, group)._handlers), group


def test_events_only_enqueue_keys() -> None:
    registry, asked, freshness = registered()
    watched = watching_handlers(registry)
    service, pod = watched["hybridpdservices"].fn, watched["pods"].fn
    asyncio.run(service(namespace="ns", name="a", meta={"generation": 3}, type="MODIFIED", body={}))
    asyncio.run(pod(namespace="ns", labels={names.LABEL_SERVICE: "b"}, body={}))
    asyncio.run(pod(namespace="ns", labels={}, body={}))
    assert asked.keys == [A, B]
    freshness.listed({A: 3}, 0.0)
    assert freshness.lag_seconds(500.0) == 0.0
    asyncio.run(service(namespace="ns", name="a", meta={}, type="DELETED", body={}))
    freshness.listed({A: 3}, 0.0)
    assert freshness.lag_seconds(500.0) == 500.0


def test_kopf_is_set_to_need_nothing_and_to_write_nothing() -> None:
    settings = handlers.operator_settings()
    assert settings.peering.standalone
    assert settings.scanning.disabled
    assert not settings.posting.enabled
    assert settings.queueing.worker_limit
    assert settings.watching.client_timeout > settings.watching.server_timeout
    for kind in handlers.WATCHED_CHILDREN:
        group, _, version = kind.api_version.rpartition("/")
        selector = settings.watching.label_selectors[group, version, kind.plural]
        assert selector == "app.kubernetes.io/managed-by=hybridpd"


# --- endpoint ------------------------------------------------------------------------------------


def test_a_watch_that_lags_too_long_is_a_problem_until_it_reports() -> None:
    freshness = Freshness(60.0, started=0.0)
    freshness.listed({A: 2}, 10.0)
    assert freshness.problem(60.0) is None
    freshness.listed({A: 2}, 70.0)
    late = 10.0 + LONGEST_WATCH_LAG_SECONDS + 1
    freshness.listed({A: 2}, late)
    assert "no watch has reported" in (freshness.problem(late) or "")
    freshness.heard(A, 2)
    assert freshness.problem(late) is None


def test_a_resync_that_stopped_is_a_problem() -> None:
    freshness = Freshness(60.0, started=100.0)
    assert freshness.problem(100.0 + 179.0) is None
    assert "no resync" in (freshness.problem(100.0 + 181.0) or "")


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_probes_and_metrics_are_served() -> None:
    metrics, now = Metrics(), [0.0]
    freshness = Freshness(60.0, started=0.0)
    endpoint = Endpoint(0, freshness, metrics, lambda: now[0])
    try:
        assert get(endpoint.port, "/healthz") == (200, "ok")
        assert get(endpoint.port, "/readyz")[0] == 503
        freshness.listed({}, 1.0)
        assert get(endpoint.port, "/readyz")[0] == 200
        metrics.add("hybridpd_operator_writes_total", 123456789, verb='a"b', kind="X")
        _, text = get(endpoint.port, "/metrics")
        assert 'hybridpd_operator_writes_total{kind="X",verb="a\\"b"} 123456789' in text
        assert "# TYPE hybridpd_operator_writes_total counter" in text
        now[0] = 1000.0
        assert get(endpoint.port, "/healthz")[0] == 503
        assert get(endpoint.port, "/other")[0] == 404
    finally:
        endpoint.close()


# --- scrape --------------------------------------------------------------------------------------


#: (protocol, bytes that the header promises beyond the body) of an engine's answers.
KEPT_OPEN, CLOSED, CUT_SHORT = ("HTTP/1.1", 0), ("HTTP/1.0", 0), ("HTTP/1.0", 1)


@pytest.fixture
def engine_port(request: pytest.FixtureRequest) -> Iterator[int]:
    version, missing = getattr(request, "param", KEPT_OPEN)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = version

        def do_GET(self) -> None:
            body = b"hybridpd_loads_total 4\n"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body) + missing))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def pod_at(ip: str) -> Pod:
    return Pod("p", names.DECODE, "r", ready=True, deleting=False, ip=ip)


@pytest.mark.parametrize("engine_port", [KEPT_OPEN, CLOSED], indirect=True)
def test_engines_are_asked_for_their_counters(engine_port: int) -> None:
    failures: list[int] = []
    scraper = HttpScraper(lambda: failures.append(1), engine_port)
    found = scraper.samples([pod_at("127.0.0.1")])
    scraper.close()
    assert found == (EngineSample("p", names.DECODE, loads=4),)
    assert failures == []


@pytest.mark.parametrize("engine_port", [CUT_SHORT], indirect=True)
def test_half_an_answer_is_none(engine_port: int) -> None:
    scraper = HttpScraper(lambda: None, engine_port)
    assert scraper.samples([pod_at("127.0.0.1")]) is None
    scraper.close()


def test_an_answer_that_takes_too_long_is_none(
    engine_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece may come in time: all of them together have to, or a worker is lost to it."""
    monkeypatch.setattr("hybridpd_operator.scrape._ANSWER_SECONDS", -1.0)
    scraper = HttpScraper(lambda: None, engine_port)
    assert scraper.samples([pod_at("127.0.0.1")]) is None
    scraper.close()


def test_one_silent_engine_makes_the_sum_unknown(engine_port: int) -> None:
    failures: list[int] = []
    scraper = HttpScraper(lambda: failures.append(1), engine_port)
    found = scraper.samples([pod_at("127.0.0.1"), pod_at("127.255.255.254")])
    scraper.close()
    assert found is None
    assert failures == [1]


# --- settings and logs ---------------------------------------------------------------------------


def test_settings_have_defaults_but_for_the_images() -> None:
    settings = from_environment(REQUIRED)
    assert (settings.images.connector, settings.images.router) == ("c:1", "r:1")
    assert settings.watch_namespaces == ()
    assert settings.resync_seconds == 300
    for missing in REQUIRED:
        given = {key: value for key, value in REQUIRED.items() if key != missing}
        with pytest.raises(SettingsError, match=missing):
            from_environment(given)


def test_settings_are_read() -> None:
    settings = from_environment(
        {
            **REQUIRED,
            "HYBRIDPD_WATCH_NAMESPACES": "a, b,",
            "HYBRIDPD_IMAGE_PULL_SECRETS": "s",
            "HYBRIDPD_LOG_FORMAT": "text",
            "HYBRIDPD_WORKERS": "9",
        }
    )
    assert settings.watch_namespaces == ("a", "b")
    assert settings.images.pull_secrets == ("s",)
    assert (settings.log_format, settings.workers) == ("text", 9)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("WORKERS", "0", "1 to 64"),
        ("WORKERS", "many", "1 to 64"),
        ("LOG_FORMAT", "xml", "json, text"),
        ("CONNECTOR_PULL_POLICY", "Sometimes", "IfNotPresent"),
    ],
)
def test_a_bad_setting_names_itself_and_what_it_may_be(
    name: str, value: str, expected: str
) -> None:
    with pytest.raises(SettingsError, match=f"HYBRIDPD_{name}.*{expected}.*{value}"):
        from_environment({**REQUIRED, f"HYBRIDPD_{name}": value})


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers_before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers_before
    root.setLevel(level)


@pytest.mark.usefixtures("restored_logging")
def test_log_lines_name_their_service(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("INFO", "json")
    with logs.about("ns/demo"):
        logging.getLogger("hybridpd_operator.test").info("applying %s", "x")
    line = json.loads(capsys.readouterr().out)
    assert (line["service"], line["message"], line["level"]) == ("ns/demo", "applying x", "info")
    logs.configure("INFO", "text")
    with logs.about("ns/demo"):
        logging.getLogger("hybridpd_operator.test").info("again")
    assert capsys.readouterr().out.rstrip().endswith("again [ns/demo]")
