"""Settings of the operator's process, read from its environment (the chart writes it)."""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridpd_operator.errors import OperatorError

_PREFIX = "HYBRIDPD_"
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_LOG_FORMATS = ("json", "text")
_PULL_POLICIES = ("Always", "IfNotPresent", "Never")


class SettingsError(OperatorError):
    """An environment variable of the operator is missing or out of range."""


@dataclass(frozen=True)
class Images:
    """What a service gets that names no image of its own."""

    connector: str = ""
    connector_pull_policy: str = "IfNotPresent"
    router: str = ""
    router_pull_policy: str = "IfNotPresent"
    engine: str = ""
    engine_pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    """The whole process. ``watch_namespaces`` empty means every namespace."""

    images: Images = Images()
    watch_namespaces: tuple[str, ...] = ()
    resync_seconds: int = 300
    verify_seconds: int = 30
    workers: int = 4
    http_port: int = 8080
    log_level: str = "INFO"
    log_format: str = "json"


def from_environment(environment: Mapping[str, str]) -> Settings:
    """Read the settings. SettingsError names the variable, what it may be and what it is."""
    reader = _Reader(environment)
    images = Images(
        connector=reader.required("CONNECTOR_IMAGE"),
        connector_pull_policy=reader.choice("CONNECTOR_PULL_POLICY", _PULL_POLICIES, 1),
        router=reader.required("ROUTER_IMAGE"),
        router_pull_policy=reader.choice("ROUTER_PULL_POLICY", _PULL_POLICIES, 1),
        engine=reader.text("ENGINE_IMAGE"),
        engine_pull_policy=reader.choice("ENGINE_PULL_POLICY", _PULL_POLICIES, 1),
        pull_secrets=reader.words("IMAGE_PULL_SECRETS"),
    )
    return Settings(
        images=images,
        watch_namespaces=reader.words("WATCH_NAMESPACES"),
        resync_seconds=reader.number("RESYNC_SECONDS", 300, 10, 86400),
        verify_seconds=reader.number("VERIFY_SECONDS", 30, 1, 86400),
        workers=reader.number("WORKERS", 4, 1, 64),
        http_port=reader.number("HTTP_PORT", 8080, 1, 65535),
        log_level=reader.choice("LOG_LEVEL", _LOG_LEVELS, 1),
        log_format=reader.choice("LOG_FORMAT", _LOG_FORMATS, 0),
    )


@dataclass(frozen=True)
class _Reader:
    environment: Mapping[str, str]

    def text(self, name: str) -> str:
        return self.environment.get(_PREFIX + name, "").strip()

    def required(self, name: str) -> str:
        value = self.text(name)
        if not value:
            raise SettingsError(f"{_PREFIX}{name}: expected an image reference, got nothing")
        return value

    def words(self, name: str) -> tuple[str, ...]:
        return tuple(word for word in (w.strip() for w in self.text(name).split(",")) if word)

    def choice(self, name: str, choices: tuple[str, ...], default: int) -> str:
        value = self.text(name) or choices[default]
        if value not in choices:
            raise SettingsError(
                f"{_PREFIX}{name}: expected one of {', '.join(choices)}, got {value!r}"
            )
        return value

    def number(self, name: str, default: int, least: int, most: int) -> int:
        value = self.text(name)
        if not value:
            return default
        try:
            number = int(value)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise SettingsError(f"{_PREFIX}{name}: expected {least} to {most}, got {value!r}")
        return number
