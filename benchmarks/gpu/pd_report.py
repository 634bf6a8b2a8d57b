"""Tables of `pd_compare.py`: medians over repeats, their spread, and ratios against in-tree."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

BASE = "in-tree"
OURS = "hybridpd"
COLOCATED = "colocated"

Point = Mapping[str, Any]

# Waits are for a core, of threads that could run. P's stand there where P is asked alone.

# What a row is called, where it stands in a point, its factor, its digits.
ROWS: tuple[tuple[str, tuple[str, ...], float, int], ...] = (
    ("output tokens/s", ("tokens_per_second",), 1, 0),
    ("TTFT p50, ms", ("ttft_p50_ms",), 1, 1),
    ("TTFT p99, ms", ("ttft_p99_ms",), 1, 1),
    ("TPOT p50, ms", ("tpot_p50_ms",), 1, 2),
    ("TPOT p99, ms", ("tpot_p99_ms",), 1, 2),
    ("2nd token p50, ms", ("gap_2_p50_ms",), 1, 2),
    ("3rd token p50, ms", ("gap_3_p50_ms",), 1, 2),
    ("later tokens p50, ms", ("gap_rest_p50_ms",), 1, 2),
    ("longest of these p50, ms", ("gap_most_p50_ms",), 1, 2),
    ("events per token", ("events_per_token",), 1, 3),
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
    ("D's main threads wait, ms/s", ("core_main_wait",), 1e3, 2),
    ("D's main threads run, times/s", ("core_main_turns",), 1, 0),
    ("D's other threads, times/s", ("core_other_turns",), 1, 0),
)


def pairs_of(up: Collection[str]) -> list[str]:
    """Connectors that have both of their engines."""
    names = sorted({name.removesuffix("-kv_producer") for name in up})
    return [name for name in names if {f"{name}-kv_producer", f"{name}-kv_consumer"} <= set(up)]


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


def place_of(point: Point) -> tuple[str, int, int]:
    """Points with the same one are of one table: label, concurrency, busy processes beside."""
    return point.get("label", ""), point["concurrency"], point.get("spin", 0)


def table(points: Sequence[Point]) -> list[str]:
    """One block of lines for each place."""
    lines = []
    for place in sorted({place_of(point) for point in points}):
        here = [point for point in points if place_of(point) == place]
        label, concurrency, spin = place
        requests = {
            name: sum(point["requests"] for point in here if point["connector"] == name)
            for name in (BASE, OURS, COLOCATED)
            if any(point["connector"] == name for point in here)
        }
        beside = f", {spin} busy processes beside" if spin else ""
        title = f"concurrency {concurrency}{beside}, requests {json.dumps(requests)}"
        lines += ["", f"{label}: {title}" if label else title]
        head = f"{'':30}" + "".join(f"{name:>28}" for name in requests)
        lines.append(head + f"{'ours/in-tree':>14}{'repeat by repeat':>26}")
        for row in ROWS:
            lines += row_of(row, here, [*requests])
    failed = sum(point["failed"] for point in points)
    return [*lines, "", f"failed requests: {failed}"]


def row_of(
    row: tuple[str, tuple[str, ...], float, int], here: Sequence[Point], connectors: Sequence[str]
) -> list[str]:
    """The line of one row, none when no point has it."""
    title, names, factor, digits = row
    line, medians = f"{title:30}", {}
    for connector in connectors:
        mine = [p for p in here if p["connector"] == connector]
        values = values_of(mine, names, factor)
        if values:
            medians[connector] = statistics.median(values)
            spread = f"[{min(values):.{digits}f}-{max(values):.{digits}f}]"
            line += f"{medians[connector]:>11.{digits}f} {spread:>16}"
        else:
            line += f"{'-':>28}"
    return [line + ratios(medians, ratios_by_repeat(here, names))] if medians else []


def first_lines(records: Iterable[Point]) -> list[str]:
    """Hand-overs of each pair's first requests, and whether D had met P before them."""
    lines = []
    for record in records:
        if record["kind"] == "first":
            values = ", ".join(f"{ms:.1f}" for ms in record["hand_over_ms"])
            met = f", {record['met_ahead']} P met ahead" if record.get("met_ahead") else ""
            lines.append(
                f"hand-over of the first requests, ms, {record['connector']}{met}: {values}"
            )
    return lines
