"""Seals: D reads what P has offered, and nothing that somebody on the way has made of it.

``kv_transfer_params`` travel through routers, and in some setups through clients. Whoever changes
block ids in them could make D decode from another request's state. P therefore seals what it
offers with a secret of its process (BLAKE2b with a key), which only D learns, in the handshake; D
compares before it posts a read. Host and port stay outside: they only say whom to ask, and a
service mesh may rewrite them.
"""

import functools
import hashlib
import hmac

import msgspec

from hybridpd_connector.digest import feed
from hybridpd_connector.transfer_params import RemotePrefill

KEY_BYTES = 32
_SEAL_BYTES = 32
_TAG = b"hybridpd-offer-2"
_encode = msgspec.msgpack.Encoder().encode


def seal_of(key: bytes, prefill: RemotePrefill) -> str:
    """The seal (64 hex digits) of everything that says which bytes are read.

    As MessagePack every part says where it ends: no two different offers give the same bytes.
    ``key``: at most 64 bytes.
    """
    engine_id, request_id, _, _, block_ids, tp_size, tokens, digest, lease, sequence, _ = prefill
    numbers = tp_size, tokens, lease, sequence
    try:
        offered = _encode((engine_id, request_id, digest, block_ids, numbers))
    except UnicodeEncodeError:
        # Halves of characters, from a client. Bytes are no texts: the two forms never meet.
        texts = [text.encode("utf-8", "surrogatepass") for text in (engine_id, request_id, digest)]
        offered = _encode((*texts, block_ids, numbers))
    state = _keyed(key).copy()
    feed(state, offered)
    return state.hexdigest()


@functools.lru_cache(maxsize=256)
def _keyed(key: bytes) -> hashlib.blake2b:
    """Where all seals of a key begin; to be copied. HMAC of OpenSSL takes twice as long, and many
    times as long when a busy engine has swept it out of the CPU's caches."""
    return hashlib.blake2b(digest_size=_SEAL_BYTES, key=key, person=_TAG)


def sealed(key: bytes, prefill: RemotePrefill) -> RemotePrefill:
    """The same with its seal."""
    # `_replace` takes twice as long; the seal is the last field.
    return RemotePrefill(*prefill[:-1], seal_of(key, prefill))


def is_sealed(key: bytes, prefill: RemotePrefill) -> bool:
    """Has the owner of ``key`` offered exactly this?"""
    return hmac.compare_digest(prefill.seal, seal_of(key, prefill))
