"""Blocks that a read may still write into, kept from everybody when their request goes on without.

A read that is posted cannot be stopped (ADR 8). When it outlasts its deadline, its request need not
wait for it, but its blocks must:

    a rank says "late" -> hold -> every rank is told to abandon the load, and reports it as failed
    every rank has said "landed": nothing of the load is in flight on it -> the blocks are free

vLLM frees the blocks of a failed load as it always does, and computes the prompt again in others or
ends the request. A block is free when nobody counts on it: holding is one more reference to each.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class BlockPool(Protocol):
    """What is used of vLLM's pool of blocks: a reference more, a reference less."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


class HeldBlocks:
    """See the module. ``ranks``: how many ranks read; each says once that a load has landed."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._pool: BlockPool | None = None
        self._held: dict[str, tuple[int, ...]] = {}
        self._flying: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"HeldBlocks(requests={len(self._held)}, blocks={self.count})"

    @property
    def count(self) -> int:
        """Blocks that are held."""
        return sum(map(len, self._held.values())) if self._held else 0

    def bind(self, pool: BlockPool) -> None:
        """vLLM has made its pool. Before that nothing can be held, and nothing is loaded."""
        self._pool = pool

    def hold(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> bool:
        """Keep the blocks of a load (per group; 0 is nobody's) until all ranks have landed.

        False when that cannot be done: then its request has to wait for the read.
        """
        if self._pool is None or request_id in self._held:
            return False
        ids = tuple(dict.fromkeys(block for group in block_ids for block in group if block > 0))
        self._pool.touch([self._pool.blocks[block] for block in ids])
        self._held[request_id], self._flying[request_id] = ids, self._ranks
        logger.warning(
            "request %s goes on without its load: %d blocks are held until the read has ended",
            request_id,
            len(ids),
        )
        return True

    def landed(self, counts: Mapping[str, int]) -> None:
        """So many more ranks have nothing of these loads in flight."""
        for request_id, ranks in counts.items():
            if request_id not in self._held or self._pool is None:
                logger.error("request %s has landed, and no block of it was held", request_id)
                continue
            self._flying[request_id] -= ranks
            if self._flying[request_id] <= 0:
                del self._flying[request_id]
                ids = self._held.pop(request_id)
                self._pool.free_blocks([self._pool.blocks[block] for block in reversed(ids)])
                logger.info("the late read of request %s has ended", request_id)
