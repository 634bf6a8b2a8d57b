"""Drive a load through prefill and decode as a router would, and time what a user waits for."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from pd_gaps import EVENTS, by_place, gaps_of

from hybridpd_testkit.pd_client import PREFILL_PARAMS


@dataclass(frozen=True)
class Load:
    """One measured point. Prompt lengths are uniform in [input/2, input*3/2]."""

    concurrency: int
    requests: int
    input_tokens: int
    output_tokens: int
    seed: int


@dataclass(frozen=True)
class Timing:
    """Seconds of one request. ``hand_over`` is prefill's answer to decode's first token. ``gaps``
    see `pd_gaps`."""

    first_token: float
    hand_over: float | None
    per_token: float
    tokens: int
    events: int
    gaps: dict[str, float]


def prompts_of(load: Load) -> list[list[int]]:
    """Random prompts, the same for the same load."""
    source = random.Random(load.seed)
    low, high = load.input_tokens // 2, load.input_tokens * 3 // 2
    return [
        [source.randrange(3, 250) for _ in range(source.randint(low, high))]
        for _ in range(load.requests)
    ]


async def one_request(
    session: aiohttp.ClientSession, prefill: str | None, decode: str, body: dict[str, Any]
) -> Timing:
    """One request through both engines, or through ``decode`` alone."""
    started, answered = time.perf_counter(), None
    body = dict(body)
    if prefill is not None:
        ask = {**body, "max_tokens": 1, "kv_transfer_params": PREFILL_PARAMS}
        async with session.post(f"{prefill}/v1/completions", json=ask) as response:
            response.raise_for_status()
            body["kv_transfer_params"] = (await response.json())["kv_transfer_params"]
        answered = time.perf_counter()
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    moments: list[float] = []
    count = 0
    async with session.post(f"{decode}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("error"):
                raise RuntimeError(str(event["error"]))
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
            if event.get("choices"):
                moments.append(time.perf_counter())
    first, last = (moments[0], moments[-1]) if moments else (0.0, 0.0)
    hand_over = first - answered if answered is not None else None
    per_token = (last - first) / max(1, count - 1)
    return Timing(first - started, hand_over, per_token, count, len(moments), gaps_of(moments))


async def run_load(prefill: str | None, decode: str | Sequence[str], load: Load) -> dict[str, Any]:
    """Run one point; milliseconds at p50 and p99, tokens per second, failures, client's own CPU.

    Several ``decode`` engines take the requests in turn.
    """
    engines = [decode] if isinstance(decode, str) else list(decode)
    gate = asyncio.Semaphore(load.concurrency)
    timings: list[Timing] = []
    failures: list[str] = []
    timeout = aiohttp.ClientTimeout(total=400)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:

        async def go(index: int, prompt: list[int]) -> None:
            body = {
                "model": "tiny",
                "prompt": prompt,
                "temperature": 0,
                "ignore_eos": True,
                "max_tokens": load.output_tokens,
            }
            async with gate:
                try:
                    target = engines[index % len(engines)]
                    timings.append(await one_request(session, prefill, target, body))
                except (aiohttp.ClientError, RuntimeError, TimeoutError) as error:
                    failures.append(repr(error)[:200])

        prompts = prompts_of(load)
        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(go(*item) for item in enumerate(prompts)))
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    tokens = sum(t.tokens for t in timings)
    gaps = by_place(t.gaps for t in timings)
    return {
        "concurrency": load.concurrency,
        "requests": load.requests,
        "failed": len(failures),
        "why": failures[:2],
        "tokens_per_second": round(tokens / wall, 1),
        "client_cpu_share": round(cpu / wall, 2),
        EVENTS: round(sum(t.events for t in timings) / max(1, tokens), 3),
        **percentiles("ttft", [t.first_token for t in timings]),
        **percentiles("tpot", [t.per_token for t in timings]),
        **percentiles("hand_over", [t.hand_over for t in timings if t.hand_over is not None]),
        **{
            key: ms
            for place, values in gaps.items()
            for key, ms in percentiles(place, values).items()
        },
    }


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds; nothing for no values."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {
        f"{name}_p50_ms": round(1000 * statistics.median(ordered), 2),
        f"{name}_p99_ms": round(1000 * p99, 2),
    }
