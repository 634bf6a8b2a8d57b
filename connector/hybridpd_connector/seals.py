"""Seals: D reads what P has offered, and nothing that somebody on the way has made of it.

``kv_transfer_params`` travel through routers, and in some setups through clients. Whoever changes
block ids in them could make D decode from another request's state. P therefore seals what it
offers with a secret of its process (HMAC-SHA256), which only D learns, in the handshake; D compares
before it posts a read. Host and port stay outside: they only say whom to ask, and a service mesh
may rewrite them.
"""

import functools
import hmac
import struct

from hybridpd_connector.transfer_params import RemotePrefill

KEY_BYTES = 32
_TAG = b"hybridpd-params-1"


def seal_of(key: bytes, prefill: RemotePrefill) -> str:
    """The seal (64 hex digits) of everything that says which bytes are read.

    Every part is written after its length: no two different offers give the same bytes.
    """
    engine = prefill.engine_id.encode("utf-8", "surrogatepass")
    request = prefill.request_id.encode("utf-8", "surrogatepass")
    digest = prefill.digest.encode("utf-8", "surrogatepass")
    numbers = [prefill.tp_size, prefill.tokens, prefill.lease_seconds, prefill.sequence]
    numbers.append(len(prefill.block_ids))
    for group in prefill.block_ids:
        numbers.append(len(group))
        numbers += group
    e, r, d = len(engine), len(request), len(digest)
    form = f"<q{e}sq{r}sq{d}s{len(numbers)}q"
    offered = struct.pack(form, e, engine, r, request, d, digest, *numbers)
    state = _keyed(key).copy()
    state.update(offered)
    return state.hexdigest()


@functools.lru_cache(maxsize=256)
def _keyed(key: bytes) -> hmac.HMAC:
    """Where all seals of a key begin; to be copied. Setting it up costs more than a seal."""
    return hmac.new(key, _TAG, "sha256")


def sealed(key: bytes, prefill: RemotePrefill) -> RemotePrefill:
    """The same with its seal."""
    # `_replace` takes twice as long; the seal is the last field.
    return RemotePrefill(*prefill[:-1], seal_of(key, prefill))


def is_sealed(key: bytes, prefill: RemotePrefill) -> bool:
    """Has the owner of ``key`` offered exactly this?"""
    return hmac.compare_digest(prefill.seal, seal_of(key, prefill))
