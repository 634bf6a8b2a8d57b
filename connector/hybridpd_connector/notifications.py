"""What D tells P about its requests: ``Renew`` keeps leases alive, ``Release`` ends one reader's.

Wire format: 4 bytes magic ``HPDN``, 1 byte version, then one MessagePack array
``["renew", d_engine, [p_request, ...]]`` or
``["release", p_request, sequence, d_engine, d_request, d_rank, d_tp_size]``.
Version history: 1 = first.

Everything is bounded: a message is at most ``MAX_BYTES``, a text ``MAX_TEXT`` characters.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, NamedTuple

import msgspec

from hybridpd_connector.agent_api import Notification
from hybridpd_connector.errors import ConnectorError, VersionError, WireError

MAGIC = b"HPDN"
VERSION = 1
_HEAD = MAGIC + bytes((VERSION,))
_HEAD_BYTES = len(_HEAD)
MAX_BYTES = 16 * 1024
MAX_TEXT = 512
MAX_TP_SIZE = 1024
MAX_SEQUENCE = (1 << 53) - 1
_RENEW_PAYLOAD_BYTES = 8 * 1024

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT)]


class Renew(msgspec.Struct, frozen=True, array_like=True, tag="renew", forbid_unknown_fields=True):
    """``d_engine`` still wants these P requests: their leases run from now again."""

    d_engine: Name
    p_requests: tuple[Name, ...]


class Release(
    msgspec.Struct, frozen=True, array_like=True, tag="release", forbid_unknown_fields=True
):
    """Rank ``d_rank`` of ``d_tp_size`` of engine ``d_engine`` no longer needs ``p_request``.

    ``sequence`` is P's number of the lease: a request id may come again, a sequence does not.
    """

    p_request: Name
    sequence: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCE)]
    d_engine: Name
    d_request: Name
    d_rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TP_SIZE)]
    d_tp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_TP_SIZE)]


Message = Renew | Release

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Renew | Release)


class Received(NamedTuple):
    """Messages in order of arrival, and the errors of what could not be decoded."""

    messages: tuple[Message, ...]
    errors: tuple[ConnectorError, ...]


def encode(message: Message) -> bytes:
    """Bytes of one message. ``WireError`` when it would not be accepted by the other side."""
    raw = _HEAD + _encoder.encode(message)
    decode(raw)
    return raw


def renewals(d_engine: str, p_requests: Iterable[str]) -> Iterator[bytes]:
    """Encoded ``Renew`` messages for all ``p_requests``, split so that each stays small."""
    batch: list[str] = []
    size_bytes = 0
    for p_request in p_requests:
        added = len(p_request.encode()) + 5
        if batch and size_bytes + added > _RENEW_PAYLOAD_BYTES:
            yield encode(Renew(d_engine, tuple(batch)))
            batch, size_bytes = [], 0
        batch.append(p_request)
        size_bytes += added
    if batch:
        yield encode(Renew(d_engine, tuple(batch)))


def decode(raw: bytes) -> Message:
    """The message in ``raw``, or ``WireError`` / ``VersionError``; nothing else is raised."""
    if len(raw) > MAX_BYTES or not raw.startswith(_HEAD):
        raise _not_ours(raw)
    try:
        message = _decoder.decode(raw[_HEAD_BYTES:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError("notification.body", "a renew or release message", str(error)) from error
    if isinstance(message, Release) and message.d_rank >= message.d_tp_size:
        raise WireError(
            "notification.d_rank", f"below d_tp_size {message.d_tp_size}", message.d_rank
        )
    return message


def _not_ours(raw: bytes) -> WireError:
    if len(raw) > MAX_BYTES:
        return WireError("notification", f"at most {MAX_BYTES} bytes", len(raw))
    if raw[: len(MAGIC)] != MAGIC or len(raw) <= len(MAGIC):
        return WireError("notification", f"magic {MAGIC!r} and a version", raw[:8])
    return VersionError(
        "notification.version",
        str(VERSION),
        raw[len(MAGIC)],
        "run one connector version on both sides",
    )


def decode_all(notifications: Iterable[Notification]) -> Received:
    """Decode what an agent delivered; a bad one never hides a good one."""
    messages: list[Message] = []
    errors: list[ConnectorError] = []
    for notification in notifications:
        try:
            messages.append(decode(notification.payload))
        except WireError as error:
            errors.append(error)
    return Received(tuple(messages), tuple(errors))
