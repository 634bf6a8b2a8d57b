"""RankPlacement: where one rank's regions lie in its memory. Addresses only; sizes are layout."""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridpd_geometry.errors import GeometryError
from hybridpd_geometry.fields import Reader

MAX_ADDRESS = (1 << 63) - 1
MAX_BLOCKS = 1 << 31
MAX_REGIONS = 4096


@dataclass(frozen=True)
class RankPlacement:
    """The regions of one rank.

    The page of layer l and block b starts at
    `region_bases[layer_region[l]] + b * block_strides[layer_region[l]]`.
    `num_blocks` counts logical blocks, `device_id` is the GPU (0 for host memory).
    """

    rank: int
    num_blocks: int
    region_bases: tuple[int, ...]
    block_strides: tuple[int, ...]
    layer_region: Mapping[str, int]
    device_id: int = 0

    def to_dict(self) -> dict[str, object]:
        """JSON-able."""
        return {
            "rank": self.rank,
            "num_blocks": self.num_blocks,
            "region_bases": list(self.region_bases),
            "block_strides": list(self.block_strides),
            "layer_region": dict(self.layer_region),
            "device_id": self.device_id,
        }

    @classmethod
    def from_dict(cls, data: object) -> "RankPlacement":
        """Read what a peer sent; GeometryError on anything out of type, range or proportion."""
        reader = Reader(data, "placement")
        placement = cls(
            rank=reader.integer("rank", 0, 1 << 16),
            num_blocks=reader.integer("num_blocks", 1, MAX_BLOCKS),
            region_bases=reader.integers("region_bases", 0, MAX_ADDRESS, MAX_REGIONS),
            block_strides=reader.integers("block_strides", 1, MAX_ADDRESS, MAX_REGIONS),
            layer_region=reader.integer_map("layer_region", 0, MAX_REGIONS - 1, MAX_REGIONS),
            device_id=reader.integer("device_id", 0, 1 << 16),
        )
        reader.done()
        return check_placement(placement)


def check_placement(placement: RankPlacement) -> RankPlacement:
    """Refuse a placement that contradicts itself; returns it unchanged otherwise."""
    regions = len(placement.region_bases)
    if regions == 0:
        raise GeometryError("placement.region_bases", "at least one region", 0)
    if len(placement.block_strides) != regions:
        raise GeometryError(
            "placement.block_strides", f"{regions} strides", len(placement.block_strides)
        )
    for name, region in placement.layer_region.items():
        if not 0 <= region < regions:
            raise GeometryError(
                f"placement.layer_region[{name}]", f"a region below {regions}", region
            )
    for base, stride in zip(placement.region_bases, placement.block_strides, strict=True):
        if base + stride * placement.num_blocks > MAX_ADDRESS:
            raise GeometryError(
                "placement.region_bases",
                "a region below 2**63",
                base + stride * placement.num_blocks,
            )
    return placement
