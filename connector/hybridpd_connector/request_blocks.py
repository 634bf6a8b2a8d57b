"""Pure helpers of the scheduler half: who we are, whose child a request is, which blocks count."""

import dataclasses
import re
from collections.abc import Sequence

from hybridpd_connector.digest import prompt_digest
from hybridpd_connector.errors import StateError
from hybridpd_connector.metadata import GroupFacts, RequestFacts

# vLLM names the children of a request with n > 1 "<index>_<parent id>".
_CHILD = re.compile(r"\d+_(.+)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Identity:
    """This engine, as its peers address it. ``role``: producer, consumer or both.

    ``checksum_every``: every n-th prefill is summed, 0 for none. ``seal_key``: the secret that
    this process seals its offers with, see ``seals``.
    """

    engine_id: str
    host: str
    port: int
    tp_size: int
    role: str
    lease_seconds: int
    checksum_every: int = 0
    seal_key: bytes = dataclasses.field(default=b"", repr=False)

    @property
    def produces(self) -> bool:
        return self.role in ("producer", "both")

    @property
    def consumes(self) -> bool:
        return self.role in ("consumer", "both")


def parent_of(request_id: str) -> str | None:
    """Id of the request that ``request_id`` is one of n samples of; None for others."""
    if not request_id[:1].isdigit():
        return None
    child = _CHILD.fullmatch(request_id)
    return child[1] if child else None


def state_block(block_ids: Sequence[int], scratch_blocks: int) -> int:
    """The one block of a state group's list that holds the running state.

    Mode "none" ``[m]``, speculation ``[m, s, s]``, mode "align" ``[0, ..., 0, m, s]``: the last
    one before the speculative slots.
    """
    last = len(block_ids) - scratch_blocks - 1
    bearing = block_ids[last if last > 0 else 0] if block_ids else 0
    if bearing <= 0:
        raise StateError("state block", "a block id above 0", list(block_ids)[-4:])
    return bearing


def transfer_blocks(
    groups: Sequence[GroupFacts],
    block_ids: Sequence[Sequence[int]],
    tokens: int,
    *,
    spare: bool = False,
) -> tuple[tuple[int, ...], ...]:
    """The blocks that hold the first ``tokens`` tokens of a request, per group.

    ``block_ids`` is vLLM's list for each transferable group. ``spare`` keeps attention blocks
    behind the tokens: the reader has to zero them, vLLM leaves that to it. ``StateError`` when
    blocks are missing: then nothing of this request may be transferred.
    """
    if len(block_ids) != len(groups):
        raise StateError("block ids", f"{len(groups)} groups", len(block_ids))
    chosen: list[tuple[int, ...]] = []
    for (kind, block_tokens, scratch_blocks), ids in zip(groups, block_ids, strict=True):
        if kind == "state":
            # One block and nothing else is what most requests have: no call for that.
            alone = len(ids) == 1 and ids[0] > 0
            chosen.append((ids[0] if alone else state_block(ids, scratch_blocks),))
            continue
        needed = -(-tokens // block_tokens)
        kept = tuple(ids if spare else ids[:needed])
        if len(kept) < needed or (kept and min(kept) <= 0):
            raise StateError("attention blocks", f"{needed} ids above 0", len(ids))
        chosen.append(kept)
    return tuple(chosen)


def facts_digest(facts: RequestFacts, tokens: int) -> str:
    """Digest of the first ``tokens`` tokens of a prompt and all else its state depends on."""
    return prompt_digest(
        facts.token_ids or (), tokens, facts.lora, facts.multimodal, facts.cache_salt
    )
