"""Reading numbers and names that a stranger sent: types, ranges and sizes checked one by one."""

from collections.abc import Iterator, Mapping

from hybridpd_geometry.errors import GeometryError

MAX_NAME_CHARS = 512


class Reader:
    """One JSON object, read field by field; every error names the path of the field."""

    def __init__(self, data: object, path: str) -> None:
        if not isinstance(data, Mapping):
            raise GeometryError(path, "an object", type(data).__name__)
        self._data: Mapping[object, object] = data
        self._path = path
        self._read: set[str] = set()

    def _get(self, name: str) -> object:
        self._read.add(name)
        if name not in self._data:
            raise GeometryError(self._name(name), "a value", "nothing")
        return self._data[name]

    def _name(self, name: str) -> str:
        return f"{self._path}.{name}"

    def integer(self, name: str, low: int, high: int) -> int:
        """A whole number in [low, high]; booleans are no numbers."""
        return checked_integer(self._get(name), self._name(name), low, high)

    def text(self, name: str) -> str:
        """A non-empty string of bounded length."""
        return checked_text(self._get(name), self._name(name))

    def optional_text(self, name: str) -> str | None:
        """A string or null."""
        value = self._get(name)
        return None if value is None else checked_text(value, self._name(name))

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._get(name)
        if not isinstance(value, bool):
            raise GeometryError(self._name(name), "true or false", _shown(value))
        return value

    def items(self, name: str, limit: int) -> list[object]:
        """A list of at most `limit` values."""
        value = self._get(name)
        if not isinstance(value, list | tuple):
            raise GeometryError(self._name(name), "a list", type(value).__name__)
        if len(value) > limit:
            raise GeometryError(self._name(name), f"at most {limit} entries", len(value))
        return list(value)

    def integers(self, name: str, low: int, high: int, limit: int) -> tuple[int, ...]:
        """A bounded list of whole numbers."""
        where = self._name(name)
        return tuple(checked_integer(v, where, low, high) for v in self.items(name, limit))

    def integer_map(self, name: str, low: int, high: int, limit: int) -> dict[str, int]:
        """A bounded object from names to whole numbers."""
        value = self._get(name)
        where = self._name(name)
        if not isinstance(value, Mapping):
            raise GeometryError(where, "an object", type(value).__name__)
        if len(value) > limit:
            raise GeometryError(where, f"at most {limit} entries", len(value))
        return {
            checked_text(key, where): checked_integer(item, where, low, high)
            for key, item in value.items()
        }

    def objects(self, name: str, limit: int) -> Iterator["Reader"]:
        """A bounded list of objects, each as a Reader of its own."""
        for index, item in enumerate(self.items(name, limit)):
            yield Reader(item, f"{self._name(name)}[{index}]")

    def done(self) -> None:
        """Refuse fields nobody asked for: a newer peer may mean something by them."""
        unknown = [key for key in self._data if key not in self._read]
        if unknown:
            raise GeometryError(self._path, "no unknown fields", _shown(unknown[0]))


def checked_integer(value: object, field: str, low: int, high: int) -> int:
    """`value` if it is a whole number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise GeometryError(field, "a whole number", _shown(value))
    if not low <= value <= high:
        raise GeometryError(field, f"{low}..{high}", _shown(value))
    return value


def checked_text(value: object, field: str) -> str:
    """`value` if it is a string of 1 to MAX_NAME_CHARS characters."""
    if not isinstance(value, str) or not value or len(value) > MAX_NAME_CHARS:
        raise GeometryError(field, f"text of 1..{MAX_NAME_CHARS} characters", _shown(value))
    return value


def _shown(value: object) -> str:
    """A value in an error message: never longer than a line, whatever a peer sent."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = value[:60] if isinstance(value, str) else value
    shown = repr(text) if isinstance(text, str | int | float | None) else type(value).__name__
    return shown[:80]
