"""Bytes and descriptors of one request: ours, vLLM's own connector's, and what is needed.

For every published model at every TP size its dimensions allow, equal TP on both sides, for one
decode rank. Ours is counted from the ranges that are posted, in-tree's from vLLM's own descriptor
code (`intree.py`), the ideal from the model's dimensions alone. Pairs of unequal TP follow, for
ours only. Exit status 2 when a goal is missed: bytes = ideal, and below in-tree in every row.

    python benchmarks/transfer_costs.py [--tokens 1000,2000]
"""

from __future__ import annotations

import argparse
import sys

from hybridpd_connector.request_ranges import RequestRanges
from hybridpd_geometry import GeometryError, ReadRequest, build_table, plan_pair
from intree import InTree, NotCarriedError
from shapes import Shape, published, shape_of

UNEQUAL = ((1, 2), (2, 1), (2, 4), (4, 2), (2, 8), (8, 2))
LINE = "{:<28}{:>6}{:>8}{:>12}{:>12}{:>12}{:>9}{:>8}{:>9}{:>8}{:>8}"


def ours(source: Shape, destination: Shape, tokens: int) -> tuple[int, int]:
    """(bytes, descriptors) that rank 0 of ``destination`` posts, over all its sources."""
    plan = plan_pair(source.layout, destination.layout, 0)
    request = ReadRequest(tokens, source.blocks(tokens), destination.blocks(tokens, first=2))
    local = destination.placement(0, destination.blocks_needed(tokens) + 2)
    moved = descriptors = 0
    for rank in plan.sources:
        remote = source.placement(rank, source.blocks_needed(tokens) + 2, first=1 << 44)
        table = build_table(plan, rank, local, remote)
        ranges, size = RequestRanges(table).of(request)
        moved += size
        descriptors += len(ranges)
    return moved, descriptors


def in_tree(shape: Shape, tokens: int) -> tuple[int, int] | str:
    """(bytes, descriptors) of vLLM's connector, or why it does not carry the model."""
    try:
        connector = InTree(shape, shape.blocks_needed(tokens) + 2)
    except NotCarriedError as error:
        return str(error)
    lengths = connector.lists(1 << 32)[:, 1]
    ids = connector.ids(shape.blocks(tokens))
    return int(lengths[ids].sum()), len(ids)


def equal_rows(tokens: int) -> int:
    """Print every model at equal TP; how many rows miss a goal."""
    missed = 0
    for shape in published():
        ideal = shape.ideal_bytes(tokens)
        moved, descriptors = ours(shape, shape, tokens)
        theirs = in_tree(shape, tokens)
        cells, misses = ["-", "-", "-", "-"], moved != ideal
        if not isinstance(theirs, str):
            their_bytes, their_descriptors = theirs
            cells = [
                f"{their_bytes / 1e6:.2f}",
                f"{moved / their_bytes:.3f}",
                f"{their_descriptors}",
                f"{descriptors / their_descriptors:.3f}",
            ]
            misses |= not (moved < their_bytes and descriptors < their_descriptors)
        missed += misses
        line = LINE.format(
            shape.name, shape.tp_size, tokens,
            f"{ideal / 1e6:.2f}", f"{moved / 1e6:.2f}", cells[0],
            f"{moved / ideal:.3f}", cells[1], descriptors, cells[2], cells[3],
        )  # fmt: skip
        print(line + ("  missed" if misses else ""))
    return missed


def unequal_rows(tokens: int) -> int:
    """Print pairs of unequal TP; how many rows move more than is needed."""
    missed = 0
    for name in dict.fromkeys(shape.name for shape in published()):
        for source_tp, destination_tp in UNEQUAL:
            try:
                source, destination = shape_of(name, source_tp), shape_of(name, destination_tp)
                moved, descriptors = ours(source, destination, tokens)
            except GeometryError:
                continue
            ideal = destination.ideal_bytes(tokens)
            missed += moved != ideal
            print(
                f"{name:<28}{source_tp:>3} ->{destination_tp:>2}{tokens:>8}"
                f"{ideal / 1e6:>12.2f}{moved / 1e6:>12.2f}{moved / ideal:>9.3f}{descriptors:>9}"
            )
    return missed


def main() -> int:
    """Print both tables and whether the goals hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1000,3000")
    lengths = [int(part) for part in parser.parse_args().tokens.split(",")]
    missed = 0
    print("equal TP, one decode rank; MB, and descriptors after joining")
    print(
        LINE.format("model", "TP", "tokens", "ideal MB", "ours MB", "in-tree MB",
                    "/ideal", "/tree", "descr.", "in-tree", "/tree")
    )  # fmt: skip
    for tokens in lengths:
        missed += equal_rows(tokens)
    print("\nunequal TP, decode rank 0, ours")
    head = f"{'model':<28}{'TP':>8}{'tokens':>8}{'ideal MB':>12}{'ours MB':>12}"
    print(f"{head}{'/ideal':>9}{'descr.':>9}")
    missed += unequal_rows(lengths[0])
    print(f"\nrows that miss a goal (bytes = ideal, both below in-tree): {missed}")
    return 2 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
