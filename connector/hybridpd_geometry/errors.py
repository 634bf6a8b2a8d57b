"""The errors of this package: the bytes are wrong, the model is not known, or it is not moved."""


class GeometryError(ValueError):
    """A value that would make the arithmetic wrong.

    Every error names the `field`, what was `expected`, what was `got`, and, where there is one,
    the way out (`hint`).  The four parts are also attributes, so that a caller can show them in a
    condition or a log record without parsing text.
    """

    def __init__(self, field: str, expected: object, got: object, hint: str = "") -> None:
        super().__init__(field, expected, got, hint)
        self.field = field
        self.expected = expected
        self.got = got
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.field}: expected {self.expected}, got {self.got}"
        return f"{text}. {self.hint}" if self.hint else text


class UnknownModelError(GeometryError):
    """The config names a model whose cache layout this package cannot derive."""


class UnsupportedModelError(GeometryError):
    """The config names a model that is known, and whose cache is not moved; the hint says why."""
