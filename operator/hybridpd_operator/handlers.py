"""kopf as a watch: every event becomes a key in the queue, nothing else.

Only ``on.event`` handlers are used. Change handlers, timers and daemons would put finalizers and
annotations on the objects and would tie what happens to the event that was seen; the pass reads
the cluster instead.
"""

from typing import Any, Final

import kopf

from hybridpd_operator import names
from hybridpd_operator.controller import Controller
from hybridpd_operator.endpoint import Freshness
from hybridpd_operator.kinds import CHILD_KINDS, HYBRIDPD_SERVICE, POD, Kind
from hybridpd_operator.work_queue import Key

_OURS: Final = {names.LABEL_MANAGED_BY: names.MANAGED_BY}
WATCHED_CHILDREN: Final = (*CHILD_KINDS, POD)

#: The server ends a watch after this long; the client gives up a little later.
_WATCH_SECONDS: Final = 180
_CLIENT_MARGIN_SECONDS: Final = 30
_CONNECT_SECONDS: Final = 10
_REQUEST_SECONDS: Final = 20
_INACTIVITY_SECONDS: Final = 75
_LIST_PAGE_OBJECTS: Final = 500
_EVENT_WORKERS: Final = 16
_HANDLER_THREADS: Final = 2
_EXIT_SECONDS: Final = 25


def register(registry: kopf.OperatorRegistry, controller: Controller, freshness: Freshness) -> None:
    """Add the handlers of one operator process to ``registry``."""

    async def on_login(**facts: Any) -> Any:
        # Asked again when the server no longer takes the token: a rotated one is read anew.
        return kopf.login_with_service_account(**facts) or kopf.login_with_kubeconfig(**facts)

    async def on_service(
        namespace: str | None,
        name: str | None,
        meta: Any,
        type: str | None,  # noqa: A002  (named by kopf)
        **_: Any,
    ) -> None:
        key = Key(str(namespace), str(name))
        if type == "DELETED":
            freshness.gone(key)
        else:
            freshness.heard(key, int(meta.get("generation", 0)))
        controller.ask(key)

    async def on_child(namespace: str | None, labels: Any, **_: Any) -> None:
        service = labels.get(names.LABEL_SERVICE)
        if service:
            controller.ask(Key(str(namespace), str(service)))

    async def on_startup(**_: Any) -> None:
        controller.start()

    async def on_cleanup(**_: Any) -> None:
        await controller.stop()

    kopf.on.login(registry=registry, id="login")(on_login)
    kopf.on.startup(registry=registry, id="start")(on_startup)
    kopf.on.cleanup(registry=registry, id="stop")(on_cleanup)
    kopf.on.event(*_selector(HYBRIDPD_SERVICE), registry=registry)(on_service)
    for kind in WATCHED_CHILDREN:
        kopf.on.event(*_selector(kind), registry=registry, labels=_OURS)(on_child)


def operator_settings() -> kopf.OperatorSettings:
    """kopf's settings: no peering, no scanning, no posting, bounded everything."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    # Needs no right to list namespaces or CRDs; what is watched is fixed at the start.
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.watching.server_timeout = _WATCH_SECONDS
    settings.watching.client_timeout = _WATCH_SECONDS + _CLIENT_MARGIN_SECONDS
    settings.watching.connect_timeout = _CONNECT_SECONDS
    settings.watching.inactivity_timeout = _INACTIVITY_SECONDS
    settings.watching.chunk_size = _LIST_PAGE_OBJECTS
    settings.networking.request_timeout = _REQUEST_SECONDS
    settings.queueing.worker_limit = _EVENT_WORKERS
    settings.execution.max_workers = _HANDLER_THREADS
    settings.process.ultimate_exiting_timeout = _EXIT_SECONDS
    for kind in WATCHED_CHILDREN:
        selector = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"
        settings.watching.label_selectors[_selector(kind)] = selector
    return settings


def _selector(kind: Kind) -> tuple[str, str, str]:
    """Group, version and plural, as kopf selects resources."""
    version = kind.api_version.rpartition("/")[2]
    return kind.group, version, kind.plural
