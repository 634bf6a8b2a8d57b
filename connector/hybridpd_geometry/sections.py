"""Sections: the sharded pieces of a page, and which rank owns what of each.

A section is `extent` units of `unit_bytes` each.  Tensor parallelism splits the units, never the
bytes of one unit: channels of a convolution, heads of an SSM state, KV heads, B/C groups.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hybridpd_geometry.errors import GeometryError


@dataclass(frozen=True)
class Section:
    """A named, sharded piece of a layer's cache.

    `extent`      units over all ranks of a single engine (not per rank)
    `unit_bytes`  bytes of one unit; for attention, of one KV head *and one token*
    `replicates`  with more ranks than units, consecutive ranks may hold copies of one unit
    """

    name: str
    extent: int
    unit_bytes: int
    replicates: bool = False


@dataclass(frozen=True)
class PlacedSection:
    """A section and where its owned units start in every rank's page (bytes from the page start).

    The offset is the same on all ranks of an engine, because all ranks own equally many units.
    """

    section: Section
    page_offset: int


def is_legal(section: Section, tp_size: int) -> bool:
    """Whether `tp_size` ranks can hold `section`."""
    if tp_size < 1:
        return False
    if section.extent % tp_size == 0:
        return True
    return section.replicates and tp_size % section.extent == 0


def owned(section: Section, tp_size: int, rank: int) -> range:
    """The units that `rank` of `tp_size` holds.

    An equal slice where `tp_size` divides the extent.  Where it does not, and the section
    replicates, one unit per rank: `rank * extent // tp_size`, so neighbours share a unit (vLLM's
    rule for KV heads; B/C of Mamba2 replicate only with a single group).
    """
    if not 0 <= rank < tp_size:
        raise GeometryError(f"{section.name}.rank", f"0..{tp_size - 1}", rank)
    if section.extent % tp_size == 0:
        share = section.extent // tp_size
        return range(rank * share, (rank + 1) * share)
    if section.replicates and tp_size % section.extent == 0:
        unit = rank * section.extent // tp_size
        return range(unit, unit + 1)
    also = f" or a multiple of {section.extent}" if section.replicates else ""
    raise GeometryError(
        f"{section.name}.tp_size",
        f"a divisor of {section.extent}{also}",
        tp_size,
        "Choose a tensor-parallel size that divides every sharded dimension.",
    )


def units_per_rank(section: Section, tp_size: int) -> int:
    """How many units each of `tp_size` ranks holds."""
    return len(owned(section, tp_size, 0))


def place(sections: Iterable[Section], tp_size: int) -> tuple[PlacedSection, ...]:
    """Lay `sections` out one behind the other from the start of the page."""
    placed = []
    offset = 0
    for section in sections:
        placed.append(PlacedSection(section, offset))
        offset += units_per_rank(section, tp_size) * section.unit_bytes
    return tuple(placed)


def placed_bytes(placed: Iterable[PlacedSection], tp_size: int) -> int:
    """Bytes from the page start to the end of the last section."""
    ends = (
        item.page_offset + units_per_rank(item.section, tp_size) * item.section.unit_bytes
        for item in placed
    )
    return max(ends, default=0)
