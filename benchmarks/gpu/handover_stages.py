"""Where the time of a hand-over goes, stage by stage, for both connectors.

Wants engines that `pd_compare.py start --trace DIRECTORY` brought up on this machine: their
connectors note when vLLM makes which call (`hybridpd_testkit.trace_connector`). Requests are sent
as a router would; the client's own times close the chain at both ends:

    P finished      P's engine core ends the prefill and builds the answer      (P, connector call)
    answer          the client has P's answer                                   (client)
    arrived         D's engine core has the request                             (D, connector call)
    scheduled       blocks are allocated and the load is ordered                (D, connector call)
    post begun      the worker starts to post, the model has been launched      (D, connector call)
    posted          all reads of the step are posted                            (D, connector call)
    noticed         the worker's look that finds the load ended                 (D, connector call)
    reported        the scheduler hears of it                                   (D, connector call)
    first step      the first step that runs the request is scheduled           (D, connector call)
    first token     the client has the first token                              (client)

    export PYTHONPATH=SITE:connector:connector/testkit
    python benchmarks/gpu/handover_stages.py --trace DIRECTORY --concurrency 1,8,32
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from pd_load import Load, prompts_of

from hybridpd_testkit.pd_client import PREFILL_PARAMS

# Stage, the event it begins with, the event it ends with, whose time it is.
STAGES = (
    ("P's engine core to client (HTTP, JSON)", "P answered", "answer", "vLLM"),
    ("client to D's engine core (HTTP, JSON)", "answer", "arrived", "vLLM"),
    ("waiting to be scheduled", "arrived", "scheduled", "vLLM"),
    ("launch of the step's model", "scheduled", "post begun", "vLLM"),
    ("posting", "post begun", "posted", "connector"),
    ("copy, until noticed", "posted", "noticed", "connector"),
    ("step's end, until reported", "noticed", "reported", "vLLM"),
    ("admission, until its first step", "reported", "first step", "vLLM"),
    ("first step, until the client has a token", "first step", "first token", "vLLM"),
    ("hand-over", "answer", "first token", ""),
)
MARK = "stage-"


async def one(
    session: aiohttp.ClientSession, urls: tuple[str, str], prompt: list[int], name: str, tokens: int
) -> dict[str, float]:
    """One request through both engines; the client's own moments."""
    body: dict[str, Any] = {
        "model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True,
        "max_tokens": tokens,
    }  # fmt: skip
    headers = {"X-Request-Id": name}
    ask = {**body, "max_tokens": 1, "kv_transfer_params": PREFILL_PARAMS}
    async with session.post(f"{urls[0]}/v1/completions", json=ask, headers=headers) as response:
        response.raise_for_status()
        body["kv_transfer_params"] = (await response.json())["kv_transfer_params"]
    moments = {"answer": time.monotonic()}
    body["stream"] = True
    async with session.post(f"{urls[1]}/v1/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {") and "first token" not in moments:
                moments["first token"] = time.monotonic()
    return moments


async def drive(urls: tuple[str, str], load: Load, prefix: str) -> dict[str, dict[str, float]]:
    """All requests of a load; the client's moments by request name."""
    gate, found = asyncio.Semaphore(load.concurrency), dict[str, dict[str, float]]()
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=400), connector=aiohttp.TCPConnector(limit=0)
    ) as session:

        async def go(index: int, prompt: list[int]) -> None:
            name = f"{prefix}{index}x"
            async with gate:
                try:
                    found[name] = await one(session, urls, prompt, name, load.output_tokens)
                except (aiohttp.ClientError, TimeoutError) as error:
                    print(f"{name}: {error!r}"[:200], file=sys.stderr)

        await asyncio.gather(*(go(*item) for item in enumerate(prompts_of(load))))
    return found


def read_trace(folder: Path) -> dict[tuple[str, str], float]:
    """(request id, event) -> seconds; the last rank's for what ranks do, else the first line's."""
    found: dict[tuple[str, str], float] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            event, request_id, seconds = json.loads(line)
            key = request_id, event
            late = event in ("posted", "noticed")
            found[key] = (max if late else min)(seconds, found.get(key, seconds))
    return found


def joined(
    client: dict[str, dict[str, float]], trace: dict[tuple[str, str], float]
) -> list[dict[str, float]]:
    """The moments of each request, client's and engines' together."""
    by_name: dict[str, dict[str, float]] = {name: dict(own) for name, own in client.items()}
    for (request_id, event), seconds in trace.items():
        at = request_id.find(MARK)
        name = request_id[at : request_id.find("x", at) + 1] if at >= 0 else ""
        if name in by_name:
            by_name[name]["P answered" if event == "answered" else event] = seconds
    return list(by_name.values())


def print_table(title: str, requests: list[dict[str, float]]) -> None:
    """p50 and p99 of every stage, in milliseconds."""
    print(f"\n{title}, {len(requests)} requests")
    print(f"{'stage':<44}{'p50 ms':>9}{'p99 ms':>9}{'seen':>6}  whose")
    for name, begin, end, whose in STAGES:
        values = sorted(
            1000 * (moments[end] - moments[begin])
            for moments in requests
            if begin in moments and end in moments
        )
        if not values:
            print(f"{name:<44}{'-':>9}{'-':>9}{0:>6}  {whose}")
            continue
        p99 = values[min(len(values) - 1, int(0.99 * len(values)))]
        print(
            f"{name:<44}{statistics.median(values):>9.2f}{p99:>9.2f}{len(values):>6}  {whose}",
            flush=True,
        )


def main() -> int:
    """Drive both connectors and print a table for each concurrency."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="the directory given to start")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "pd-compare")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--requests", type=int, default=100, help="per point, at least")
    parser.add_argument("--input", type=int, default=2000)
    parser.add_argument("--output", type=int, default=64)
    options = parser.parse_args()
    engines = json.loads((options.out / "engines.json").read_text())["engines"]
    names = dict.fromkeys(name.rsplit("-kv_", 1)[0] for name in engines)
    for concurrency in (int(part) for part in options.concurrency.split(",")):
        for name in names:
            urls = engines[f"{name}-kv_producer"]["url"], engines[f"{name}-kv_consumer"]["url"]
            warm = Load(concurrency, 2 * concurrency, options.input, 4, 3)
            asyncio.run(drive(urls, warm, "warm-"))
            requests = max(options.requests, 3 * concurrency)
            load = Load(concurrency, requests, options.input, options.output, 500 + concurrency)
            prefix = f"{MARK}{name}-{concurrency}-{time.monotonic_ns()}-"
            client = asyncio.run(drive(urls, load, prefix))
            time.sleep(0.5)
            found = joined(client, read_trace(options.trace))
            print_table(f"{name}, concurrency {concurrency}", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
