"""Who reads what: the intersection of two partitions of one section.

The source engine splits a section's units over its ranks, the destination engine over its own.
A destination rank reads, from each source rank, the units both own.  Where the source holds copies
of a unit, one copy is read, and the copies are chosen so that all source ranks share the work.
"""

from dataclasses import dataclass
from typing import NamedTuple

from hybridpd_geometry.sections import Section, owned


@dataclass(frozen=True)
class Segment:
    """`units` units, by their index on the source rank and on the destination rank."""

    source_rank: int
    source_unit: int
    destination_unit: int
    units: int


class Run(NamedTuple):
    """`length` contiguous bytes, as offsets into the source's and the destination's page."""

    source_offset: int
    destination_offset: int
    length: int


def home_rank(source_tp: int, destination_tp: int, destination_rank: int) -> int:
    """The source rank that lies at the same place in its engine as the destination rank in its own.

    With equal TP it is the rank itself.  Preferring it for copies spreads readers over all copies
    and keeps a rank's reads on the sources it must read from anyway.
    """
    return destination_rank * source_tp // destination_tp


def intersect(
    section: Section, source_tp: int, destination_tp: int, destination_rank: int
) -> tuple[Segment, ...]:
    """Segments that together are exactly the units `destination_rank` owns, in unit order."""
    wanted = owned(section, destination_tp, destination_rank)
    home = home_rank(source_tp, destination_tp, destination_rank)
    segments: list[Segment] = []
    unit = wanted.start
    while unit < wanted.stop:
        rank, held = _holder(section, source_tp, unit, home)
        stop = min(held.stop, wanted.stop)
        segments.append(Segment(rank, unit - held.start, unit - wanted.start, stop - unit))
        unit = stop
    return tuple(segments)


def _holder(section: Section, source_tp: int, unit: int, home: int) -> tuple[int, range]:
    """The source rank to read `unit` from, and everything that rank owns of the section."""
    copies = max(1, source_tp // section.extent) if source_tp % section.extent == 0 else 1
    if section.extent % source_tp == 0:
        rank = unit // (section.extent // source_tp)
    elif unit * copies <= home < (unit + 1) * copies:
        rank = home
    else:
        rank = unit * copies + home % copies
    return rank, owned(section, source_tp, rank)


def merge_runs(runs: list[Run]) -> tuple[Run, ...]:
    """Runs in destination order, neighbours that touch on both sides joined into one."""
    merged: list[Run] = []
    for run in sorted(runs, key=lambda item: item.destination_offset):
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.destination_offset + last.length == run.destination_offset
            and last.source_offset + last.length == run.source_offset
        ):
            merged[-1] = Run(last.source_offset, last.destination_offset, last.length + run.length)
        else:
            merged.append(run)
    return tuple(merged)
