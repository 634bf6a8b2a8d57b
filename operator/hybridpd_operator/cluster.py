"""The only door to the Kubernetes client library.

The library provides credentials and a TLS connection pool; requests are made here, because
server-side apply of plain dictionaries needs neither models nor discovery.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, cast
from urllib.parse import urlencode

from kubernetes import client, config
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from hybridpd_operator import names
from hybridpd_operator.cluster_api import (
    ClusterError,
    ConflictError,
    NotFoundError,
    RefusedError,
)
from hybridpd_operator.kinds import Kind, Manifest, kind_of

_JSON: Final = "application/json"
_APPLY: Final = "application/apply-patch+yaml"
_LIST_PAGE_OBJECTS: Final = 500
#: Statuses that mean "this will never be accepted as it is".
_REFUSED: Final = frozenset({400, 403, 405, 415, 422})
#: A field of an applied object that its kind does not have, or of another type: told as HTTP 500.
_NOT_OF_THE_KIND: Final = "failed to create typed patch object"


class _Response(Protocol):
    status: int
    data: bytes


class _Pool(Protocol):
    """The part of urllib3's pool manager that is used."""

    def request(self, method: str, url: str, **options: Any) -> _Response: ...


class _Configuration(Protocol):
    """The part of the client library's configuration that is used."""

    host: str

    def auth_settings(self) -> Mapping[str, Mapping[str, str]]: ...


class KubernetesCluster:
    """A real API server, reached as the pod's service account or by ``KUBECONFIG``."""

    def __init__(self, pool: _Pool, configuration: _Configuration, timeout_seconds: float) -> None:
        self._pool = pool
        self._configuration = configuration
        self._timeout_seconds = timeout_seconds

    @classmethod
    def connect(cls, *, connections: int, timeout_seconds: float = 20.0) -> "KubernetesCluster":
        """Load credentials (in a cluster first, then kubeconfig) and open a pool.

        Raises ClusterError when there are none.
        """
        configuration = client.Configuration()
        try:
            try:
                config.load_incluster_config(client_configuration=configuration)
            except ConfigException:
                config.load_kube_config(client_configuration=configuration)
        except ConfigException as error:
            raise ClusterError("load credentials", 0, str(error)) from error
        configuration.connection_pool_maxsize = connections
        api = client.ApiClient(configuration)
        return cls(api.rest_client.pool_manager, configuration, timeout_seconds)

    def get(self, kind: Kind, namespace: str, name: str) -> Manifest:
        """Return one object. NotFoundError when there is none."""
        return self._request("GET", kind.path(namespace, name))

    def list(self, kind: Kind, namespace: str | None, labels: str = "") -> Sequence[Manifest]:
        """Return the matching objects, page by page; kind and apiVersion are filled in."""
        objects: list[Manifest] = []
        query = {"limit": str(_LIST_PAGE_OBJECTS)}
        if labels:
            query["labelSelector"] = labels
        while True:
            page = self._request("GET", kind.path(namespace), query)
            objects.extend(
                {"apiVersion": kind.api_version, "kind": kind.name, **item}
                for item in page.get("items") or ()
            )
            marker = page.get("metadata", {}).get("continue")
            if not marker:
                return objects
            query["continue"] = marker

    def apply(self, manifest: Manifest, *, subresource: str = "") -> Manifest:
        """Server-side apply with our field manager; what we render is ours (force)."""
        metadata = manifest["metadata"]
        path = kind_of(manifest).path(metadata["namespace"], metadata["name"], subresource)
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        return self._request("PATCH", path, query, manifest, _APPLY)

    def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete one object if it still has ``uid``; already gone is fine."""
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        try:
            self._request("DELETE", kind.path(namespace, name), None, options)
        except NotFoundError:
            return

    def create(self, manifest: Manifest) -> None:
        """Create one object."""
        path = kind_of(manifest).path(manifest["metadata"]["namespace"])
        self._request("POST", path, {"fieldManager": names.FIELD_MANAGER}, manifest)

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content_type: str = _JSON,
    ) -> Manifest:
        headers = {"Accept": _JSON, "User-Agent": f"{names.FIELD_MANAGER}-operator"}
        for setting in self._configuration.auth_settings().values():
            if setting.get("value"):
                headers[setting["key"]] = setting["value"]
        url = self._configuration.host + path + (f"?{urlencode(query)}" if query else "")
        content = None
        if body is not None:
            headers["Content-Type"] = content_type
            content = json.dumps(body).encode()
        what = f"{method} {path}"
        try:
            response = self._pool.request(
                method,
                url,
                body=content,
                headers=headers,
                timeout=self._timeout_seconds,
                retries=False,
            )
        except HTTPError as error:
            raise ClusterError(what, 0, str(error)) from error
        return _parsed(what, response.status, response.data)


def _parsed(what: str, status: int, data: bytes) -> Manifest:
    """Turn one answer into an object or one of our errors."""
    if 200 <= status < 300:
        try:
            return cast("Manifest", json.loads(data))
        except ValueError as error:
            raise ClusterError(what, status, "the answer is not JSON") from error
    raise _error(what, status, data)


def _error(what: str, status: int, data: bytes) -> ClusterError:
    try:
        message = str(json.loads(data).get("message", ""))
    except (ValueError, AttributeError):
        message = data[:200].decode(errors="replace")
    if status == 404:
        return NotFoundError(what, status, message)
    if status == 409:
        return ConflictError(what, status, message)
    if status in _REFUSED or message.startswith(_NOT_OF_THE_KIND):
        return RefusedError(what, status, message)
    return ClusterError(what, status, message)
