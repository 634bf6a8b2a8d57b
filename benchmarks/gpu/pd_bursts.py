"""What a burst of hand-overs costs the requests that decode is already running.

A few requests decode without a break; now and then several prefilled requests arrive at decode at
once, so that their reads are posted in one step. Told is the longest gap between two tokens of the
running requests in the moment after each burst, beside the same at quiet moments of the same run.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from pd_load import Load, prompts_of

from hybridpd_testkit.pd_client import PREFILL_PARAMS

RUNNING = 4
WINDOW_SECONDS = 0.08
PAUSE_SECONDS = 0.25


@dataclass
class Clock:
    """When tokens of the running requests arrived, and when bursts were sent."""

    arrivals: list[list[float]] = field(default_factory=list)
    bursts: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)


def body_of(prompt: list[int], tokens: int) -> dict[str, Any]:
    """A completion request that generates exactly ``tokens``."""
    return {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": tokens,
    }


async def stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], arrivals: list[float]
) -> None:
    """Run one request and note when its tokens come."""
    async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.content:
            # Not a comprehension: the list must grow while tokens arrive.
            arrivals += [time.perf_counter()] * line.startswith(b"data: {")


async def burst(
    session: aiohttp.ClientSession, urls: tuple[str, str], prompts: list[list[int]], clock: Clock
) -> None:
    """Prefill all prompts, let things calm down, then send all to decode at once."""
    prefill, decode = urls

    async def prefilled(prompt: list[int]) -> dict[str, Any]:
        ask = {**body_of(prompt, 1), "kv_transfer_params": PREFILL_PARAMS}
        async with session.post(f"{prefill}/v1/completions", json=ask) as response:
            response.raise_for_status()
            return {
                **body_of(prompt, 1),
                "kv_transfer_params": (await response.json())["kv_transfer_params"],
            }

    bodies = await asyncio.gather(*(prefilled(prompt) for prompt in prompts))
    await asyncio.sleep(PAUSE_SECONDS)
    clock.quiet.append(time.perf_counter())
    await asyncio.sleep(PAUSE_SECONDS)
    clock.bursts.append(time.perf_counter())
    await asyncio.gather(*(stream(session, decode, body, []) for body in bodies))


async def run_bursts(urls: tuple[str, str], together: int, rounds: int, load: Load) -> dict:
    """Milliseconds: p50 of a gap, and the longest gap after bursts and at quiet moments."""
    clock = Clock()
    tokens = max(200, load.output_tokens)
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=400), connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        done = asyncio.Event()

        async def keep_running(prompt: list[int]) -> None:
            while not done.is_set():
                clock.arrivals.append([])
                await stream(session, urls[1], body_of(prompt[:64], tokens), clock.arrivals[-1])

        prompts = prompts_of(load)
        running = [asyncio.create_task(keep_running(prompt)) for prompt in prompts[:RUNNING]]
        await asyncio.sleep(2 * PAUSE_SECONDS)
        for index in range(rounds):
            some = [prompts[(index * together + at) % len(prompts)] for at in range(together)]
            await burst(session, urls, some, clock)
        done.set()
        await asyncio.gather(*running)
    return summary(clock, together)


def summary(clock: Clock, together: int) -> dict[str, Any]:
    """See ``run_bursts``."""
    gaps = [
        (earlier, later - earlier)
        for arrivals in clock.arrivals
        for earlier, later in itertools.pairwise(arrivals[1:])
    ]

    def longest(moments: list[float]) -> list[float]:
        found = []
        for moment in moments:
            near = [g for at, g in gaps if moment - 0.005 <= at <= moment + WINDOW_SECONDS]
            if near:
                found.append(max(near) * 1000)
        return found

    after, quiet = longest(clock.bursts), longest(clock.quiet)
    if not after or not quiet:
        return {"together": together, "rounds": 0}
    return {
        "together": together,
        "rounds": len(after),
        "gap_p50_ms": round(1000 * statistics.median(gap for _, gap in gaps), 2),
        "longest_gap_quiet_p50_ms": round(statistics.median(quiet), 2),
        "longest_gap_burst_p50_ms": round(statistics.median(after), 2),
        "added_p50_ms": round(statistics.median(after) - statistics.median(quiet), 2),
    }
