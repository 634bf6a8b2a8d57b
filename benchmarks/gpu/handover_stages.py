"""Where the time of a hand-over goes, stage by stage, for both connectors.

Wants engines that `pd_compare.py start --trace DIRECTORY` brought up on this machine: their
connectors note when vLLM makes which call (`hybridpd_testkit.trace_connector`). Requests are sent
as a router would; the client's own times close the chain at both ends:

    P finished      P's engine core ends the prefill and builds the answer      (P, connector call)
    answer          the client has P's answer                                   (client)
    arrived         D's engine core has the request                             (D, connector call)
    taken           the connector has looked at its parameters                  (D, connector call)
    scheduled       blocks are allocated and the load is ordered                (D, connector call)
    post begun      the worker starts to post, the model has been launched      (D, connector call)
    posted          all reads of the step are posted                            (D, connector call)
    noticed         the worker's look that finds the load ended                 (D, connector call)
    reported        the scheduler hears of it                                   (D, connector call)
    first step      the first step that runs the request is scheduled           (D, connector call)
    first token     the client has the first token                              (client)

Beside the stages: what the engine's decode steps last, with and without reads in them, and what the
connectors' own calls take in a step (`hybridpd_testkit.decode_steps`); the client's time per token
of the same requests; and, from some more requests of our connector only, the parts of its "posting"
(`hybridpd_testkit.posting_parts`). Connectors take turns, `--passes` times. With `--bursts` several
prefilled requests come to decode at once while others run there: steps that post many reads.

    export PYTHONPATH=SITE:connector:connector/testkit
    python benchmarks/gpu/handover_stages.py --trace DIRECTORY --concurrency 1,8,32
    python benchmarks/gpu/handover_stages.py --trace DIRECTORY --concurrency "" --bursts 8
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
from pd_bursts import run_bursts
from pd_gaps import TITLES, gaps_of
from pd_load import Load, prompts_of
from pd_report import BASE, OURS

from hybridpd_testkit.decode_steps import (
    Seen,
    calls_table,
    head,
    line_of,
    percentile,
    places_table,
    seen_in,
    steps_table,
)
from hybridpd_testkit.pd_client import PREFILL_PARAMS
from hybridpd_testkit.posting_parts import cost_of_a_part, parts_table
from hybridpd_testkit.trace_lines import cost_of_a_line, read_lines
from hybridpd_testkit.tracing import PARTS_MARK

# Stage, the event it begins with, the event it ends with, whose time it is.
STAGES = (
    ("P's engine core to client (HTTP, JSON)", "P answered", "answer", "vLLM"),
    ("client to D's engine core (HTTP, JSON)", "answer", "arrived", "vLLM"),
    ("arrival, in the connector", "arrived", "taken", "connector"),
    ("waiting to be scheduled", "taken", "scheduled", "vLLM"),
    ("launch of the step's model", "scheduled", "post begun", "vLLM"),
    ("posting", "post begun", "posted", "connector"),
    ("copy, until noticed", "posted", "noticed", "connector"),
    ("step's end, until reported", "noticed", "reported", "vLLM"),
    ("admission, until its first step", "reported", "first step", "vLLM"),
    ("first step, until the client has a token", "first step", "first token", "vLLM"),
    ("hand-over", "answer", "first token", ""),
)
EVENTS = {"answered": "P answered"}
MARK = "stage-"
WHO = {BASE: "TracedUpstream", OURS: "TracedHybrid"}
PARTS_REQUESTS = 30

Moments = dict[str, float]
"""Event -> seconds of one request; "per token" and those of `pd_gaps` are durations."""

Stretch = tuple[float, float]


async def one(
    session: aiohttp.ClientSession, urls: tuple[str, str], prompt: list[int], name: str, tokens: int
) -> Moments:
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
    body["stream"], times = True, list[float]()
    async with session.post(f"{urls[1]}/v1/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
    if not times:
        raise aiohttp.ClientPayloadError("an answer without a token")
    moments["first token"] = times[0]
    moments["per token"] = (times[-1] - times[0]) / max(1, tokens - 1)
    return moments | gaps_of(times)


async def drive(urls: tuple[str, str], load: Load, prefix: str) -> dict[str, Moments]:
    """All requests of a load; the client's moments by request name."""
    gate, found = asyncio.Semaphore(load.concurrency), dict[str, Moments]()
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


def joined(client: dict[str, Moments], lines: list[list[Any]]) -> list[Moments]:
    """The moments of each request, client's and engines' together: of what ranks do the last one's,
    else the first line's."""
    by_name: dict[str, Moments] = {name: dict(own) for name, own in client.items()}
    for noted, request_id, *rest in lines:
        if not isinstance(request_id, str):
            continue
        at = request_id.find(MARK)
        name = request_id[at : request_id.find("x", at) + 1] if at >= 0 else ""
        if name in by_name:
            event, own, seconds = EVENTS.get(noted, noted), by_name[name], rest[0]
            late = event in ("posted", "noticed")
            own[event] = (max if late else min)(seconds, own.get(event, seconds))
    return list(by_name.values())


def stages_table(title: str, requests: list[Moments]) -> list[str]:
    """p50 and p99 of every stage, in milliseconds."""
    lines = [f"\n{title}, {len(requests)} requests"]
    lines.append(f"{'stage':<44}{'p50 ms':>9}{'p99 ms':>9}{'seen':>6}  whose")
    for name, begin, end, whose in STAGES:
        values = [
            1000 * (moments[end] - moments[begin])
            for moments in requests
            if begin in moments and end in moments
        ]
        if not values:
            lines.append(f"{name:<44}{'-':>9}{'-':>9}{0:>6}  {whose}")
            continue
        p50, p99 = statistics.median(values), percentile(values, 99)
        lines.append(f"{name:<44}{p50:>9.2f}{p99:>9.2f}{len(values):>6}  {whose}")
    return lines


class Traced:
    """The engines that are up, and what their connectors note."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        engines = json.loads((options.out / "engines.json").read_text())["engines"]
        pairs = {
            name: tuple(engines.get(f"{name}-{role}") for role in ("kv_producer", "kv_consumer"))
            for name in WHO
        }
        # Only one pair may have come up.
        self.urls = {
            name: (pair[0]["url"], pair[1]["url"]) for name, pair in pairs.items() if all(pair)
        }

    def turns(self) -> list[str]:
        """Connectors in alternating order: A, B, B, A, ..."""
        names = [*self.urls]
        return [
            name
            for turn in range(self.options.passes)
            for name in (names if turn % 2 == 0 else reversed(names))
        ]

    def lines(self) -> dict[str, list[list[Any]]]:
        """All lines of both engines of each connector."""
        time.sleep(0.3)
        found: dict[str, list[list[Any]]] = {name: [] for name in self.urls}
        for who, lines in read_lines(self.options.trace):
            for name in found:
                if who.startswith(WHO[name]):
                    found[name] += lines
        return found

    def drive(
        self, name: str, concurrency: int, requests: int, seed: int, mark: str = MARK
    ) -> tuple[dict[str, Moments], Stretch]:
        """A load that is noted: the client's moments, and when it was."""
        options = self.options
        load = Load(concurrency, requests, options.input, options.output, seed)
        begun = time.monotonic()
        prefix = f"{mark}{name}-{concurrency}-{time.monotonic_ns()}-"
        client = asyncio.run(drive(self.urls[name], load, prefix))
        return client, (begun, time.monotonic())

    def point(self, concurrency: int) -> None:
        """All tables of one concurrency."""
        options = self.options
        client: dict[str, dict[str, Moments]] = {name: {} for name in self.urls}
        stretches: dict[str, list[Stretch]] = {name: [] for name in self.urls}
        requests = max(options.requests // options.passes, 3 * concurrency)
        for name in self.urls:
            warm = Load(concurrency, 2 * concurrency, options.input, 4, 3)
            asyncio.run(drive(self.urls[name], warm, "warm-"))
        for turn, name in enumerate(self.turns()):
            seed = 500 + concurrency + 1000 * (turn // len(self.urls))
            moments, stretch = self.drive(name, concurrency, requests, seed)
            client[name] |= moments
            stretches[name].append(stretch)
        lines = self.lines()
        for name, moments in client.items():
            tell(stages_table(f"{name}, concurrency {concurrency}", joined(moments, lines[name])))
        print(f"\nconcurrency {concurrency}")
        tell([head("client, ms", client)])
        for what, title in {"per token": "time per token", **TITLES}.items():
            values = {
                name: [own[what] for own in moments.values() if what in own]
                for name, moments in client.items()
            }
            tell([line_of(title, values, 1e3)])
        self.tell_steps(lines, stretches)
        if OURS in self.urls:
            self.parts(concurrency)

    def tell_steps(
        self, lines: dict[str, list[list[Any]]], stretches: dict[str, list[Stretch]]
    ) -> None:
        seen = {name: seen_in(lines[name], stretches[name]) for name in self.urls}
        tell([*steps_table(seen), *places_table(seen), *calls_table(seen), self.cost(seen)])

    def cost(self, seen: dict[str, Seen]) -> str:
        """What the lines themselves cost a step."""
        steps = sum(len(stretch) for own in seen.values() for stretch in own.steps)
        written = steps + sum(len(own.calls) for own in seen.values())
        cost = 1e6 * cost_of_a_line()
        return f"noting: {cost:.1f} us a line, {written / max(1, steps):.1f} lines a step"

    def parts(self, concurrency: int) -> None:
        """Where the time of our posting goes, from requests of their own."""
        requests = max(PARTS_REQUESTS, concurrency)
        if self.options.requests < requests:
            requests = self.options.requests
        _, (begin, end) = self.drive(
            OURS, concurrency, requests, 900 + concurrency, MARK + PARTS_MARK
        )
        calls = [
            (line[2], line[3])
            for line in self.lines()[OURS]
            if line[0] == "parts" and begin <= line[1] <= end
        ]
        for title, own in (
            ("1 read", [parts for reads, parts in calls if reads == 1]),
            ("2 reads or more", [parts for reads, parts in calls if reads > 1]),
        ):
            if own:
                print(f"\nposting by {OURS}, concurrency {concurrency}, {title} a step:")
                tell(parts_table(own))
        print(f"  taking the time adds {1e6 * cost_of_a_part():.1f} us a part")

    def bursts(self) -> None:
        """Steps while several reads are posted, beside requests that run."""
        options = self.options
        stretches: dict[str, list[Stretch]] = {name: [] for name in self.urls}
        for turn, name in enumerate(self.turns()):
            load = Load(options.bursts, 2 * options.bursts, options.input, 1, 300 + turn)
            prefix = f"{MARK}{name}-burst-{time.monotonic_ns()}-"
            begun = time.monotonic()
            asyncio.run(run_bursts(self.urls[name], prefix, options.rounds, load))
            stretches[name].append((begun, time.monotonic()))
        print(
            f"\n{options.bursts} at once, {options.rounds} times in each of {options.passes} passes"
        )
        self.tell_steps(self.lines(), stretches)


def tell(lines: list[str]) -> None:
    print("\n".join(lines), flush=True)


def main() -> int:
    """Drive both connectors and print tables for each concurrency."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="the directory given to start")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "pd-compare")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--requests", type=int, default=100, help="per point, at least")
    parser.add_argument("--passes", type=int, default=2, help="of each connector, in turn")
    parser.add_argument("--bursts", type=int, default=0, help="requests that come at once")
    parser.add_argument("--rounds", type=int, default=8, help="bursts in each pass")
    parser.add_argument("--input", type=int, default=2000)
    parser.add_argument("--output", type=int, default=64)
    options = parser.parse_args()
    traced = Traced(options)
    for concurrency in filter(None, options.concurrency.split(",")):
        traced.point(int(concurrency))
    if options.bursts:
        traced.bursts()
    return 0


if __name__ == "__main__":
    sys.exit(main())
