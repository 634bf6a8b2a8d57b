"""Bursts of hand-overs beside requests that decode is already running.

A few requests decode without a break; now and then several prefilled requests arrive at decode at
once, so that reads of several are posted in one step. What these steps last is told by the engine's
own lines (`hybridpd_testkit.decode_steps`), not by a client, who sees tokens through two servers.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import aiohttp
from pd_load import Load, prompts_of

from hybridpd_testkit.pd_client import PREFILL_PARAMS

RUNNING = 4
RUNNING_PROMPT = 64
# So many that hardly any of them ends, and is begun anew with a prefill, while bursts come.
RUNNING_TOKENS = 2000
PAUSE_SECONDS = 0.1


def body_of(prompt: list[int], tokens: int) -> dict[str, Any]:
    """A completion request that generates exactly ``tokens``."""
    return {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": tokens,
    }


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], name: str) -> Any:
    """One request, to its end."""
    headers = {"X-Request-Id": name}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        return await response.json()


async def burst(
    session: aiohttp.ClientSession, urls: tuple[str, str], prompts: list[list[int]], prefix: str
) -> None:
    """Prefill all prompts, let things calm down, then send all to decode at once."""
    prefill, decode = urls

    async def prefilled(prompt: list[int], name: str) -> dict[str, Any]:
        body = {**body_of(prompt, 1), "kv_transfer_params": PREFILL_PARAMS}
        answer = await ask(session, prefill, body, name)
        return {**body_of(prompt, 1), "kv_transfer_params": answer["kv_transfer_params"]}

    names = [f"{prefix}{index}x" for index in range(len(prompts))]
    bodies = await asyncio.gather(*map(prefilled, prompts, names))
    await asyncio.sleep(PAUSE_SECONDS)
    await asyncio.gather(*(ask(session, decode, *item) for item in zip(bodies, names, strict=True)))


async def run_bursts(urls: tuple[str, str], prefix: str, rounds: int, load: Load) -> None:
    """``load.concurrency`` requests at once, ``rounds`` times; ids of all begin with ``prefix``."""
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=400), connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        prompts = prompts_of(load)

        async def keep_running(prompt: list[int], name: str) -> None:
            body = body_of(prompt[:RUNNING_PROMPT], RUNNING_TOKENS)
            for turn in itertools.count():
                await ask(session, urls[1], body, f"{name}{turn}x")

        running = [
            asyncio.create_task(keep_running(prompts[index % len(prompts)], f"{prefix}run{index}-"))
            for index in range(RUNNING)
        ]
        try:
            await asyncio.sleep(2 * PAUSE_SECONDS)
            for index in range(rounds):
                together = load.concurrency
                some = [prompts[(index * together + at) % len(prompts)] for at in range(together)]
                await burst(session, urls, some, f"{prefix}{index}-")
                for task in running:
                    if task.done():  # it failed: bursts would run beside nothing
                        task.result()
        finally:
            # The engine ends a request whose client has gone.
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
