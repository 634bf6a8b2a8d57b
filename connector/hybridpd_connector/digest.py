"""What a recurrent state depends on, as one digest: a load belongs to its prompt.

P states the digest of the tokens it prefilled; D computes its own and compares before it claims a
single token. The encoding is length-prefixed, so no two different inputs give the same bytes:

    "hybridpd-prompt-3" | n tokens | bytes of ids | ids as MessagePack | lora | n items | each item
                        | cache salt
    "hybridpd-prompt-3" | n tokens | -1           | ids as text        | lora | ...

MessagePack: integers one after the other, each in its shortest form, which is made in half the time
that bytes of equal length take. The second form is for ids beyond 64 bits: hexadecimal, with
commas. Integers are little-endian int64 where nothing else is said; texts are UTF-8 after their
length. Change the tag when the encoding changes, and ``transfer_params.VERSION`` with it: P and D
of different versions must never agree by accident.
"""

import hashlib
import operator
import struct
from collections.abc import Sequence
from typing import Protocol

import msgspec

_TAG = b"hybridpd-prompt-3"
_TEXT_FORM = -1
_HEAD = struct.Struct(f"<{len(_TAG)}sqq")
_encode = msgspec.msgpack.Encoder().encode
PIECE_BYTES = 2047


class Hash(Protocol):
    """What ``hashlib`` makes."""

    def update(self, data: bytes, /) -> None: ...


def prompt_digest(
    token_ids: Sequence[int],
    tokens: int | None = None,
    lora: str = "",
    multimodal: Sequence[str] = (),
    cache_salt: str = "",
) -> str:
    """Digest (64 hex digits) of a prefilled prompt.

    ``token_ids``: the first ``tokens`` of them count, all by default: exactly the N-1 ids whose
    state is transferred. ``lora``: name of the adapter, empty for the base model. ``multimodal``:
    content hash of each item, in prompt order. ``cache_salt``: the request's salt, empty when it
    has none.
    """
    count = len(token_ids) if tokens is None else min(tokens, len(token_ids))
    try:
        ids = _packed(token_ids, count)
        size = len(ids)
    except (OverflowError, TypeError):
        size, ids = _odd_ids(token_ids[:count])
    context = _NO_CONTEXT
    if lora or multimodal or cache_salt:
        context = _context(lora, multimodal, cache_salt)
    state = hashlib.sha256()
    feed(state, b"".join((_HEAD.pack(_TAG, count, size), ids, context)))
    return state.hexdigest()


def feed(state: Hash, data: bytes) -> None:
    """Hash ``data`` without letting go of the interpreter, which ``hashlib`` does for more than
    ``PIECE_BYTES`` at once: beside busy threads it comes back 10 ms later, for a hash of
    microseconds."""
    if len(data) <= PIECE_BYTES:
        state.update(data)
        return
    for at in range(0, len(data), PIECE_BYTES):
        state.update(data[at : at + PIECE_BYTES])


def _packed(token_ids: Sequence[int], count: int) -> bytes:
    """The first ``count`` ids. Most of the cost: one call for all, no copy of the list."""
    length = len(token_ids)
    packed = _encode(token_ids)
    if count == length:
        return packed[_array_head(length) :]
    behind = _encode(token_ids[count:])
    return packed[_array_head(length) : len(packed) - len(behind) + _array_head(length - count)]


def _array_head(length: int) -> int:
    """Bytes before the first element of a MessagePack array."""
    if length < 16:
        return 1
    return 3 if length < 1 << 16 else 5


def _odd_ids(token_ids: Sequence[int]) -> tuple[int, bytes]:
    """(size to state, ids) of another kind of sequence or of integers, or of huge ones; what is
    behind the prefix does not count."""
    plain = [*map(operator.index, token_ids)]
    try:
        ids = _packed(plain, len(plain))
    except OverflowError:
        return _TEXT_FORM, _text(",".join(f"{token:x}" for token in plain))
    return len(ids), ids


def _context(lora: str, multimodal: Sequence[str], cache_salt: str) -> bytes:
    items = (_number(len(multimodal)), *map(_text, multimodal))
    return b"".join((_text(lora), *items, _text(cache_salt)))


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return _number(len(raw)) + raw


_NO_CONTEXT = _context("", (), "")
