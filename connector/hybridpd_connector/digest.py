"""What a recurrent state depends on, as one digest: a load belongs to its prompt.

P states the digest of the tokens it prefilled; D computes its own and compares before it claims a
single token. The encoding is length-prefixed, so no two different inputs give the same bytes:

    "hybridpd-prompt-2" | n tokens | 4 | each id as uint32 | lora | n items | each item | cache salt
    "hybridpd-prompt-2" | n tokens | 0 | ids as text       | lora | ...

The second form is for ids that are no uint32: hexadecimal, with commas. Integers are little-endian,
int64 where nothing else is said; texts are UTF-8 after their length. Change the tag when the
encoding changes, and ``transfer_params.VERSION`` with it: P and D of different versions must never
agree by accident.
"""

import hashlib
import struct
from collections.abc import Sequence

_TAG = b"hybridpd-prompt-2"
_ID_BYTES = 4
_HEAD = struct.Struct(f"<{len(_TAG)}sqq")


def prompt_digest(
    token_ids: Sequence[int],
    tokens: int | None = None,
    *,
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
    id_bytes = _ID_BYTES
    try:
        # Most of the cost: one call for all ids, no copy of the list.
        ids = struct.Struct(f"<{len(token_ids)}I").pack(*token_ids)[: _ID_BYTES * count]
    except struct.error:
        id_bytes, ids = _odd_ids(token_ids[:count])
    context = _NO_CONTEXT
    if lora or multimodal or cache_salt:
        context = _context(lora, multimodal, cache_salt)
    head = _HEAD.pack(_TAG, count, id_bytes)
    return hashlib.sha256(b"".join((head, ids, context))).hexdigest()


def _odd_ids(token_ids: Sequence[int]) -> tuple[int, bytes]:
    """(bytes of an id, ids) when not all are uint32; what is behind the prefix does not count."""
    try:
        return _ID_BYTES, struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error:
        return 0, _text(",".join(f"{token:x}" for token in token_ids))


def _context(lora: str, multimodal: Sequence[str], cache_salt: str) -> bytes:
    items = (_number(len(multimodal)), *map(_text, multimodal))
    return b"".join((_text(lora), *items, _text(cache_salt)))


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return _number(len(raw)) + raw


_NO_CONTEXT = _context("", (), "")
