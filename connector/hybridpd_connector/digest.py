"""What a recurrent state depends on, as one digest: a load belongs to its prompt.

P states the digest of the tokens it prefilled; D computes its own and compares before it claims a
single token. The encoding is length-prefixed, so no two different inputs give the same bytes:

    "hybridpd-prompt-1" | n tokens | each id as int64 | lora | n items | each item | cache salt

Integers are little-endian int64, texts are UTF-8 after their length. Change the tag when the
encoding changes: P and D of different versions must never agree by accident.
"""

import hashlib
import struct
from collections.abc import Sequence

_TAG = b"hybridpd-prompt-1"
_CHUNK = 1024
# Several times faster than an array of as many numbers.
_PACK = struct.Struct(f"<{_CHUNK}q")


def prompt_digest(
    token_ids: Sequence[int],
    *,
    lora: str = "",
    multimodal: Sequence[str] = (),
    cache_salt: str = "",
) -> str:
    """Digest (64 hex digits) of a prefilled prompt.

    ``token_ids``: exactly the N-1 ids whose state is transferred. ``lora``: name of the adapter,
    empty for the base model. ``multimodal``: content hash of each item, in prompt order.
    ``cache_salt``: the request's salt, empty when it has none.
    """
    state = hashlib.sha256(_TAG)
    state.update(_number(len(token_ids)))
    state.update(_numbers(token_ids))
    state.update(_text(lora))
    state.update(_number(len(multimodal)))
    for item in multimodal:
        state.update(_text(item))
    state.update(_text(cache_salt))
    return state.hexdigest()


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def _numbers(values: Sequence[int]) -> bytes:
    whole = len(values) - len(values) % _CHUNK
    parts = [_PACK.pack(*values[at : at + _CHUNK]) for at in range(0, whole, _CHUNK)]
    rest = values[whole:]
    return b"".join([*parts, struct.pack(f"<{len(rest)}q", *rest)])


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return _number(len(raw)) + raw
