"""Field kinds: how one value of a custom resource is read, bounded and described.

`spec.py` declares its dataclasses with these kinds; `read_object` turns JSON-like data into them
and collects *every* problem instead of stopping at the first. A kind also tells its OpenAPI
fragment (`schema`), which is how a test proves that the dataclasses and the CRD agree.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Protocol, TypeVar

from hybridpd_operator.errors import FieldError

T = TypeVar("T")
Problems = list[FieldError]

# What a kind returns for a value it could not read; the object is never built from it.
_UNREAD: Any = object()


class Kind(Protocol):
    """Reads one value and describes it as an OpenAPI v3 fragment."""

    def read(self, value: object, path: str, problems: Problems) -> Any: ...

    def schema(self) -> dict[str, Any]: ...


def fits(pattern: str, value: str) -> bool:
    """Does the text match as it does at the API server, whose `$` is the very end?

    Python's would let a last line break pass.
    """
    return re.search(re.sub(r"\$$", r"\\Z", pattern), value) is not None


def _refuse(problems: Problems, path: str, expected: str, got: object) -> Any:
    text = repr(got)
    problems.append(FieldError(path, expected, text if len(text) <= 120 else text[:117] + "..."))
    return _UNREAD


@dataclass(frozen=True)
class Integer:
    """A whole number within bounds, both inclusive."""

    minimum: int
    maximum: int
    multiple_of: int | None = None

    def read(self, value: object, path: str, problems: Problems) -> Any:
        if not isinstance(value, int) or isinstance(value, bool):
            return _refuse(problems, path, "an integer", value)
        if not self.minimum <= value <= self.maximum:
            return _refuse(problems, path, f"{self.minimum} to {self.maximum}", value)
        if self.multiple_of and value % self.multiple_of:
            return _refuse(problems, path, f"a multiple of {self.multiple_of}", value)
        return value

    def schema(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "type": "integer",
            "minimum": self.minimum,
            "maximum": self.maximum,
        }
        if self.multiple_of:
            out["multipleOf"] = self.multiple_of
        return out


@dataclass(frozen=True)
class Text:
    """A string; `pattern` must match somewhere in it, as OpenAPI patterns do (so anchor it)."""

    max_length: int
    min_length: int = 1
    pattern: str | None = None

    def read(self, value: object, path: str, problems: Problems) -> Any:
        if not isinstance(value, str):
            return _refuse(problems, path, "a string", value)
        if not self.min_length <= len(value) <= self.max_length:
            expected = f"{self.min_length} to {self.max_length} characters"
            return _refuse(problems, path, expected, value)
        if self.pattern and not fits(self.pattern, value):
            return _refuse(problems, path, f"text matching {self.pattern}", value)
        return value

    def schema(self) -> dict[str, Any]:
        out: dict[str, Any] = {"type": "string", "maxLength": self.max_length}
        if self.min_length:
            out["minLength"] = self.min_length
        if self.pattern:
            out["pattern"] = self.pattern
        return out


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    options: tuple[str, ...]

    def read(self, value: object, path: str, problems: Problems) -> Any:
        if not isinstance(value, str) or value not in self.options:
            # Off, On, Yes and No are booleans in YAML.
            quoted = ", in quotes" if isinstance(value, bool) else ""
            return _refuse(problems, path, "one of " + ", ".join(self.options) + quoted, value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.options)}


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def read(self, value: object, path: str, problems: Problems) -> Any:
        if not isinstance(value, bool):
            return _refuse(problems, path, "true or false", value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Quantity:
    """A Kubernetes quantity: an integer or text such as `500m` or `64Gi`. Read as text."""

    PATTERN = r"^[0-9]+([.][0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$"

    def read(self, value: object, path: str, problems: Problems) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return str(value)
        if isinstance(value, str) and fits(self.PATTERN, value):
            return value
        return _refuse(problems, path, "a quantity such as 4, 500m or 64Gi", value)

    def schema(self) -> dict[str, Any]:
        return {"x-kubernetes-int-or-string": True, "pattern": self.PATTERN}


@dataclass(frozen=True)
class Items:
    """A list of one kind, read into a tuple. `key` names the field that differs in each item."""

    kind: Kind
    max_items: int
    min_items: int = 0
    key: str | None = None

    def read(self, value: object, path: str, problems: Problems) -> Any:
        if not isinstance(value, Sequence) or isinstance(value, str):
            return _refuse(problems, path, "a list", value)
        if not self.min_items <= len(value) <= self.max_items:
            expected = f"{self.min_items} to {self.max_items} items"
            return _refuse(problems, path, expected, len(value))
        read = [self.kind.read(item, f"{path}[{i}]", problems) for i, item in enumerate(value)]
        if self.key:
            self._refuse_repeats(value, path, problems)
        return tuple(read)

    def _refuse_repeats(self, value: Sequence[object], path: str, problems: Problems) -> None:
        seen: set[object] = set()
        for i, item in enumerate(value):
            name = item.get(self.key) if isinstance(item, Mapping) else None
            if isinstance(name, str) and name in seen:
                _refuse(problems, f"{path}[{i}].{self.key}", "a name used once in the list", name)
            if isinstance(name, str):
                seen.add(name)

    def schema(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "type": "array",
            "maxItems": self.max_items,
            "items": self.kind.schema(),
        }
        if self.min_items:
            out["minItems"] = self.min_items
        if self.key:
            out["x-kubernetes-list-type"] = "map"
            out["x-kubernetes-list-map-keys"] = [self.key]
        return out


@dataclass(frozen=True)
class Table:
    """A map from free text keys to one kind."""

    kind: Kind
    max_entries: int

    def read(self, value: object, path: str, problems: Problems) -> Any:
        if not isinstance(value, Mapping):
            return _refuse(problems, path, "a map", value)
        if len(value) > self.max_entries:
            return _refuse(problems, path, f"at most {self.max_entries} entries", len(value))
        out: dict[str, Any] = {}
        for key, item in value.items():
            if isinstance(key, str):
                out[key] = self.kind.read(item, f"{path}.{key}", problems)
            else:
                _refuse(problems, path, "text keys", key)
        return out

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "maxProperties": self.max_entries,
            "additionalProperties": self.kind.schema(),
        }


@dataclass(frozen=True)
class Raw:
    """An object kept as it is: a Kubernetes type that this API passes through, or a config.json."""

    def read(self, value: object, path: str, problems: Problems) -> Any:
        if not isinstance(value, Mapping):
            return _refuse(problems, path, "an object", value)
        return dict(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


@dataclass(frozen=True)
class Nested:
    """An object of our own."""

    cls: type[Any]

    def read(self, value: object, path: str, problems: Problems) -> Any:
        return _read_fields(self.cls, value, path, problems)

    def schema(self) -> dict[str, Any]:
        properties: dict[str, Any] = {}
        required: list[str] = []
        for field in dataclasses.fields(self.cls):
            schema = dict(field.metadata["kind"].schema())
            default = schema_default(field)
            if default is not None:
                schema["default"] = default
            properties[json_name(field)] = schema
            if is_required(field):
                required.append(json_name(field))
        out: dict[str, Any] = {"type": "object", "properties": properties}
        if required:
            out["required"] = required
        return out


def put(kind: Kind, default: Any = MISSING, *, name: str | None = None) -> Any:
    """A dataclass field of `kind`. Without `default` it is required; None: it may be absent."""
    metadata = {"kind": kind, "name": name}
    if isinstance(default, dict):
        frozen = dict(default)
        return dataclasses.field(default_factory=lambda: dict(frozen), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def put_object(cls: Callable[[], Any], *, name: str | None = None) -> Any:
    """A nested object whose own fields all have defaults, so that leaving it out means `{}`."""
    metadata = {"kind": Nested(cls), "name": name}  # type: ignore[arg-type]
    return dataclasses.field(default_factory=cls, metadata=metadata)


def json_name(field: dataclasses.Field[Any]) -> str:
    """`tensor_parallel_size` is `tensorParallelSize`, unless the field names itself."""
    if field.metadata["name"]:
        return str(field.metadata["name"])
    head, *tail = field.name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def schema_default(field: dataclasses.Field[Any]) -> Any:
    """The default as the CRD writes it; None when the field has none there."""
    if field.default_factory is not MISSING:
        return {} if isinstance(field.metadata["kind"], Nested | Table) else None
    if field.default is MISSING or field.default is None or field.default == ():
        return None
    return list(field.default) if isinstance(field.default, tuple) else field.default


def read_object(cls: type[T], value: object, path: str) -> tuple[T | None, tuple[FieldError, ...]]:
    """`value` as a `cls`, and every problem found; the object is None when there is any."""
    problems: Problems = []
    out = _read_fields(cls, value, path, problems)
    return (None if problems else out), tuple(problems)


def _read_fields(cls: type[Any], value: object, path: str, problems: Problems) -> Any:
    if not isinstance(value, Mapping):
        return _refuse(problems, path, "an object", value)
    known = {json_name(field): field for field in dataclasses.fields(cls)}
    for key in value:
        if key not in known:
            _refuse(problems, f"{path}.{key}", "one of " + ", ".join(sorted(known)), key)
    before = len(problems)
    read: dict[str, Any] = {}
    for name, field in known.items():
        # An explicit null is the same as leaving the field out, as it is for the API server.
        if value.get(name) is not None:
            read[field.name] = field.metadata["kind"].read(value[name], f"{path}.{name}", problems)
        elif is_required(field):
            problems.append(FieldError(f"{path}.{name}", "a value (it is required)", "nothing"))
    return cls(**read) if len(problems) == before else _UNREAD
