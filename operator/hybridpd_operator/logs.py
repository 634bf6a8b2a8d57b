"""Log lines for machines (json) or people (text); each names the service it is about."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final

_service: ContextVar[str] = ContextVar("service", default="")
#: kopf tells about each object it sees; only what it warns of is of interest.
_QUIET: Final = {"kopf.objects": logging.WARNING, "kopf": logging.INFO, "urllib3": logging.WARNING}


@contextmanager
def about(service: str) -> Iterator[None]:
    """Every line of this thread within the block carries ``service``."""
    token = _service.set(service)
    try:
        yield
    finally:
        _service.reset(token)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if service := _service.get():
            line["service"] = service
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (the base's name)
        service = _service.get()
        text = super().formatMessage(record)
        return f"{text} [{service}]" if service else text


def configure(level: str, log_format: str) -> None:
    """Set the process's logging up, once, at its start."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Json() if log_format == "json" else _Text())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    if level != "DEBUG":
        for name, least in _QUIET.items():
            logging.getLogger(name).setLevel(least)
