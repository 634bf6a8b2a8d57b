"""Where the time goes in which D posts the reads of a request, part by part, without an engine.

    python benchmarks/posting_parts.py [--device cuda] [--requests 200] [--busy] [--zero-by torch]

Both halves, real agents and the real side channel in two processes, as in `first_request.py`; D
zeroes tails as in an engine. The parts are the test kit's (`hybridpd_testkit.posting_parts`), the
same that `gpu/handover_stages.py` prints of real engines. With `--busy` D's main thread runs a
millisecond of other Python code between two requests, as an engine does: caches of the processor
are then not full of the connector alone. `--zero-by torch` zeroes by torch, as where the faster way
does not pass its trial.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from typing import Any

from devices import named, two_devices
from first_request import HOST, UP_SECONDS, WAIT_SECONDS, Engine, producer, quick_context, started
from first_request import take as take_from
from hybridpd_connector.tail_zeros import Tail
from hybridpd_testkit.posting_parts import Parts, PostingParts, cost_of_a_part, parts_table

BUSY_SECONDS = 0.001
WARM_REQUESTS = 10


class LateZeroing:
    """Zeroes as in an engine, once it knows the cache."""

    def __init__(self) -> None:
        self.zero: Any = None

    def __call__(self, tails: Iterable[Tail]) -> None:
        self.zero(tails)


def measured(device: str, requests: int, busy: bool, zero_by: str, prefill: Any, pipe: Any) -> None:
    """D's process: the parts of every post."""
    from hybridpd_connector.vllm_zeroing import Zeroing, torch_fill  # PyTorch: not in P's process

    zeroing = LateZeroing()
    port = prefill.recv()
    decode = Engine("consumer", device, 0, (f"{HOST}:{port}",), zeroing)
    cache = decode.cache
    by_torch = torch_fill if zero_by == "torch" else None
    zeroing.zero = Zeroing(cache.regions, (decode.bytes,), by_torch)
    pipe.send("up")
    decode.wait_until_met()
    parts = PostingParts(decode.worker)
    calls: list[Parts] = []
    decode.post = lambda: calls.append(parts.measure(decode.worker.start_loads))
    for number in range(WARM_REQUESTS + requests):
        prefill.send(f"p-{number}")
        params = prefill.recv()
        if busy:
            until, work = time.perf_counter() + BUSY_SECONDS, {}
            while time.perf_counter() < until:
                work = {str(index): [index] * 8 for index in range(200)}
            del work
        decode.load(f"d-{number}", params)
    # Steps in which nothing is posted are looked at too; they have no ranges.
    posts = [call for call in calls if "ranges made" in call]
    pipe.send((posts[WARM_REQUESTS:], parts.missing, cost_of_a_part()))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--busy", action="store_true", help="other code between two requests")
    parser.add_argument("--zero-by", default="own", choices=["own", "torch"], help="who zeroes")
    options = parser.parse_args()
    devices = two_devices(options.device)
    context = quick_context()
    ours, theirs = context.Pipe()
    results, told = context.Pipe()
    processes = [
        started(context, producer, devices[1], theirs),
        started(
            context,
            measured,
            devices[0],
            options.requests,
            options.busy,
            options.zero_by,
            ours,
            told,
        ),
    ]
    try:
        take_from(results, UP_SECONDS, "both processes up")
        posts, missing, cost = take_from(
            results, WAIT_SECONDS + 0.5 * options.requests, "all requests"
        )
    finally:
        for process in processes:
            process.kill()
    between = "busy" if options.busy else "idle"
    print(
        f"{named(devices)}, {len(posts)} requests, {between} between them, {options.zero_by} zeroes"
    )
    print("\n".join(parts_table(posts)))
    print(f"  taking the time adds {1e6 * cost:.1f} us a part")
    if missing:
        print(f"  not found: {', '.join(missing)}")


if __name__ == "__main__":
    main()
