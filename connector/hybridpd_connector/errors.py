"""The few errors of the connector. Each names the field, what was expected, and what was found.

Nothing foreign leaves the doors: NIXL, ZeroMQ and decoder exceptions are translated once, where
they are raised, into one of these, with the original as ``__cause__``.
"""

import reprlib

_SHOWN_CHARACTERS = 160

_bounded = reprlib.Repr()
_bounded.maxstring = _bounded.maxother = _bounded.maxlong = _SHOWN_CHARACTERS


def shorten(value: object) -> str:
    """Text of ``value`` that is safe to print: peer data is bounded in size and escaped."""
    if isinstance(value, str):
        text = value[: _SHOWN_CHARACTERS + 1]
    else:
        try:
            text = _bounded.repr(value)
        except ValueError:  # an integer past Python's limit for decimal digits
            text = f"{type(value).__name__} with a huge number"
    if len(text) <= _SHOWN_CHARACTERS and text.isascii() and text.isprintable():
        return text
    escaped = text.encode("ascii", "backslashreplace").decode("ascii")
    printable = "".join(c if c.isprintable() else "?" for c in escaped)
    if len(printable) > _SHOWN_CHARACTERS:
        return printable[:_SHOWN_CHARACTERS] + "..."
    return printable


def one_line(text: str) -> str:
    """Whole, but a log line cannot be forged with it: parts of errors come from peers."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


class ConnectorError(Exception):
    """Base of all connector errors: ``<field>: expected X, got Y``, and the way out if known."""

    def __init__(self, field: str, expected: str, got: object, hint: str = "") -> None:
        self.field = one_line(field)
        self.expected = one_line(expected)
        self.got = shorten(got)
        self.hint = one_line(hint)
        way_out = f"; {self.hint}" if hint else ""
        super().__init__(f"{self.field}: expected {self.expected}, got {self.got}{way_out}")

    def __reduce__(self) -> tuple[type["ConnectorError"], tuple[str, str, str, str]]:
        return type(self), (self.field, self.expected, self.got, self.hint)


class AgentError(ConnectorError):
    """The transfer agent (NIXL) could not do what was asked."""


class PeerLostError(AgentError):
    """The agent says that the other side is gone; its peer entry must be dropped."""


class WireError(ConnectorError):
    """Bytes from a peer that do not follow the format. Nothing of them was used."""


class VersionError(WireError):
    """The peer speaks another wire version; retrying does not help until one side is updated."""


class SideChannelError(ConnectorError):
    """No usable answer over the side channel (unreachable, too slow, too large). Worth a retry."""


class SideChannelKeyError(SideChannelError):
    """The two sides have different keys, or only one of them has one."""


class KeyFileError(ConnectorError):
    """The key file of the side channel cannot be used. Its content is never part of the text."""


class RefusedError(ConnectorError):
    """The peer understood us and said no. Worth a retry only when ``retryable`` is set."""

    def __init__(
        self, field: str, expected: str, got: object, hint: str = "", *, retryable: bool = False
    ) -> None:
        super().__init__(field, expected, got, hint)
        self.retryable = retryable

    def __reduce__(self) -> tuple[type[ConnectorError], tuple[str, str, str, str]]:
        return type(self), (self.field, self.expected, self.got, self.hint)


class ParamsError(ConnectorError):
    """``kv_transfer_params`` of a request are missing, of the wrong type, or out of bounds."""


class SumError(ConnectorError):
    """The device could not sum what it holds; the load goes on without a check."""


class StateError(ConnectorError):
    """An illegal move in one of our own tables: a bug here, never a peer's doing."""
