"""``kv_transfer_params``: what a router relays between P and D, and the only thing it relays.

The dictionary comes from outside: through a router, possibly from a client. It is parsed into a
frozen value or refused with a ``ParamsError`` that names the key. Key names are those that
vllm-router and the llm-d sidecar relay verbatim; ours are under ``hybridpd``.

    router -> P   {"do_remote_decode": true, "do_remote_prefill": false, ...: null}
    P -> D        {"do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": ...,
                   "hybridpd": {"v": 3, "tokens": N-1, "digest": hex, "lease_seconds": s,
                                "sequence": n, "seal": hex}}
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from hybridpd_connector.errors import ParamsError

VERSION = 3
"""3: digest and seal are of MessagePack. 2: the digest was of ids in four bytes each. 1: eight."""
MAX_TEXT = 512
MAX_GROUPS = 64
MAX_BLOCKS = 1 << 20
FEW_BLOCKS = 4096
MAX_BLOCK_ID = (1 << 31) - 1
MAX_TOKENS = 1 << 27
MAX_TP_SIZE = 1024
MAX_LEASE_SECONDS = 24 * 3600
# A router may parse JSON numbers as doubles: larger integers would not survive it.
MAX_SEQUENCE = (1 << 53) - 1

_is_host = re.compile(r"[A-Za-z0-9_.:%\-]{1,253}").fullmatch
_is_digest = re.compile(r"[0-9a-f]{64}").fullmatch
_LISTS = (list, tuple)
_INT_ONLY = frozenset((int,))
_MANY = 4
_HINT = "the router must pass kv_transfer_params of the prefill answer on unchanged"


class RemotePrefill(NamedTuple):
    """Where the state of a prompt lies: P's answer to a prefill, D's order to load.

    ``block_ids``: per KV-cache group of P, logical block ids. ``tokens``: N-1, the tokens whose
    state is there. ``sequence``: P's number of this lease, for its lease board. ``seal``: see
    ``seals``.
    """

    engine_id: str
    request_id: str
    host: str
    port: int
    block_ids: tuple[tuple[int, ...], ...]
    tp_size: int
    tokens: int
    digest: str
    lease_seconds: int
    sequence: int
    seal: str = ""


def roles_of(params: object) -> tuple[bool, bool]:
    """(a prefill whose state another engine will fetch, a load from one): we are P, or D.

    ``ParamsError`` when the flags are not booleans, or both roles are asked for at once.
    """
    if params is None:
        return False, False
    if not _is_object(params):
        raise ParamsError("kv_transfer_params", "an object", type(params).__name__, _HINT)
    decode, prefill = params.get("do_remote_decode"), params.get("do_remote_prefill")
    for key, value in (("do_remote_decode", decode), ("do_remote_prefill", prefill)):
        if value is not None and not isinstance(value, bool):
            raise ParamsError(f"kv_transfer_params.{key}", "true, false or null", value, _HINT)
    if decode and prefill:
        raise ParamsError(
            "kv_transfer_params",
            "do_remote_decode or do_remote_prefill",
            "both",
            "a request is prefilled for another engine or loaded from one, never both",
        )
    return bool(decode), bool(prefill)


def wants_prefill(params: object) -> bool:
    """Is this a prefill whose state another engine will fetch? Errors as in ``roles_of``."""
    return roles_of(params)[0]


def parse_decode(params: object, prompt_tokens: int = MAX_TOKENS) -> RemotePrefill | None:
    """The load that D is asked to do; None when none is asked for. See ``parse_load``."""
    if not roles_of(params)[1] or not _is_object(params):
        return None
    return parse_load(params, prompt_tokens)


def parse_load(params: Mapping[Any, Any], prompt_tokens: int = MAX_TOKENS) -> RemotePrefill:
    """The load that D is asked to do.

    ``prompt_tokens``: of the request here. A block holds a token or more, so the engine's thread
    looks at no more ids than that, or at ``FEW_BLOCKS``: what is for another prompt has a refusal
    of its own.
    """
    ours = params.get("hybridpd")
    if not _is_object(ours):
        raise ParamsError("kv_transfer_params.hybridpd", "an object", ours, _HINT)
    version = _integer(ours, "v", 1, MAX_TEXT, "hybridpd.")
    if version != VERSION:
        raise ParamsError(
            "kv_transfer_params.hybridpd.v",
            str(VERSION),
            version,
            "run one connector version on prefill and decode engines",
        )
    tokens = _integer(ours, "tokens", 0, MAX_TOKENS, "hybridpd.")
    most = min(tokens, max(FEW_BLOCKS, prompt_tokens))
    # In the order of the fields: names would make it take twice as long.
    return RemotePrefill(
        _text(params, "remote_engine_id"),
        _text(params, "remote_request_id"),
        _host(params, "remote_host"),
        _integer(params, "remote_port", 1, 65535),
        _block_ids(params, "remote_block_ids", most),
        _integer(params, "tp_size", 1, MAX_TP_SIZE),
        tokens,
        _digest(ours, "digest"),
        _integer(ours, "lease_seconds", 1, MAX_LEASE_SECONDS, "hybridpd."),
        _integer(ours, "sequence", 1, MAX_SEQUENCE, "hybridpd."),
        _digest(ours, "seal"),
    )


def answer(prefill: RemotePrefill) -> dict[str, Any]:
    """P's answer as values that become JSON. What it builds, ``parse_decode`` accepts or this
    raises."""
    engine_id, request_id, host, port, _, tp_size, tokens, digest, lease, sequence, seal = prefill
    _check_engine(engine_id, host, port, tp_size, lease)
    params = _document(prefill)
    if not (
        type(tokens) is int and 0 <= tokens <= MAX_TOKENS
        and type(sequence) is int and 1 <= sequence <= MAX_SEQUENCE
        and 1 <= len(request_id) <= MAX_TEXT and request_id.isprintable()
        and _is_digest(digest) and _is_digest(seal)
    ):  # fmt: skip
        # Told at once when all is right, which it is but for what a client has named; this names
        # what is not.
        parse_decode(params)
    _block_ids(params, "remote_block_ids", tokens)
    return params


@functools.lru_cache(maxsize=8, typed=True)
def _check_engine(engine_id: str, host: str, port: int, tp_size: int, lease_seconds: int) -> None:
    """What is the same in all answers of an engine is parsed once."""
    any_digest = "0" * 64
    sample = RemotePrefill(
        engine_id, "r", host, port, ((1,),), tp_size, 1, any_digest, lease_seconds, 1, any_digest
    )
    parse_decode(_document(sample))


def _document(prefill: RemotePrefill) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": prefill.engine_id,
        "remote_request_id": prefill.request_id,
        "remote_host": prefill.host,
        "remote_port": prefill.port,
        "remote_block_ids": prefill.block_ids,
        "tp_size": prefill.tp_size,
        "hybridpd": {
            "v": VERSION,
            "tokens": prefill.tokens,
            "digest": prefill.digest,
            "lease_seconds": prefill.lease_seconds,
            "sequence": prefill.sequence,
            "seal": prefill.seal,
        },
    }


def _is_object(value: object) -> TypeGuard[Mapping[Any, Any]]:
    # What JSON gives is told at once: asking an abstract class takes several times longer.
    return type(value) is dict or isinstance(value, Mapping)


def _text(params: Mapping[Any, Any], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_TEXT or not value.isprintable():
        raise ParamsError(
            f"kv_transfer_params.{key}", f"1 to {MAX_TEXT} printable characters", value, _HINT
        )
    return value


def _host(params: Mapping[Any, Any], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not _is_host(value):
        raise ParamsError(f"kv_transfer_params.{key}", "a host name or address", value, _HINT)
    return value


def _digest(params: Mapping[Any, Any], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not _is_digest(value):
        raise ParamsError(f"kv_transfer_params.hybridpd.{key}", "64 hex digits", value, _HINT)
    return value


def _integer(params: Mapping[Any, Any], key: str, low: int, high: int, prefix: str = "") -> int:
    value = params.get(key)
    # bool is an int in Python: true is not a port.
    if type(value) is not int or not low <= value <= high:
        raise ParamsError(
            f"kv_transfer_params.{prefix}{key}", f"an integer from {low} to {high}", value, _HINT
        )
    return value


def _block_ids(params: Mapping[Any, Any], key: str, tokens: int) -> tuple[tuple[int, ...], ...]:
    value = params.get(key)
    if not isinstance(value, _LISTS) or not 1 <= len(value) <= MAX_GROUPS:
        expected = f"1 to {MAX_GROUPS} lists, one per KV-cache group"
        raise ParamsError(f"kv_transfer_params.{key}", expected, value, _HINT)
    most, total = tokens or 1, 0
    groups: list[tuple[int, ...]] = []
    for index, group in enumerate(value):
        if type(group) is not list and not isinstance(group, _LISTS):
            raise _wrong_group(key, index, "a list of block ids", group)
        size = len(group)
        total += size
        if size > most:
            raise _wrong_group(key, index, f"at most {most} block ids for so many tokens", size)
        if total > MAX_BLOCKS:
            expected = f"at most {MAX_BLOCKS} block ids"
            raise ParamsError(f"kv_transfer_params.{key}", expected, total, _HINT)
        # Those to be looked at one by one: none of many, when all are right.
        for block_id in group if size < _MANY else _unlikely(group):
            # bool is an int in Python, and 1.0 may be compared with one.
            if type(block_id) is not int or not 0 <= block_id <= MAX_BLOCK_ID:
                raise _wrong_group(key, index, f"block ids from 0 to {MAX_BLOCK_ID}", block_id)
        groups.append(tuple(group))
    return tuple(groups)


def _wrong_group(key: str, index: int, expected: str, got: object) -> ParamsError:
    return ParamsError(f"kv_transfer_params.{key}[{index}]", expected, got, _HINT)


def _unlikely(ids: Sequence[Any]) -> Sequence[Any]:
    right = _INT_ONLY.issuperset(map(type, ids)) and min(ids) >= 0 and max(ids) <= MAX_BLOCK_ID
    return () if right else ids
