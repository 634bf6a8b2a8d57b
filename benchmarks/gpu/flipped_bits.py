"""One wrong bit in P's memory, behind its sums and before D's read: is it caught, and said?

P runs the probe connector of the test kit, which knows its tensors and can flip a bit of a page; D
compares all loads and computes again what it does not take. The bit is the lowest one of the first
byte of the request's last block, in the first layer of a KV-cache group, one group of each kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridpd_testkit.engines import PROBE, Engine, EngineSpec
from hybridpd_testkit.expectations import MAX_TOKENS, random_prompt
from hybridpd_testkit.metrics import Metrics
from hybridpd_testkit.pd_client import (
    Pair,
    evidence,
    leases_held,
    require_nothing_left,
    wait_until,
)
from hybridpd_testkit.probe_orders import ProbeOrders
from hybridpd_testkit.processes import HttpError

CHECKSUMS = "hybridpd_checksums_total"
FAILURES = "hybridpd_load_failures_total"
REASON = "checksum_mismatch"
PROMPT_TOKENS = 150
# "region 3 (backbone.layers.2.mixer), block 17, section ssm units 0-3: expected ..., got ..."
PLACE = re.compile(
    r"region (?P<region>\d+) \((?P<layer>[^)]+)\), block (?P<block>\d+), "
    r"section (?P<section>.+?) units "
)

SameTokens = Callable[[list[int], Sequence[int]], tuple[bool, str]]


def with_probe(specs: Sequence[EngineSpec], folder: Path) -> list[EngineSpec]:
    """P's that can flip bits, and D's that compute again what they refuse."""
    changed = []
    for spec in specs:
        if spec.role == "kv_producer":
            orders = ProbeOrders(folder / f"orders-{spec.name}").environment()
            environment = {**spec.environment, **orders}
            changed.append(replace(spec, connector=PROBE, environment=environment))
        elif spec.role == "kv_consumer":
            changed.append(replace(spec, failure_policy="recompute"))
        else:
            changed.append(spec)
    return changed


def flip_each_kind(pair: Pair, same_tokens: SameTokens) -> list[dict[str, Any]]:
    """A row for each kind of group that P's cache has; ``ok`` says whether all was as it should."""
    try:
        (report,) = pair.prefill.worker_reports()
    except (RuntimeError, OSError, HttpError) as error:
        return [{"flipped": "nothing", "ok": False, "why": repr(error)[:500]}]
    kinds = [group["kind"] for group in report["groups"]]
    rows = []
    for at, kind in enumerate(dict.fromkeys(kinds)):
        prompt = random_prompt(PROMPT_TOKENS, 70 + at)
        try:
            rows.append(flip(pair, kind, kinds.index(kind), prompt, same_tokens))
        except (RuntimeError, OSError, HttpError) as error:  # a timeout too: the rest is told
            rows.append({"flipped": kind, "ok": False, "why": repr(error)[:500]})
    return rows


def flip(
    pair: Pair, kind: str, group: int, prompt: list[int], same_tokens: SameTokens
) -> dict[str, Any]:
    """Prefill, flip, decode; what D answered, counted and logged."""
    before = pair.decode.metrics()
    params = pair.prefill_only(prompt)
    if params is None:
        return {"flipped": kind, "ok": False, "why": "P gave no parameters"}
    wait_until(lambda: leases_held(pair.prefill) == 1, "P holds it, so it was summed")
    block = int(params["remote_block_ids"][group][-1])
    (layer,) = pair.prefill.worker_reports("flip_bit", str(group), str(block))
    answer = pair.decode_only(prompt, params, MAX_TOKENS)
    wait_until(
        lambda: evidence(pair.decode.metrics().since(before)).recomputed == 1,
        "D has computed the request itself",
    )
    growth = pair.decode.metrics().since(before)
    right, why = same_tokens(prompt, answer.tokens)
    require_nothing_left(pair.prefill, pair.decode)
    said = line_about(pair.decode, layer)
    return judged(
        {
            "flipped": kind,
            "layer": layer,
            "counted": compared(growth),
            "failures": int(growth.total(FAILURES, reason=REASON)),
            "recomputed": evidence(growth).recomputed,
            "tokens_right": right,
            **({"why": why} if not right else {}),
            "place": place_in(said),
            "said": said[-400:],
        }
    )


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """The row and whether it shows what it should: one load that was different and nothing of it
    used, and a line that says where."""
    good = (
        row["counted"] == {"different": 1}
        and (row["failures"], row["recomputed"]) == (1, 1)
        and row["tokens_right"]
        and row["place"].get("layer") == row["layer"]
        and REASON in row["said"]
    )
    return {**row, "ok": good}


def compared(growth: Metrics) -> dict[str, int]:
    """Results of checksums that D counted, without those it did not."""
    found: dict[str, int] = {}
    for (name, labels), value in growth.samples.items():
        if name == CHECKSUMS and value:
            result = dict(labels)["result"]
            found[result] = found.get(result, 0) + int(value)
    return found


def line_about(decode: Engine, layer: str) -> str:
    """The last line of D's log that names the layer beside the reason."""
    text = decode.log_path.read_text(errors="replace")
    lines = [line for line in text.splitlines() if REASON in line and layer in line]
    return lines[-1] if lines else ""


def place_in(line: str) -> Mapping[str, str]:
    """Region, layer, D's block and section that a line of its log names."""
    found = PLACE.search(line)
    return found.groupdict() if found else {}
