"""What `matrix_on_gpu.py` does to the engines of one setting, and what it requires of them.

All tokens are compared with one plain engine's. Where they differ, the plain engine says whether
that is noise, by the bound measured in the same setting (`matrix_noise`). One scenario needs no
bound: `exact` gives a pair and D alone the same tokens in steps of the same shapes, so that all
logprobs must be equal to the last bit; with wrong bytes, they are not.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from matrix_noise import again, all_at_once, one_by_one
from matrix_verdict import EXACT, WrongError, judged, need

from hybridpd_testkit.engines import Engine
from hybridpd_testkit.expectations import MAX_TOKENS, prompts, random_prompt
from hybridpd_testkit.leads import (
    MOST_BOUND_NATS,
    Comparison,
    Told,
    compare,
    drafts_to_accept,
    noise_bound,
    same_to_the_bit,
    told_by,
    told_by_pair,
)
from hybridpd_testkit.metrics import Metrics
from hybridpd_testkit.pd_client import (
    OpenRequest,
    Pair,
    evidence,
    leases_held,
    measured,
    require_nothing_left,
    wait_until,
)
from hybridpd_testkit.processes import HttpError

LEASE_SECONDS = 10
IN_FLIGHT = 16
AT_ONCE = 6
CANDIDATES = 24
MOST_REQUESTS = 32
# No step of any engine has more tokens, so that prompts are computed in pieces. It is no multiple
# of any block.
CHUNK_TOKENS = 75
CHUNKS = (1, 2, 3, 4)
DRAFTED_TOKENS = 200
CACHED_TOKENS, EXTENDED_TOKENS = 600, 90
DRAFTS_LONGEST, DRAFTS_TOKENS = 3, 2
LEAST_ACCEPTED, LEAST_REJECTED = 100, 20


@dataclass(frozen=True)
class Bench:
    """The engines of one setting. ``noise``: the largest move of a lead, in nats; ``decides``:
    whether tokens within the bound of it are what decides.

    Where no scenario wants small caches, P and D stand for those too.
    """

    single: Engine
    prefill: Engine
    decode: Engine
    small_prefill: Engine
    small_decode: Engine
    noise: float = 0.0
    decides: bool = True

    @property
    def pair(self) -> Pair:
        return Pair(self.prefill, self.decode)

    @property
    def with_connector(self) -> tuple[Engine, ...]:
        """Each once."""
        named = (self.prefill, self.decode, self.small_prefill, self.small_decode)
        return tuple(dict.fromkeys(named))

    @property
    def bound(self) -> float:
        return noise_bound(self.noise)


def exact(bench: Bench) -> str:
    """To the bit: a pair, and D alone, which computes the same prompt in the same pieces.

    The last piece is one token on D either way. P and D choose their kernels by timing, each for
    itself: where P alone and D alone differ, or D from itself, a pair shows nothing. Engines that
    speculate have no such steps: D's first one after a load is padded with drafts.
    """
    many = [
        random_prompt(CHUNK_TOKENS * chunks + 1, 900 + 10 * chunks + seed)
        for chunks in CHUNKS
        for seed in range(2)
    ]
    wrong, unsure = list[str](), list[str]()
    before = bench.decode.metrics()
    for prompt in many:
        alone = told_by(bench.decode, prompt, MAX_TOKENS)
        control = same_to_the_bit(alone, told_by(bench.decode, prompt, MAX_TOKENS))
        control = control or same_to_the_bit(alone, told_by(bench.prefill, prompt, MAX_TOKENS))
        found = same_to_the_bit(alone, told_by_pair(bench.pair, prompt, MAX_TOKENS))
        if control:
            unsure.append(f"{len(prompt)} tokens: {control}")
        elif found:
            wrong.append(f"{len(prompt)} tokens: {found}")
    loads = evidence(bench.decode.metrics().since(before)).loads
    need(loads == len(many), f"{loads} loads of {len(many)}")
    need(not wrong, f"{len(wrong)} of {len(many)} prompts: " + "; ".join(wrong))
    need(
        len(unsure) <= len(many) // 2,
        f"engines alone differ for {len(unsure)} of {len(many)}, nothing is shown: {unsure[:3]}",
    )
    places = (len(many) - len(unsure)) * MAX_TOKENS
    return f"{places} places equal to the bit" + (
        f", engines alone differ: {unsure}" * bool(unsure)
    )


def handover(bench: Bench) -> str:
    """All lengths, one at a time: tokens, N-1 tokens loaded, bytes as predicted."""
    expected = one_by_one(bench.single, prompts(), MAX_TOKENS)
    answers = []
    for prompt in prompts():
        answer, counted = measured(bench.decode, partial(bench.pair.complete, prompt, MAX_TOKENS))
        answers.append(answer.tokens)
        need(counted.external_tokens == len(prompt) - 1, f"{len(prompt)} tokens: {counted}")
        need(counted.read_bytes == counted.predicted_bytes, f"{len(prompt)} tokens: {counted}")
    found = judged(expected, answers, bench.bound, bench.decides)
    require_nothing_left(bench.prefill, bench.decode)
    return str(found)


def at_once(bench: Bench) -> str:
    """Many requests of different lengths together."""
    many = [random_prompt(3 + 17 * index, 100 + index) for index in range(IN_FLIGHT)]
    expected = one_by_one(bench.single, many, MAX_TOKENS)
    growth, found = same_as(expected, bench.bound, bench.pair, many, bench.decides)
    return f"{evidence(growth).loads} loads, {found}"


def same_tokens(
    bench: Bench, pair: Pair, many: list[list[int]], tokens: int
) -> tuple[Metrics, Comparison | str]:
    """Send all at once, compare, and require that each was loaded; what D counted meanwhile."""
    return same_as(one_by_one(bench.single, many, tokens), bench.bound, pair, many)


def same_as(
    expected: Sequence[Told],
    bound: float,
    pair: Pair,
    many: list[list[int]],
    decides: bool = True,
) -> tuple[Metrics, Comparison | str]:
    """The same with answers that are known."""
    before = pair.decode.metrics()
    answers = pair.complete_all(many, len(expected[0].tokens))
    growth = pair.decode.metrics().since(before)
    counted = evidence(growth)
    need((counted.loads, counted.failures) == (len(many), 0), str(counted))
    found = judged(expected, [answer.tokens for answer in answers], bound, decides)
    require_nothing_left(pair.prefill, pair.decode)
    return growth, found


def aborts(bench: Bench) -> str:
    """Clients leave while D decodes, while D loads, and between P's answer and D's call."""
    prompt = random_prompt(200, 31)
    before = bench.decode.metrics()
    params = bench.pair.prefill_only(prompt)
    with OpenRequest(bench.decode, prompt, 1500, kv_transfer_params=params):
        wait_until(
            lambda: bench.decode.metrics().since(before).total("hybridpd_loads_total") == 1,
            "D has loaded the request",
        )
    for index in range(8):
        other = random_prompt(150 + 40 * index, 500 + index)
        OpenRequest(
            bench.decode, other, 64, kv_transfer_params=bench.pair.prefill_only(other)
        ).abandon()
    require_nothing_left(bench.decode, bench.prefill)
    bench.pair.prefill_only(prompt)
    wait_until(lambda: leases_held(bench.prefill) == 0, "the lease ends", 2.0 * LEASE_SECONDS + 5)
    _, found = same_tokens(bench, bench.pair, [prompt], MAX_TOKENS)
    return f"10 abandoned, {found}"


def preempted(engine: Engine, growth: Metrics) -> int:
    """Preemptions in a growth of metrics; there must be some, else the scenario shows nothing."""
    count = int(growth.total("vllm:num_preemptions_total"))
    need(count > 0, f"{engine.spec.name} preempted nothing: its cache is too large for this")
    return count


def preempt_decode(bench: Bench) -> str:
    """D runs out of blocks after the loads, and before that without a hand-over.

    A preempted request is computed again as a prompt, instead of token by token: how far that moves
    its leads is measured on D alone. Prompts are those where the plain engine is decided longest.
    """
    small = bench.small_decode
    block_tokens = int(small.worker_reports()[0]["block_tokens"])
    tokens = max(96, block_tokens - 16)
    candidates = [random_prompt(40, 300 + index) for index in range(CANDIDATES)]
    told = all_at_once(bench.single, candidates, tokens)
    order = sorted(range(CANDIDATES), key=lambda i: told[i].decided(bench.bound), reverse=True)
    many = [candidates[i] for i in order[:AT_ONCE]]
    expected = [told[i] for i in order[:AT_ONCE]]

    before = small.metrics()
    alone = all_at_once(small, many, tokens)
    alone_preempted = preempted(small, small.metrics().since(before))
    moved = again("alone", expected, alone).largest
    bound = noise_bound(max(bench.noise, moved))
    theirs = compare(expected, [one.tokens for one in alone], MOST_BOUND_NATS)
    need(not theirs.problem, f"D alone, without a hand-over: {theirs.problem}")

    growth, found = same_as(expected, bound, Pair(bench.prefill, small), many)
    return (
        f"{preempted(small, growth)} preemptions, {found}; alone: {alone_preempted}, leads move by "
        f"up to {moved:.6f}, {theirs.equal} of {theirs.tokens} tokens equal"
    )


def preempt_prefill(bench: Bench) -> str:
    """P runs out of blocks while it prefills several prompts in small pieces."""
    many = [random_prompt(400, 400 + index) for index in range(6)]
    before = bench.small_prefill.metrics()
    _, found = same_tokens(bench, Pair(bench.small_prefill, bench.decode), many, MAX_TOKENS)
    growth = bench.small_prefill.metrics().since(before)
    return f"{preempted(bench.small_prefill, growth)} preemptions, {found}"


def drafts(bench: Bench) -> str:
    """Long answers that repeat themselves: D accepts many drafted tokens, and refuses some."""
    candidates = [random_prompt(40, 300 + index) for index in range(CANDIDATES)]
    told = all_at_once(bench.single, candidates, DRAFTED_TOKENS)
    foretold = [
        drafts_to_accept(prompt, one.tokens, DRAFTS_LONGEST, DRAFTS_TOKENS)
        for prompt, one in zip(candidates, told, strict=True)
    ]
    order = sorted(range(CANDIDATES), key=lambda i: foretold[i], reverse=True)[:AT_ONCE]
    need(
        sum(foretold[i] for i in order) >= LEAST_ACCEPTED,
        f"no prompts that make the plain engine repeat itself: {sorted(foretold)}",
    )
    growth, found = same_as(
        [told[i] for i in order], bench.bound, bench.pair, [candidates[i] for i in order]
    )
    drafted, accepted = (
        int(growth.total(f"vllm:spec_decode_num_{what}_tokens_total"))
        for what in ("draft", "accepted")
    )
    counted = f"{accepted} of {drafted} drafted tokens accepted"
    need(accepted >= LEAST_ACCEPTED, f"{counted}, expected {LEAST_ACCEPTED} or more; {found}")
    need(drafted - accepted >= LEAST_REJECTED, f"{counted}: too few were refused; {found}")
    return f"{counted}, {found}"


def cached(bench: Bench) -> str:
    """First, repeated and extended prompts: what P or D has cached is neither computed nor loaded
    again, and every token of a prompt is accounted for. Engines that draft must have drafted."""
    counts = {"loads": 0, "loaded": 0, "from D's cache": 0}
    many = []
    for seed in range(2):
        first = random_prompt(CACHED_TOKENS, 810 + seed)
        many += [first, first, [*first, *random_prompt(EXTENDED_TOKENS, 820 + seed)]]
    expected = one_by_one(bench.single, many, MAX_TOKENS)
    begun = bench.prefill.metrics(), bench.decode.metrics()
    answers = []
    for prompt in many:
        before = bench.decode.metrics()
        answers.append(bench.pair.complete(prompt, MAX_TOKENS).tokens)
        growth = bench.decode.metrics().since(before)
        counted, local = evidence(growth), cache_hits(growth)
        known = counted.external_tokens + counted.computed_tokens + local
        need(known == len(prompt), f"{known} of {len(prompt)} tokens accounted for: {counted}")
        need((counted.failures, counted.recomputed) == (0, 0), str(counted))
        need(counted.read_bytes == counted.predicted_bytes, str(counted))
        counts["loads"] += counted.loads
        counts["loaded"] += counted.external_tokens
        counts["from D's cache"] += local
    found = judged(expected, answers, bench.bound)
    counts["from P's cache"] = cache_hits(bench.prefill.metrics().since(begun[0]))
    need(all(counts.values()), f"something was never cached, or never loaded: {counts}")
    drafted = (
        bench.decode.metrics().since(begun[1]).total("vllm:spec_decode_num_draft_tokens_total")
    )
    require_nothing_left(bench.prefill, bench.decode)
    return f"{counts}, {found}" + f", {drafted:.0f} tokens drafted" * bool(drafted)


def cache_hits(growth: Metrics) -> int:
    """Tokens of prompts that an engine's own cache had."""
    return int(growth.total("vllm:prompt_tokens_by_source_total", source="local_cache_hit"))


def kill_prefill(bench: Bench) -> str:
    """P dies with requests on their way: D answers or refuses each, and goes on with another P."""
    known, waiting = random_prompt(220, 61), random_prompt(220, 62)
    expected = one_by_one(bench.single, [known], MAX_TOKENS)
    params = bench.pair.prefill_only(waiting)
    loaded = bench.pair.prefill_only(known)
    with ThreadPoolExecutor(1) as pool:
        running_request = pool.submit(bench.pair.decode_only, known, loaded, 300)
        before = bench.decode.metrics()
        wait_until(lambda: bench.decode.metrics().total("vllm:num_requests_running") > 0, "D runs")
        bench.prefill.send_signal(signal.SIGKILL)
        started = time.monotonic()
        try:
            bench.pair.decode_only(waiting, params, MAX_TOKENS)
        except HttpError:
            seconds = time.monotonic() - started
        else:
            raise WrongError("a request was answered from a P that is gone")
        judged(expected, [running_request.result().tokens[:MAX_TOKENS]], bench.bound)
    failures = evidence(bench.decode.metrics().since(before)).failures
    need(failures == 1, f"{failures} failures counted, expected 1")
    require_nothing_left(bench.decode)
    same_as(expected, bench.bound, Pair(bench.small_prefill, bench.decode), [known])
    return f"refused after {seconds:.1f} s"


def checksums(bench: Bench) -> str:
    """Every load so far was summed on both sides, and each rank's sums are equal."""
    results: dict[str, int] = {}
    for engine in dict.fromkeys((bench.decode, bench.small_decode)):
        for (name, labels), value in engine.metrics().samples.items():
            if name == "hybridpd_checksums_total" and value:
                result = dict(labels)["result"]
                results[result] = results.get(result, 0) + int(value)
    need(set(results) == {"ok"}, f"got {results}")
    return f"{results['ok']} loads equal"


# `kill-prefill` leaves no P behind. `drafts` wants engines that speculate, `cached` a pair that
# caches prefixes.
SCENARIOS: dict[str, Callable[[Bench], str]] = {
    EXACT: exact,
    "handover": handover,
    "at-once": at_once,
    "aborts": aborts,
    "preempt-decode": preempt_decode,
    "preempt-prefill": preempt_prefill,
    "drafts": drafts,
    "cached": cached,
    "kill-prefill": kill_prefill,
}
USUAL = tuple(name for name in SCENARIOS if name not in ("drafts", "cached"))
WITH_SMALL_CACHES = ("preempt-decode", "preempt-prefill", "kill-prefill")
