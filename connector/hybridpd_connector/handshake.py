"""The handshake: what D must know of a P engine before it reads a byte of it.

Wire format, both directions: 4 bytes magic ``HPDH``, 2 bytes wire version (big endian), then one
MessagePack map. The version is read first, so that a body of another version is never decoded.
Version history: 1 = first.

One question, one answer: the hello of an engine lists *all* its ranks, so that a D rank needs a
single round trip. The layout and placement maps belong to ``hybridpd_geometry``: here they are
bounded and typed as far as MessagePack types go, their own ``from_dict`` validates them.
"""

import dataclasses
import threading
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec

from hybridpd_connector.errors import (
    ConnectorError,
    RefusedError,
    VersionError,
    WireError,
)

MAGIC = b"HPDH"
WIRE_VERSION = 1
HEADER_BYTES = len(MAGIC) + 2
MAX_QUESTION_BYTES = 4 * 1024
MAX_HELLO_BYTES = 64 * 1024 * 1024
# All but the agents' metadata, which stays bytes: an object of one byte here costs 72 bytes when it
# is decoded, and no other thread of the engine runs meanwhile.
MAX_OUTLINE_BYTES = 2 * 1024 * 1024
MAX_AGENT_METADATA_BYTES = 16 * 1024 * 1024
MAX_RANKS = 1024
MAX_SLOTS = 1 << 16
MAX_EVERY = 1 << 20
MAX_TEXT = 512
MAX_SHORT_TEXT = 128

Role = Literal["producer", "consumer", "both"]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
ShortText = Annotated[str, msgspec.Meta(max_length=MAX_SHORT_TEXT)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT)]
AgentMetadata = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_AGENT_METADATA_BYTES)]
Unsigned = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


@dataclasses.dataclass(frozen=True)
class HostFacts:
    """What of a rank's surroundings decides over which path its memory can be read.

    ``boot_id``: of the machine's kernel, equal on one host; "" unknown. ``pid_namespace``: its
    inode number, 0 unknown. ``transports``: the environment variable UCX_TLS. ``remappable``: the
    cache lies in memory that its allocator can map anew (CUDA's virtual memory management).
    """

    boot_id: ShortText = ""
    pid_namespace: Unsigned = 0
    transports: ShortText = ""
    remappable: bool = False


@dataclasses.dataclass(frozen=True)
class RankHello:
    """One rank: where its pages and its boards are, and how to reach its agent.

    ``placement``: ``RankPlacement.to_dict()``. ``agent_metadata``: opaque, from ``Agent.metadata``.
    ``host`` may be missing: it explains a slow link, and decides nothing.
    ``sums_every``: it states checksums of every n-th prefill, 0 of none (see ``sum_board``).
    Plain data: it crosses process boundaries inside vLLM.
    """

    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    placement: dict[str, Any]
    agent_metadata: AgentMetadata = dataclasses.field(repr=False)
    board_address: Unsigned
    board_slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    host: HostFacts = HostFacts()
    sums_address: Unsigned = 0
    sums_slots: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOTS)] = 1
    sums_every: Annotated[int, msgspec.Meta(ge=0, le=MAX_EVERY)] = 0


@dataclasses.dataclass(frozen=True)
class Hello:
    """A whole engine. ``layout``: ``CacheLayout.to_dict()``; ``ranks``: all of them, in order;
    ``seal_key``: what its offers are sealed with, see ``seals``."""

    engine_id: Name
    connector_version: Name
    vllm_version: Name
    role: Role
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    lease_seconds: Annotated[int, msgspec.Meta(ge=1, le=24 * 3600)]
    layout: dict[str, Any]
    ranks: Annotated[tuple[RankHello, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
    seal_key: Annotated[bytes, msgspec.Meta(max_length=64)] = dataclasses.field(
        default=b"", repr=False
    )


class _Question(msgspec.Struct, forbid_unknown_fields=True):
    """``engine_id``: who is asked for (empty: whoever is there); ``from_engine_id``: who asks."""

    engine_id: Text
    from_engine_id: Text


class _Refusal(msgspec.Struct, forbid_unknown_fields=True):
    field: Text
    expected: Text
    got: Text
    hint: Text
    retryable: bool


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    """Exactly one of the two is set."""

    hello: Hello | None = None
    refusal: _Refusal | None = None


class _RankOutline(msgspec.Struct):
    agent_metadata: msgspec.Raw


class _HelloOutline(msgspec.Struct):
    ranks: Annotated[tuple[_RankOutline, ...], msgspec.Meta(max_length=MAX_RANKS)]


class _AnswerOutline(msgspec.Struct):
    """What is looked at first, without making objects of the rest."""

    hello: _HelloOutline | None = None


class _Named(msgspec.Struct):
    engine_id: Name


class _AnswerName(msgspec.Struct):
    """Who answered, without making objects of the rest."""

    hello: _Named | None = None
    refusal: _Refusal | None = None


class Asker(Protocol):
    """What ``fetch`` needs of a ``side_channel_client.Client``."""

    def ask(self, host: str, port: int, question: bytes, timeout_seconds: float) -> bytes: ...

    def hang_up(self) -> None:
        """End the questions that are on their way; none can be asked any more. Idempotent."""


_Body = TypeVar("_Body")
_question_decoder = msgspec.msgpack.Decoder(_Question)
_answer_decoder = msgspec.msgpack.Decoder(_Answer)
_name_decoder = msgspec.msgpack.Decoder(_AnswerName)
_outline_decoder = msgspec.msgpack.Decoder(_AnswerOutline)
_HEADER = MAGIC + WIRE_VERSION.to_bytes(2, "big")


def encode_question(engine_id: str, from_engine_id: str) -> bytes:
    return _HEADER + msgspec.msgpack.encode(_Question(engine_id, from_engine_id))


def decode_question(raw: bytes) -> tuple[str, str]:
    """(engine id asked for, engine id of the asker). ``WireError`` or ``VersionError``."""
    question = _decode(raw, _question_decoder, MAX_QUESTION_BYTES, "handshake question")
    return question.engine_id, question.from_engine_id


def encode_hello(hello: Hello) -> bytes:
    """Answer with a hello. ``WireError`` when the other side would not accept it."""
    raw = _HEADER + msgspec.msgpack.encode(_Answer(hello=hello))
    decode_answer(raw)
    return raw


def encode_refusal(error: ConnectorError, *, retryable: bool) -> bytes:
    refusal = _Refusal(
        field=error.field[:MAX_TEXT],
        expected=error.expected[:MAX_TEXT],
        got=error.got[:MAX_TEXT],
        hint=error.hint[:MAX_TEXT],
        retryable=retryable,
    )
    return _HEADER + msgspec.msgpack.encode(_Answer(refusal=refusal))


def decode_answer(raw: bytes) -> Hello:
    """The hello in an answer. ``WireError``, ``VersionError``, or the ``RefusedError`` it is."""
    outline = _decode(raw, _outline_decoder, MAX_HELLO_BYTES, "handshake answer").hello
    ranks = outline.ranks if outline else ()
    rest = len(raw) - sum(memoryview(rank.agent_metadata).nbytes for rank in ranks)
    if rest > MAX_OUTLINE_BYTES:
        expected = f"at most {MAX_OUTLINE_BYTES} bytes beside the metadata of its agents"
        raise WireError("handshake answer", expected, rest)
    answer = _decode(raw, _answer_decoder, MAX_HELLO_BYTES, "handshake answer")
    if answer.refusal is not None:
        raise _refused(answer.refusal)
    if answer.hello is None:
        raise WireError("handshake answer", "a hello or a refusal", "neither")
    hello = answer.hello
    if [rank.rank for rank in hello.ranks] != list(range(hello.tp_size)):
        raise WireError(
            "handshake answer.ranks",
            f"ranks 0 to {hello.tp_size - 1} in order",
            [rank.rank for rank in hello.ranks],
        )
    return hello


def fetch(
    asker: Asker,
    address: tuple[str, int],
    *,
    engine_id: str,
    our_engine_id: str,
    timeout_seconds: float,
) -> Hello:
    """Ask ``address`` for the hello of ``engine_id``. For a handshake thread: it blocks.

    ``RefusedError`` (not retryable) when another engine lives there now: P was restarted, and what
    the request refers to is gone.
    """
    host, port = address
    raw = asker.ask(host, port, encode_question(engine_id, our_engine_id), timeout_seconds)
    hello = decode_answer(raw)
    if hello.engine_id != engine_id:
        raise _other_engine(engine_id, hello.engine_id)
    return hello


def who_is_there(
    asker: Asker, address: tuple[str, int], *, our_engine_id: str, timeout_seconds: float
) -> str:
    """The id of the engine that lives at ``address``. It blocks, and raises as ``fetch`` does."""
    host, port = address
    raw = asker.ask(host, port, encode_question("", our_engine_id), timeout_seconds)
    answer = _decode(raw, _name_decoder, MAX_HELLO_BYTES, "handshake answer")
    if answer.refusal is not None:
        raise _refused(answer.refusal)
    if answer.hello is None:
        raise WireError("handshake answer", "a hello or a refusal", "neither")
    engine_id = answer.hello.engine_id
    if not engine_id.isprintable():
        # It goes into log lines before anything else of the hello is looked at.
        raise WireError("handshake answer.engine_id", "printable text", engine_id)
    return engine_id


class Responder:
    """Answers questions about one engine: before ``publish`` with "starting", then with its hello.

    ``answer`` never raises, whatever it is given; called on the side channel's thread.
    """

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._lock = threading.Lock()
        self._hello: bytes | None = None
        self._refused = 0

    def __repr__(self) -> str:
        state = "starting" if self._hello is None else "published"
        return f"Responder({self._engine_id!r}, {state}, refused={self._refused})"

    @property
    def refused(self) -> int:
        """Questions that could not be answered with a hello so far."""
        return self._refused

    def publish(self, hello: Hello) -> None:
        """From now on answer with ``hello``. ``WireError`` when it is not a valid one."""
        encoded = encode_hello(hello)
        with self._lock:
            self._hello = encoded

    def answer(self, raw: bytes) -> bytes:
        with self._lock:
            hello = self._hello
        try:
            engine_id, _ = decode_question(raw)
        except WireError as error:
            self._refused += 1
            return encode_refusal(error, retryable=False)
        if engine_id not in ("", self._engine_id):
            self._refused += 1
            return encode_refusal(_other_engine(engine_id, self._engine_id), retryable=False)
        if hello is None:
            self._refused += 1
            starting = RefusedError("engine", "ready", "starting", "retry")
            return encode_refusal(starting, retryable=True)
        return hello


def _refused(refusal: _Refusal) -> RefusedError:
    return RefusedError(
        refusal.field, refusal.expected, refusal.got, refusal.hint, retryable=refusal.retryable
    )


def _other_engine(expected: str, got: str) -> RefusedError:
    return RefusedError(
        "engine_id", expected, got, "the prefill engine at this address was replaced"
    )


def _decode(
    raw: bytes, decoder: "msgspec.msgpack.Decoder[_Body]", max_bytes: int, field: str
) -> _Body:
    if len(raw) > max_bytes:
        raise WireError(field, f"at most {max_bytes} bytes", len(raw))
    if len(raw) < HEADER_BYTES or raw[: len(MAGIC)] != MAGIC:
        raise WireError(field, f"magic {MAGIC!r} and a version", bytes(raw[:HEADER_BYTES]))
    version = int.from_bytes(raw[len(MAGIC) : HEADER_BYTES], "big")
    if version != WIRE_VERSION:
        raise VersionError(
            f"{field} version",
            str(WIRE_VERSION),
            version,
            "run one connector version on prefill and decode engines",
        )
    try:
        return decoder.decode(memoryview(raw)[HEADER_BYTES:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(field, "a well-formed body", str(error)) from error


def describe(hello: Hello) -> Mapping[str, object]:
    """What of a hello may be logged: never the agent metadata, which grants access to memory."""
    return {
        "engine_id": hello.engine_id,
        "connector_version": hello.connector_version,
        "vllm_version": hello.vllm_version,
        "role": hello.role,
        "tp_size": hello.tp_size,
        "lease_seconds": hello.lease_seconds,
    }
