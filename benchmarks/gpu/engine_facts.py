"""What a running engine's cache is made of, beside what geometry computes for it.

The block of a hybrid model follows from its state and from an alignment, which is the smallest
kernel block of the engine's attention backend or the platform's default block, whichever is
larger. The engine is asked; geometry is asked at every alignment that engines use, so that the one
that this engine has stands in the line.
"""

from __future__ import annotations

import json
from typing import Any

from hybridpd_geometry import (
    EngineFacts,
    EngineGeometry,
    GeometryError,
    facts_from_config,
    plan_engine,
)
from hybridpd_testkit.engines import Engine

ALIGNMENTS = (16, 32, 64, 128)
SETTINGS = ("kv_dtype", "conv_dtype", "ssm_dtype", "conv_layout", "spec_tokens", "packing")


def engine_facts(engine: Engine) -> dict[str, Any]:
    """One engine that runs the shipped connector; ``matches``: geometry's pages are its pages.

    ``told``: by the engine. ``predicted``: geometry's at the smallest alignment that gives the
    engine's block, else at the first of ``ALIGNMENTS``. ``alignments``: all that give it.
    """
    reports = engine.worker_reports("report_geometry")
    told = reports[0]
    layout = told["layout"]
    if not layout:
        return {"engine": engine.spec.name, "told": _short(told), "matches": None}
    try:
        return {"engine": engine.spec.name, "tp": engine.spec.tp_size, **_beside(engine, reports)}
    except GeometryError as error:
        return {"engine": engine.spec.name, "matches": False, "error": str(error)}


def _beside(engine: Engine, reports: list[dict[str, Any]]) -> dict[str, Any]:
    told = reports[0]
    layout = told["layout"]
    planned = {alignment: _plan(engine, layout, alignment) for alignment in ALIGNMENTS}
    same = [at for at, plan in planned.items() if plan.block_tokens == layout["block_tokens"]]
    plan = planned[same[0] if same else ALIGNMENTS[0]]
    predicted = {
        "block_tokens": plan.block_tokens,
        "kernel_block_tokens": plan.kernel_block_tokens,
        "page_bytes": plan.page_bytes,
    }
    found = {name: layout[name] for name in predicted}
    one_kind = all(report["layout"] == layout for report in reports)
    return {
        "told": {**_short(told), **found},
        "predicted": predicted,
        "alignments": same,
        "matches": one_kind and predicted == found and told["page_bytes"] == [plan.page_bytes],
    }


def _short(told: dict[str, Any]) -> dict[str, Any]:
    return {name: told[name] for name in ("block_tokens", "page_bytes", "smallest_kernel_blocks")}


def _plan(engine: Engine, layout: dict[str, Any], alignment: int) -> EngineGeometry:
    """With the engine's settings and kernel block, which are no geometry of ours."""
    config = json.loads((engine.spec.checkpoint / "config.json").read_text())
    asked = _asked_block(engine.spec.server_arguments(0))
    return plan_engine(
        facts_from_config(config),
        EngineFacts(
            engine.spec.tp_size,
            block_size=asked,
            kernel_block_tokens=_kernel_block(layout),
            alignment_tokens=alignment,
            **{name: layout[name] for name in SETTINGS},
        ),
    )


def _kernel_block(layout: dict[str, Any]) -> int | None:
    whole = layout["kernel_block_tokens"] == layout["block_tokens"]
    return None if whole else layout["kernel_block_tokens"]


def _asked_block(arguments: list[str]) -> int | None:
    name = "--block-size"
    return int(arguments[arguments.index(name) + 1]) if name in arguments else None
