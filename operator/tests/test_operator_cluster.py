"""The door to the API server, against a small HTTP server that records what it is asked.

Left out: credentials and TLS, which the client library does; the end-to-end tests use both.
"""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import urllib3

from hybridpd_operator import kinds
from hybridpd_operator.cluster import KubernetesCluster
from hybridpd_operator.cluster_api import (
    ClusterError,
    ConflictError,
    NotFoundError,
    RefusedError,
)


class Server:
    """Answers from a list; keeps (method, path, query, headers, body) of every request."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, list[str]], Any, Any]] = []
        self.answers: list[tuple[int, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                url = urlsplit(self.path)
                outer.requests.append(
                    (self.command, url.path, parse_qs(url.query), self.headers, body)
                )
                status, answer = outer.answers.pop(0)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PATCH = do_DELETE = do_POST = _serve  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def host(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def auth_settings(self) -> dict[str, dict[str, str]]:
        return {"BearerToken": {"key": "authorization", "value": "Bearer secret"}}


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.http.shutdown()
    running.http.server_close()


@pytest.fixture
def cluster(server: Server) -> Iterator[KubernetesCluster]:
    with urllib3.PoolManager() as pool:
        yield KubernetesCluster(pool, server, timeout_seconds=5)  # type: ignore[arg-type]


def test_apply_is_a_forced_server_side_apply_by_our_manager(
    server: Server, cluster: KubernetesCluster
) -> None:
    manifest = {"kind": "Service", "metadata": {"name": "demo", "namespace": "ns"}}
    server.answers = [(200, {"answered": True})]
    assert cluster.apply(manifest) == {"answered": True}
    ((method, path, query, headers, body),) = server.requests
    assert (method, path) == ("PATCH", "/api/v1/namespaces/ns/services/demo")
    assert query == {"fieldManager": ["hybridpd"], "force": ["true"]}
    assert headers["Content-Type"] == "application/apply-patch+yaml"
    assert headers["authorization"] == "Bearer secret"
    assert body == manifest


def test_status_goes_to_the_subresource(server: Server, cluster: KubernetesCluster) -> None:
    server.answers = [(200, {})]
    manifest = {"kind": "HybridPDService", "metadata": {"name": "demo", "namespace": "ns"}}
    cluster.apply(manifest, subresource="status")
    expected = "/apis/hybridpd.dev/v1alpha1/namespaces/ns/hybridpdservices/demo/status"
    assert server.requests[0][1] == expected


def test_lists_follow_their_pages_and_name_their_kind(
    server: Server, cluster: KubernetesCluster
) -> None:
    server.answers = [
        (200, {"metadata": {"continue": "next"}, "items": [{"metadata": {"name": "a"}}]}),
        (200, {"metadata": {}, "items": [{"metadata": {"name": "b"}}]}),
    ]
    found = cluster.list(kinds.POD, None, "a=b")
    assert [one["metadata"]["name"] for one in found] == ["a", "b"]
    assert {one["kind"] for one in found} == {"Pod"}
    assert server.requests[0][1] == "/api/v1/pods"
    assert server.requests[1][2]["continue"] == ["next"]
    assert all(query["labelSelector"] == ["a=b"] for _, _, query, _, _ in server.requests)


def test_delete_names_the_uid_and_takes_gone_for_done(
    server: Server, cluster: KubernetesCluster
) -> None:
    server.answers = [(200, {}), (404, {"message": "gone"})]
    cluster.delete(kinds.STATEFULSET, "ns", "demo", "uid-1")
    cluster.delete(kinds.STATEFULSET, "ns", "demo", "uid-1")
    body = server.requests[0][4]
    assert body["preconditions"] == {"uid": "uid-1"}
    assert body["propagationPolicy"] == "Background"


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (404, NotFoundError),
        (409, ConflictError),
        (422, RefusedError),
        (403, RefusedError),
        (400, RefusedError),
        (401, ClusterError),
        (429, ClusterError),
        (500, ClusterError),
    ],
)
def test_answers_become_our_errors(
    server: Server, cluster: KubernetesCluster, status: int, error: type[ClusterError]
) -> None:
    server.answers = [(status, {"message": "because"})]
    with pytest.raises(ClusterError, match=f"HTTP {status}: because") as caught:
        cluster.get(kinds.POD, "ns", "a")
    assert type(caught.value) is error


def test_a_field_that_the_kind_does_not_have_is_a_refusal(
    server: Server, cluster: KubernetesCluster
) -> None:
    """The server says 500 to it, and would say so for ever."""
    text = "failed to create typed patch object (ns/a; apps/v1, Kind=StatefulSet): .spec.foo: no"
    server.answers = [(500, {"message": text})]
    with pytest.raises(RefusedError, match=r"\.spec\.foo"):
        cluster.apply({"kind": "StatefulSet", "metadata": {"name": "a", "namespace": "ns"}})


@pytest.mark.parametrize("data", [b"", b"not json", b"[1]"])
def test_answers_that_are_no_json_are_errors_too(
    server: Server, cluster: KubernetesCluster, data: bytes
) -> None:
    server.answers = [(502, data)]
    with pytest.raises(ClusterError, match="HTTP 502"):
        cluster.get(kinds.POD, "ns", "a")


def test_a_dead_server_is_an_error_worth_retrying(server: Server) -> None:
    server.http.server_close()
    with urllib3.PoolManager() as pool:
        cluster = KubernetesCluster(pool, server, timeout_seconds=1)  # type: ignore[arg-type]
        with pytest.raises(ClusterError) as caught:
            cluster.get(kinds.POD, "ns", "a")
    assert type(caught.value) is ClusterError
