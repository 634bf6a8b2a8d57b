"""Published models as the benchmarks use them: caches, placements and requests without an engine.

GPU engines: bfloat16, K and V packed per token, blocks aligned to 16 tokens, which is what an
engine on H200 uses (its kernels take the cache's own block).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridpd_geometry import (
    CacheLayout,
    EngineFacts,
    EngineGeometry,
    GeometryError,
    ModelFacts,
    RankPlacement,
    RequestBlocks,
    facts_from_config,
    layout_of,
    plan_engine,
)
from hybridpd_operator.catalogue import entries

TP_SIZES = (1, 2, 4, 8)
NANO = "Nemotron-3-Nano-30B-A3B"


@dataclass(frozen=True)
class Shape:
    """One published model on one TP size."""

    name: str
    model: ModelFacts
    geometry: EngineGeometry
    layout: CacheLayout

    @property
    def tp_size(self) -> int:
        """Ranks of the engine."""
        return self.geometry.tp_size

    def ideal_bytes(self, tokens: int) -> int:
        """What one rank must be given: its real state, and the tokens of its heads."""
        geometry, model = self.geometry, self.model
        return (
            len(model.state_layers) * geometry.state_bytes
            + len(model.attention_layers) * tokens * geometry.token_bytes
        )

    def placement(self, rank: int, blocks: int, first: int = 1 << 32) -> RankPlacement:
        """Regions one behind the other from address ``first``."""
        page = self.geometry.page_bytes
        regions = self.geometry.region_count
        return RankPlacement(
            rank=rank,
            num_blocks=blocks,
            region_bases=tuple(first + at * blocks * page for at in range(regions)),
            block_strides=(page,) * regions,
            layer_region={layer.name: layer.slot for layer in self.layout.layers},
        )

    def blocks(self, tokens: int, first: int = 1, step: int = 2) -> RequestBlocks:
        """Block ids of a request, ``step`` apart as in a cache that has been used for a while."""
        found, block = [], first
        for kind in self.layout.group_kinds:
            count = -(-tokens // self.layout.block_tokens) if kind == "attention" else 1
            found.append(tuple(range(block, block + count * step, step)))
            block += count * step
        return RequestBlocks(tuple(found))

    def blocks_needed(self, tokens: int) -> int:
        """Blocks of a cache that holds what ``blocks`` names."""
        return 2 + max(max(group) for group in self.blocks(tokens).groups if group)


def shape_of(name: str, tp_size: int) -> Shape:
    """A model of the catalogue; GeometryError when its dimensions do not allow the TP size."""
    entry = next(entry for entry in entries() if entry.name == name)
    model = facts_from_config(entry.config)
    facts = EngineFacts(tp_size=tp_size)
    layout = layout_of(model, facts, name, vllm_version="0.32.0")
    return Shape(name, model, plan_engine(model, facts), layout)


def published() -> Iterator[Shape]:
    """Every model of the catalogue at every TP size that its dimensions allow."""
    for entry in entries():
        for tp_size in TP_SIZES:
            try:
                yield shape_of(entry.name, tp_size)
            except GeometryError:
                continue
