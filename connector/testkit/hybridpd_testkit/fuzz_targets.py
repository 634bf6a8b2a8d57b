"""Everything that reads what a stranger wrote, as functions of bytes, for fuzzers and for tests.

``Target.run`` is True when the input was taken, False when one of our errors refused it; any other
exception, or an error whose text has no bound, is a finding. ``seeds`` are taken. ``mutate`` makes
hostile neighbours of an input that keep its outer form, so that they get past the first check.

Objects come as MessagePack: it holds everything that JSON does, and one byte changes a type.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from hybridpd_connector import handshake, notifications, transfer_params
from hybridpd_connector.agent_api import Memory, MemoryRegion, Notification
from hybridpd_connector.agent_fake import FakeAgent, FakeNetwork
from hybridpd_connector.errors import ConnectorError, KeyFileError, ParamsError, WireError
from hybridpd_connector.lease_board import SLOT_BYTES, BoardReader, LeaseBoard
from hybridpd_connector.leases import ProducerLeases
from hybridpd_connector.metadata import GroupFacts, RequestFacts
from hybridpd_connector.peer_link import LinkBuilder, LocalCache
from hybridpd_connector.peers import Address
from hybridpd_connector.request_blocks import Identity
from hybridpd_connector.scheduler_side import SchedulerHalf
from hybridpd_connector.seals import is_sealed
from hybridpd_connector.side_channel_keys import parse_keys
from hybridpd_geometry import (
    AttentionFacts,
    CacheLayout,
    EngineFacts,
    GeometryError,
    ModelFacts,
    RankPlacement,
    StateFacts,
    layout_of,
)

MAX_MESSAGE_CHARACTERS = 20_000
_ENGINE = "p-0123456789ab"
_BLOCKS = 8
_BASE = 1 << 40
_BOARD = 1 << 30
_BOARD_SLOTS = 64


class FindingError(AssertionError):
    """A target broke its promise."""


@dataclasses.dataclass(frozen=True)
class Target:
    """One reader. ``header_bytes``: bytes before the MessagePack body; -1: the input is text."""

    run: Callable[[bytes], bool]
    seeds: tuple[bytes, ...]
    header_bytes: int = 0


def _taken(
    errors: type[Exception] | tuple[type[Exception], ...], read: Callable[[], object]
) -> bool:
    try:
        read()
    except errors as error:
        if len(str(error)) > MAX_MESSAGE_CHARACTERS:
            raise FindingError(f"an error of {len(str(error))} characters") from error
        return False
    return True


def _document(raw: bytes) -> tuple[bool, Any]:
    """(is it one, the object)."""
    try:
        return True, msgspec.msgpack.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        return False, None


_MODEL = ModelFacts(
    "tiny",
    attention_layers=(1,),
    state_layers=(0,),
    attention=AttentionFacts(query_heads=4, kv_heads=2, head_dim=4, v_head_dim=4),
    state=StateFacts("mamba2", inner=32, heads=8, head_dim=4, state_size=4, groups=2),
)
_LAYOUT = layout_of(_MODEL, EngineFacts(1), "model", vllm_version="0.32.0")
_PLACEMENT = RankPlacement(
    rank=0,
    num_blocks=_BLOCKS,
    region_bases=tuple(_BASE + index * (1 << 24) for index in range(len(_LAYOUT.layers))),
    block_strides=(_LAYOUT.page_bytes,) * len(_LAYOUT.layers),
    layer_region={layer.name: index for index, layer in enumerate(_LAYOUT.layers)},
)
_CACHE = (MemoryRegion(_BASE, len(_LAYOUT.layers) << 24),)


def _hello(network: FakeNetwork) -> handshake.Hello:
    agent = FakeAgent("p/0", network)
    agent.register([*_CACHE, MemoryRegion(_BOARD, _BOARD_SLOTS * SLOT_BYTES)])
    rank = handshake.RankHello(
        rank=0,
        placement=_PLACEMENT.to_dict(),
        agent_metadata=agent.metadata(),
        board_address=_BOARD,
        board_slots=_BOARD_SLOTS,
    )
    return handshake.Hello(
        engine_id=_ENGINE,
        connector_version="0.1.0",
        vllm_version="0.32.0",
        role="producer",
        tp_size=1,
        lease_seconds=30,
        layout=_LAYOUT.to_dict(),
        ranks=(rank,),
    )


class _Link:
    """A D rank whose P answers the handshake with whatever the fuzzer likes."""

    def __init__(self) -> None:
        network = FakeNetwork()
        self.good = handshake.encode_hello(_hello(network))
        self._agent = FakeAgent("d/0", network)
        self._agent.register(_CACHE)
        local = LocalCache("d", _LAYOUT, _PLACEMENT, Memory.DRAM, lambda ranges: None)
        boards = BoardReader(self._agent, cells=4)
        self._builder = LinkBuilder(local, self._agent, boards, self, 1.0)
        self._idle = self._agent.open_lists
        self._answer = b""

    def ask(self, host: str, port: int, question: bytes, timeout_seconds: float) -> bytes:
        return self._answer

    def hang_up(self) -> None:
        """Nothing is on its way."""

    def run(self, raw: bytes) -> bool:
        self._answer = raw
        _taken(ConnectorError, self._ask_who)
        taken = _taken(ConnectorError, self._build)
        if self._agent.open_lists != self._idle or self._agent.peers:
            raise FindingError(f"left behind: {self._agent!r}")
        return taken

    def _ask_who(self) -> None:
        who = handshake.who_is_there(self, ("p", 5600), our_engine_id="d", timeout_seconds=1.0)
        if not who.isprintable() or len(who) > handshake.MAX_TEXT:
            raise FindingError("a name that may not be logged")

    def _build(self) -> None:
        self._builder.take_apart(self._builder.build(_ENGINE, Address("p", 5600)))


def _responder(raw: bytes) -> bool:
    """What P answers to a question: always bounded, always an answer that D can read."""
    if len(_responder_of_p.answer(raw)) > handshake.MAX_HELLO_BYTES:
        raise FindingError("an answer without a bound")
    return _taken(ConnectorError, lambda: handshake.decode_answer(_responder_of_p.answer(raw)))


def _notification(raw: bytes) -> bool:
    """Decoded, applied to leases, and the leases stay those that were pinned."""
    leases = ProducerLeases(30.0, LeaseBoard(16))
    leases.pin("p-1", 1, 0.0)
    received = notifications.decode_all([Notification("d/0", raw), Notification("d/0", raw)])
    leases.tick(received.messages, 1.0)
    leases.tick((), 1e6)
    if leases.held:
        raise FindingError("a message keeps a lease for ever")
    return not received.errors


def _params(raw: bytes) -> bool:
    known, document = _document(raw)
    if not known:
        return False

    def read() -> None:
        transfer_params.wants_prefill(document)
        prefill = transfer_params.parse_decode(document)
        if (
            prefill is not None
            and transfer_params.parse_decode(transfer_params.answer(prefill)) != prefill
        ):
            raise FindingError("what was read is not what would be written")
        if prefill is not None and is_sealed(b"a key that the fuzzer does not know", prefill):
            raise FindingError("a seal was guessed")

    return _taken(ParamsError, read)


def _scheduler(raw: bytes) -> bool:
    """A request with these parameters lives and dies; nothing may be raised at all."""
    known, document = _document(raw)
    if not known or not isinstance(document, dict):
        return False
    identity = Identity("e", "10.0.0.1", 5600, 1, "both", 30)
    groups = [GroupFacts(kind, _LAYOUT.block_tokens) for kind in _LAYOUT.group_kinds]
    half = SchedulerHalf(identity, groups)
    half.on_new_request(RequestFacts("r", 9, tuple(range(9)), document))
    tokens = half.external_tokens("r", 0)
    blocks = tuple((index + 1,) for index in range(len(groups)))
    half.on_allocated("r", blocks if tokens else (), tokens)
    half.build_orders()
    half.on_finished("r", None, blocks)
    half.build_orders()
    return True


def _layout(raw: bytes) -> bool:
    known, document = _document(raw)
    return known and _taken(GeometryError, lambda: _same(CacheLayout, document))


def _placement(raw: bytes) -> bool:
    known, document = _document(raw)
    return known and _taken(GeometryError, lambda: _same(RankPlacement, document))


def _same(kind: type[CacheLayout] | type[RankPlacement], document: object) -> None:
    read = kind.from_dict(document)
    if kind.from_dict(read.to_dict()) != read:
        raise FindingError("what was read is not what would be written")


def _key_file(raw: bytes) -> bool:
    return _taken(KeyFileError, lambda: parse_keys(raw))


_link = _Link()
_responder_of_p = handshake.Responder(_ENGINE)
_responder_of_p.publish(_hello(FakeNetwork()))
_encode = msgspec.msgpack.encode
_LOAD: dict[str, Any] = transfer_params.answer(
    transfer_params.RemotePrefill(
        engine_id=_ENGINE,
        request_id="cmpl-1",
        host="10.0.0.1",
        port=5600,
        block_ids=((1, 2), (3,)),
        tp_size=1,
        tokens=8,
        digest="0" * 64,
        lease_seconds=30,
        sequence=1,
        seal="0" * 64,
    )
)
_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
_HPDH, _HPDN = handshake.HEADER_BYTES, len(notifications.MAGIC) + 1

TARGETS: Mapping[str, Target] = {
    "question": Target(_responder, (handshake.encode_question(_ENGINE, "d"),), _HPDH),
    "hello": Target(
        lambda raw: _taken(WireError, lambda: handshake.decode_answer(raw)), (_link.good,), _HPDH
    ),
    "link": Target(_link.run, (_link.good,), _HPDH),
    "notification": Target(
        _notification,
        (
            notifications.encode(notifications.Renew("d", ("p-1", "p-2"))),
            notifications.encode(notifications.Release("p-1", 1, "d", "r", 0, 1)),
        ),
        _HPDN,
    ),
    "transfer_params": Target(_params, (_encode(_LOAD), _encode(_PREFILL))),
    "scheduler": Target(_scheduler, (_encode(_LOAD), _encode(_PREFILL))),
    "layout": Target(_layout, (_encode(_LAYOUT.to_dict()),)),
    "placement": Target(_placement, (_encode(_PLACEMENT.to_dict()),)),
    "key_file": Target(
        _key_file, (b"# a remark\nYV9maXJzdF9zZWNyZXRfZm9yX3Rlc3RzXzAxMjM0NTY=\n",), -1
    ),
}

_ODD: Sequence[Any] = (
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**64 - 1, -(2**63), 0.5, 1e308,
    float("nan"), float("inf"), "", "x", "x" * 600, "\0", "\ud7ff", "1", [], [[]], {}, {"": None},
    b"", b"\xff", [None] * 70, list(range(70)), {"a": {"a": {"a": {}}}},
)  # fmt: skip


def mutate(raw: bytes, header_bytes: int, seed: int) -> bytes:
    """A neighbour of ``raw``: one to three values of its body replaced, dropped or repeated.

    An input whose body is no MessagePack comes back as it is.
    """
    known, document = _document(raw[header_bytes:]) if header_bytes >= 0 else (False, None)
    if not known:
        return raw
    chooser = random.Random(seed)
    for _ in range(chooser.randint(1, 3)):
        document = _changed(document, chooser)
    try:
        return raw[:header_bytes] + msgspec.msgpack.encode(document)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return raw


def _changed(value: Any, chooser: random.Random) -> Any:
    """One value somewhere below ``value`` changed."""
    deeper = isinstance(value, dict | list) and len(value) > 0 and chooser.random() < 0.85
    if not deeper:
        return _odd(value, chooser)
    if isinstance(value, dict):
        key = chooser.choice(list(value))
        changed = dict(value)
        action = chooser.random()
        if action < 0.1:
            del changed[key]
        elif action < 0.2:
            changed[str(chooser.choice(_ODD))] = changed[key]
        else:
            changed[key] = _changed(changed[key], chooser)
        return changed
    items = list(value)
    index = chooser.randrange(len(items))
    action = chooser.random()
    if action < 0.1:
        del items[index]
    elif action < 0.2:
        items.insert(index, items[index])
    else:
        items[index] = _changed(items[index], chooser)
    return items


def _odd(value: Any, chooser: random.Random) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and chooser.random() < 0.5:
        return value + chooser.choice((-1, 1, 7, 1 << 16, -value, value))
    if isinstance(value, str) and chooser.random() < 0.3:
        return value + chooser.choice(("x", "\0", "x" * 600, " "))
    return chooser.choice(_ODD)
