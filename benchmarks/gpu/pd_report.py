"""Tables of `pd_compare.py`: medians over repeats, their spread, and ratios against in-tree."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BASE = "in-tree"
OURS = "hybridpd"
COLOCATED = "colocated"

Point = Mapping[str, Any]

# What a row is called, where it stands in a point, its factor, its digits.
ROWS: tuple[tuple[str, tuple[str, ...], float, int], ...] = (
    ("output tokens/s", ("tokens_per_second",), 1, 0),
    ("TTFT p50, ms", ("ttft_p50_ms",), 1, 1),
    ("TTFT p99, ms", ("ttft_p99_ms",), 1, 1),
    ("TPOT p50, ms", ("tpot_p50_ms",), 1, 2),
    ("TPOT p99, ms", ("tpot_p99_ms",), 1, 2),
    ("hand-over p50, ms", ("hand_over_p50_ms",), 1, 2),
    ("hand-over p99, ms", ("hand_over_p99_ms",), 1, 2),
    ("MB per request", ("hybridpd_read_bytes_total", "vllm:nixl_bytes_transferred_sum"), 1e-6, 2),
    ("descriptors", ("hybridpd_read_descriptors_total", "vllm:nixl_num_descriptors_sum"), 1, 1),
    ("post, ms", ("hybridpd_post_seconds_sum", "vllm:nixl_post_time_seconds_sum"), 1e3, 3),
    (
        "post to noticed, ms",
        ("hybridpd_until_noticed_seconds_sum", "vllm:nixl_xfer_time_seconds_sum"),
        1e3,
        3,
    ),
    ("arrival to post, ms", ("hybridpd_queue_seconds_sum",), 1e3, 3),
    ("client CPU, cores", ("client_cpu_share",), 1, 2),
    ("API server CPU of D, cores", ("decode_api_cpu",), 1, 2),
    ("engine core CPU of D, cores", ("decode_core_cpu",), 1, 2),
    ("API server CPU of P, cores", ("prefill_api_cpu",), 1, 2),
)


def values_of(points: Iterable[Point], names: Sequence[str], factor: float) -> list[float]:
    """One value for each point that has one."""
    found = []
    for point in points:
        flat = {**point, **point.get("per_request", {})}
        found += [flat[name] * factor for name in names if name in flat]
    return found


def ratios_by_repeat(points: Iterable[Point], names: Sequence[str]) -> list[float]:
    """Ours to in-tree of each repeat that has both: the two ran one after the other, so that a
    machine that changes slowly does not stand between them."""
    found: dict[str, dict[int, float]] = {BASE: {}, OURS: {}}
    for point in points:
        values = values_of([point], names, 1)
        if point["connector"] in found and values:
            found[point["connector"]][point["repeat"]] = values[0]
    both = sorted(found[BASE].keys() & found[OURS].keys())
    return [found[OURS][repeat] / found[BASE][repeat] for repeat in both if found[BASE][repeat]]


def ratios(medians: Mapping[str, float], by_repeat: Sequence[float]) -> str:
    """Of the medians, and the median and range of those of each repeat."""
    if not medians.get(BASE) or not by_repeat:
        return ""
    spread = f"{statistics.median(by_repeat):.3f} [{min(by_repeat):.3f}-{max(by_repeat):.3f}]"
    return f"{medians[OURS] / medians[BASE]:>14.3f}{spread:>26}"


def table(points: Sequence[Point]) -> list[str]:
    """One block of lines per concurrency."""
    lines = []
    for concurrency in sorted({point["concurrency"] for point in points}):
        here = [point for point in points if point["concurrency"] == concurrency]
        requests = {
            name: sum(point["requests"] for point in here if point["connector"] == name)
            for name in (BASE, OURS, COLOCATED)
            if any(point["connector"] == name for point in here)
        }
        lines += ["", f"concurrency {concurrency}, requests {json.dumps(requests)}"]
        head = f"{'':30}" + "".join(f"{name:>28}" for name in requests)
        lines.append(head + f"{'ours/in-tree':>14}{'repeat by repeat':>26}")
        for title, names, factor, digits in ROWS:
            line, medians = f"{title:30}", {}
            for connector in requests:
                mine = [p for p in here if p["connector"] == connector]
                values = values_of(mine, names, factor)
                if values:
                    medians[connector] = statistics.median(values)
                    spread = f"[{min(values):.{digits}f}-{max(values):.{digits}f}]"
                    line += f"{medians[connector]:>11.{digits}f} {spread:>16}"
                else:
                    line += f"{'-':>28}"
            if medians:
                lines.append(line + ratios(medians, ratios_by_repeat(here, names)))
    failed = sum(point["failed"] for point in points)
    return [*lines, "", f"failed requests: {failed}"]


def other_lines(records: Iterable[Point]) -> list[str]:
    """First requests and bursts: medians over repeats per connector."""
    lines = []
    for record in records:
        if record["kind"] == "first":
            values = ", ".join(f"{ms:.1f}" for ms in record["hand_over_ms"])
            lines.append(f"hand-over of the first requests, ms, {record['connector']}: {values}")
    grouped: dict[tuple[str, int], list[Point]] = {}
    for record in records:
        if record["kind"] == "burst" and record["rounds"]:
            grouped.setdefault((record["connector"], record["together"]), []).append(record)
    for (name, together), found in sorted(grouped.items(), key=lambda item: item[0][1]):
        cells = []
        for key in ("longest_gap_quiet_p50_ms", "longest_gap_burst_p50_ms", "added_p50_ms"):
            values = [record[key] for record in found]
            cells.append(
                f"{key} {statistics.median(values):.2f} [{min(values):.2f}-{max(values):.2f}]"
            )
        lines.append(f"{together} at once, {name}: " + ", ".join(cells))
    return lines
