"""Reading a `config.json`: every field's type and range is checked, and none is made up."""

from collections.abc import Mapping

from hybridpd_geometry.errors import GeometryError
from hybridpd_geometry.fields import checked_integer

MAX_DIMENSION = 1 << 24
MAX_LAYERS = 4096


class Config:
    """A `config.json` with checked access; a missing field without default is an error."""

    def __init__(self, data: Mapping[str, object], path: str = "config") -> None:
        self._data = data
        self._path = path

    def get(self, name: str) -> object:
        """The raw value, None when missing or null."""
        return self._data.get(name)

    def number(self, name: str, default: int | None = None, low: int = 1) -> int:
        """A whole number of at least `low`."""
        value = self._data.get(name)
        if value is None:
            if default is None:
                raise GeometryError(
                    f"{self._path}.{name}",
                    "a number",
                    "nothing",
                    "The config does not say what the cache needs to know.",
                )
            return default
        return checked_integer(value, f"{self._path}.{name}", low, MAX_DIMENSION)

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self._data.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise GeometryError(f"{self._path}.{name}", "text", type(value).__name__)
        return value

    def names(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, None when missing."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise GeometryError(f"{self._path}.{name}", "a list of names", type(value).__name__)
        if len(value) > MAX_LAYERS:
            raise GeometryError(f"{self._path}.{name}", f"at most {MAX_LAYERS}", len(value))
        return tuple(value)

    def indices(self, name: str, layers: int, first: int = 0) -> tuple[int, ...]:
        """A list of layer numbers counted from `first`, as ascending indices from 0."""
        value = self._data.get(name)
        where = f"{self._path}.{name}"
        if not isinstance(value, list | tuple):
            raise GeometryError(where, "a list of layer numbers", type(value).__name__)
        last = layers - 1 + first
        return tuple(sorted({checked_integer(v, where, first, last) - first for v in value}))
