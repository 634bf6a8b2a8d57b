"""By how much rounding moves the lead of a token when the same sums are added in another order.

The bound of `hybridpd_testkit.near_ties` rests on this. One plain engine answers the test prompts
at TP 1; of each token it chose, the lead over the best other one is compared with what engines say
in the same place that add in another order: other batches, another TP size, and tokens computed as
part of a prompt, not one by one. No transfer, no connector. With ``--kv-cache-dtype`` the same for
a cache of another dtype: rounding to fp8 makes a step of 6 % or 12 % of a difference in a last bit.

    python benchmarks/near_tie_noise.py [--family nemotron-h --kv-cache-dtype fp8_e4m3]

Per row: places compared, the difference of leads in nats (median, 90 %, 99 %, largest), tokens that
came out otherwise, and the largest lead that such a token had in the first engine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hybridpd_testkit.checkpoint_families import FAMILIES
from hybridpd_testkit.checkpoints import write_checkpoint
from hybridpd_testkit.engines import (
    Engine,
    EngineSpec,
    base_environment,
    engine_python,
    running,
)
from hybridpd_testkit.expectations import MAX_TOKENS, prompts
from hybridpd_testkit.near_ties import TIE_NATS, Reference, reference_of
from hybridpd_testkit.nursery import Nursery
from hybridpd_testkit.pd_client import completion_request

TOP = 20
Leads = list[tuple[float, float]]
"""(lead of the token in the first engine, its lead in the other one); below 0 when it lost."""


def chosen_again(references: Sequence[Reference], others: Sequence[Reference]) -> Leads:
    """Answers of another engine, each up to the first token that differs."""
    return [
        pair
        for ours, theirs in zip(references, others, strict=True)
        for pair in _until_they_differ(ours, theirs)
    ]


def _until_they_differ(ours: Reference, theirs: Reference) -> Iterator[tuple[float, float]]:
    rows = zip(ours.tokens, theirs.tokens, ours.margins, theirs.margins, strict=True)
    for token, other, lead, their_lead in rows:
        if token != other:
            yield lead, -their_lead  # the token that lost was the second one, as good as always
            return
        yield lead, their_lead


def forced(engine: Engine, references: Sequence[Reference]) -> Leads:
    """Each token as the one after a prompt that has all before it."""
    return [
        (lead, lead_of(engine, [*prompt, *reference.tokens[:at]], reference.tokens[at]))
        for prompt, reference in zip(prompts(), references, strict=True)
        for at, lead in enumerate(reference.margins)
    ]


def lead_of(engine: Engine, prompt: list[int], token: int) -> float:
    """Nats by which a token leads the best other one; below 0 when it does not lead."""
    asked = completion_request(prompt, 1, logprobs=TOP, return_tokens_as_token_ids=True)
    (choice,) = engine.post("/v1/completions", asked)["choices"]
    top = dict(choice["logprobs"]["top_logprobs"][0])
    own = top.pop(f"token_id:{token}", min(top.values()))
    return float(own - max(top.values()))


def one_by_one(engine: Engine) -> list[Reference]:
    return [reference_of(engine, prompt, MAX_TOKENS) for prompt in prompts()]


def all_at_once(engine: Engine) -> list[Reference]:
    with ThreadPoolExecutor(len(prompts())) as pool:
        return list(pool.map(lambda prompt: reference_of(engine, prompt, MAX_TOKENS), prompts()))


def line(name: str, leads: Leads, digits: int = 3) -> str:
    """One row of the table, with as many digits as the dtype's noise needs."""
    moved = sorted(abs(lead - other) for lead, other in leads)
    lost = [lead for lead, other in leads if other < 0]
    shares = [moved[min(len(moved) - 1, int(share * len(moved)))] for share in (0.9, 0.99)]
    cells = "".join(
        f"{value:>10.{digits}f}" for value in (statistics.median(moved), *shares, moved[-1])
    )
    largest = f"{max(lost):.{digits}f}" if lost else "-"
    return f"{name:<34}{len(moved):>7}{cells}{len(lost):>7}{largest:>14}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", default="qwen3-next", choices=sorted(FAMILIES))
    parser.add_argument("--kv-cache-dtype", default="auto", help="of all engines")
    options = parser.parse_args()
    nursery = Nursery(engine_python(), base_environment())
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(options.family, Path(folder) / options.family)
        specs = [
            EngineSpec(
                f"tp{tp}",
                checkpoint,
                tp_size=tp,
                dtype=FAMILIES[options.family].dtype,
                arguments=("--kv-cache-dtype", options.kv_cache_dtype),
            )
            for tp in (1, 2)
        ]
        with running(specs, Path(folder), nursery) as (first, second):
            report(options, first, second)
    nursery.close()


def report(options: argparse.Namespace, first: Engine, second: Engine) -> None:
    """The table; `first` at TP 1, `second` at TP 2."""
    family, cache = options.family, options.kv_cache_dtype
    references = one_by_one(first)
    margins = [margin for reference in references for margin in reference.margins]
    within = sum(margin <= TIE_NATS for margin in margins)
    digits = 6 if FAMILIES[family].dtype == "float32" else 3
    dtypes = FAMILIES[family].dtype + ("" if cache == "auto" else f", cache {cache}")
    print(f"{family}, {dtypes}, {len(margins)} tokens of {len(references)} prompts")
    print(f"tokens that lead by at most {TIE_NATS} nats in the first engine: {within}")
    columns = " places    p50 nats  90 %      99 %   largest  other  of lead"
    print(f"{'beside TP 1, one by one':<34}{columns}")
    rows: dict[str, Callable[[], Leads]] = {
        "the same again": lambda: chosen_again(references, one_by_one(first)),
        "TP 1, all prompts at once": lambda: chosen_again(references, all_at_once(first)),
        "TP 1, as tokens of a prompt": lambda: forced(first, references),
        "TP 2, one by one": lambda: chosen_again(references, one_by_one(second)),
        "TP 2, all prompts at once": lambda: chosen_again(references, all_at_once(second)),
        "TP 2, as tokens of a prompt": lambda: forced(second, references),
    }
    for name, measure in rows.items():
        print(line(name, measure(), digits), flush=True)


if __name__ == "__main__":
    main()
