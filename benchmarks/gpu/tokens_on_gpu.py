"""Greedy tokens through prefill and decode on GPUs equal one engine's, at each TP pair.

Tiny checkpoints from disk; every request must load N-1 tokens and move the predicted bytes, and
what the running engines say of their pages must be what geometry computes. Families that compute in
bfloat16 or on GPUs only may differ where the single engine was undecided, and how often they did is
told (`hybridpd_testkit.near_ties`). With `--reference prefill` P alone says what is right: one
engine less, where all share a GPU. With `--flip` a bit of P's memory is flipped behind its sums
(`flipped_bits`). Prints one JSON line per family and TP pair, with the path that D has measured,
and exits 1 when anything differs. On a CPU: `--device cpu`.

    PYTHONPATH=SITE:connector:connector/testkit python benchmarks/gpu/tokens_on_gpu.py --gpus 2
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import multicast
from engine_facts import engine_facts
from flipped_bits import flip_each_kind, with_probe
from links import link_of

from hybridpd_testkit.checkpoint_families import ALL_FAMILIES, FAMILIES
from hybridpd_testkit.checkpoints import write_checkpoint
from hybridpd_testkit.engines import (
    Engine,
    EngineSpec,
    base_environment,
    engine_python,
    running,
)
from hybridpd_testkit.expectations import MAX_TOKENS, prompts
from hybridpd_testkit.near_ties import MOST_TIES, fallen_ties, reference_of
from hybridpd_testkit.nursery import Nursery
from hybridpd_testkit.pd_client import Pair, complete, measured, require_nothing_left
from hybridpd_testkit.processes import log_tail

FIRST_ERROR = re.compile(r"^(?!.* WARNING ).*\b[A-Z]\w*(Error|Exception)(:|$)")
LAST_LINES = 40  # 25 of them tell of the shut-down


def parse_pair(text: str) -> tuple[int, int]:
    """ "1-2" is prefill at TP1 and decode at TP2."""
    prefill_tp, decode_tp = text.split("-")
    return int(prefill_tp), int(decode_tp)


def gpu_spec(
    name: str, checkpoint: Path, gpus: str, role: str | None, checksum: str = "off"
) -> EngineSpec:
    """An engine on the GPUs named. Memory is stated, not measured: measuring fails while a
    neighbour on the same GPU starts or ends."""
    return EngineSpec(
        name,
        checkpoint,
        tp_size=gpus.count(",") + 1,
        role=role,
        extra_config={"checksum": checksum},
        environment={
            "CUDA_VISIBLE_DEVICES": gpus,
            # Also, FlashInfer's all-reduce takes no row of one number, which is what ranks add up
            # for the norm of Falcon-H1.
            **multicast.ENVIRONMENT,
            # Its sampler is built at the first start, which takes minutes.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            # It is for GPUs behind Hopper, multicasts over NVLink, and keeps Kimi-Linear from its
            # start where CuTe's Python packages are missing.
            "VLLM_KIMI_K3_GEMM_AR": "0",
        },
        arguments=("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", "2G"),
        num_blocks=64,
    )


def gpu_list(first: int, count: int, available: int) -> str:
    """`count` GPUs from `first` on, wrapping round."""
    return ",".join(str((first + i) % available) for i in range(count))


def specs_of(
    checkpoint: Path, tps: tuple[int, int], options: argparse.Namespace
) -> list[EngineSpec]:
    """One plain engine, P and D."""
    gpus = options.gpus
    specs = [
        gpu_spec("single", checkpoint, gpu_list(gpus - 1, 1, gpus), None),
        gpu_spec("p", checkpoint, gpu_list(0, tps[0], gpus), "kv_producer", options.checksum),
        gpu_spec("d", checkpoint, gpu_list(tps[0], tps[1], gpus), "kv_consumer", options.checksum),
    ]
    for index, tp_size in enumerate((1, *tps)):
        placed = {"tp_size": tp_size, "dtype": ALL_FAMILIES[checkpoint.name].dtype}
        if options.device == "cpu":
            placed |= {"environment": {}, "arguments": (), "num_blocks": 512}
        specs[index] = replace(specs[index], **placed)
    more = tuple(shlex.split(options.engine_args))
    return [replace(spec, arguments=(*spec.arguments, *more)) for spec in specs]


def checksums_of(decode: Engine) -> dict[str, int]:
    """Loads that D's ranks compared with P's sums, by result."""
    samples = decode.metrics().samples
    name = "hybridpd_checksums_total"
    return {dict(key[1])["result"]: int(value) for key, value in samples.items() if key[0] == name}


@dataclass
class Comparison:
    """What was found so far. ``ties``: tokens that differed where one engine was undecided."""

    pair: Pair
    lengths: list[int] = field(default_factory=list)
    equal: int = 0
    loaded: int = 0
    bytes_as_predicted: int = 0
    ties: int = 0
    loads: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def prompt(self, single: Engine, prompt: list[int], exact: bool) -> None:
        """One prompt through the pair, and on behind every near-tie that fell the other way."""
        expected = complete(single, prompt, MAX_TOKENS).tokens
        answer, counted = measured(self.pair.decode, lambda: self.pair.complete(prompt, MAX_TOKENS))
        self.lengths.append(len(prompt))
        self.loads += len(prompt) > 1
        self.loaded += counted.external_tokens == len(prompt) - 1
        self.bytes_as_predicted += counted.read_bytes == counted.predicted_bytes
        same, why = self._same(single, prompt, expected, answer.tokens, exact)
        self.equal += same
        if not same:
            wrong = {"length": len(prompt), "one": expected, "pd": answer.tokens, "why": why}
            self.wrong.append(wrong)

    def recomputed(
        self, single: Engine, prompt: list[int], tokens: Sequence[int], exact: bool
    ) -> tuple[bool, str]:
        """Are these the right tokens of a request that D has computed itself?"""
        expected = complete(single, prompt, MAX_TOKENS).tokens
        return self._same(single, prompt, expected, tokens, exact)

    def _same(
        self,
        single: Engine,
        prompt: list[int],
        expected: Sequence[int],
        tokens: Sequence[int],
        exact: bool,
    ) -> tuple[bool, str]:
        if tokens == expected:
            return True, ""
        return (False, "") if exact else self._undecided(single, prompt, tokens)

    def _undecided(
        self, single: Engine, prompt: list[int], first: Sequence[int]
    ) -> tuple[bool, str]:
        """Are the differences near-ties of the single engine, and all else equal?"""

        def through_both(asked: list[int], count: int) -> Sequence[int]:
            if asked == prompt:
                return first
            self.loads += 1
            return self.pair.complete(asked, count).tokens

        try:
            self.ties += fallen_ties(reference_of(single, prompt, MAX_TOKENS), prompt, through_both)
        except ValueError as error:
            return False, str(error)
        return self.ties <= MOST_TIES, f"{self.ties} near-ties, at most {MOST_TIES}"


def logs_of(checkpoint: Path, tps: tuple[int, int], options: argparse.Namespace) -> Path:
    """Where the engines of one family and pair write."""
    folder: Path = options.out / f"{checkpoint.name}-{tps[0]}-{tps[1]}"
    return folder


def print_logs(folder: Path) -> None:
    """Of each engine's log what led to its first error, all lines that name one, and the last.

    The first is the cause: behind it, each process above tells of the one below, and then how it
    shut down.
    """
    for path in sorted(folder.glob("*.log")):
        lines = [line[:300] for line in path.read_text(errors="replace").splitlines()]
        errors = (at for at, line in enumerate(lines) if FIRST_ERROR.search(line))
        at = next(errors, None)
        if at is not None:
            print(
                f"# {path.name} up to its first error:", *lines[max(0, at - 30) : at + 1], sep="\n"
            )
        print(f"# end of {path.name}:", log_tail(path, LAST_LINES), sep="\n", flush=True)


def try_pair(checkpoint: Path, tps: tuple[int, int], options: argparse.Namespace) -> dict[str, Any]:
    """Start one engine, P and D; compare all prompts."""
    # Seeds of GPU families could not be picked on an engine: no lead is known to be large enough.
    exact = ALL_FAMILIES[checkpoint.name].dtype == "float32" and checkpoint.name in FAMILIES
    logs = logs_of(checkpoint, tps, options)
    flips: list[dict[str, Any]] = []
    with running(engines_of(checkpoint, tps, options), logs, options.nursery) as engines:
        *plain, prefill, decode = engines
        single = plain[0] if plain else prefill
        facts = [engine_facts(engine) for engine in (prefill, decode)]
        found = Comparison(Pair(prefill, decode))
        for prompt in prompts():
            found.prompt(single, prompt, exact)
        require_nothing_left(prefill)
        checksums, loads = checksums_of(decode), found.loads
        path, bytes_per_second = link_of(decode)
        if options.flip:
            flips = flip_each_kind(
                found.pair,
                lambda prompt, tokens: found.recomputed(single, prompt, tokens, exact),
            )
    count = len(found.lengths)
    good = (found.equal, found.loaded, found.bytes_as_predicted) == (count,) * 3
    good = good and all(engine["matches"] for engine in facts)
    if options.checksum == "all":
        good = good and checksums == {"ok": loads * tps[1]}
    return {
        "ok": good and all(row["ok"] for row in flips),
        "reference": single.spec.name,
        "lengths": found.lengths,
        "equal": found.equal,
        "loaded": found.loaded,
        "bytes_as_predicted": found.bytes_as_predicted,
        **({} if exact else {"near_ties": found.ties}),
        "checksums": checksums,
        "path": path,
        "gigabytes_per_second": round(bytes_per_second / 1e9, 2),
        "wrong": found.wrong[:2],
        "flips": flips,
        "engines": facts,
    }


def engines_of(
    checkpoint: Path, tps: tuple[int, int], options: argparse.Namespace
) -> list[EngineSpec]:
    """What `specs_of` says, as this run wants it."""
    specs = specs_of(checkpoint, tps, options)
    if options.reference == "prefill":
        specs = specs[1:]
    folder = logs_of(checkpoint, tps, options)
    return with_probe(specs, folder) if options.flip else specs


def main() -> int:
    """Run every family at every TP pair that the GPUs allow."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--gpus", type=int, default=2, help="GPUs on this machine")
    parser.add_argument("--families", default="nemotron-h,falcon-h1,llama")
    parser.add_argument("--pairs", default="1-1,1-2,2-1", help="prefill-decode TP sizes")
    parser.add_argument("--checksum", default="all", help="off, sample or all, on P and on D")
    parser.add_argument("--reference", choices=("plain", "prefill"), default="plain")
    parser.add_argument("--flip", action="store_true", help="also flip bits; D must catch them")
    parser.add_argument("--engine-args", default="", help="more arguments of every engine")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "gpu-tokens")
    options = parser.parse_args()
    # Engines that are forked from one that has imported vLLM start faster, and may not use CUDA.
    options.nursery = (
        Nursery(engine_python(), base_environment()) if options.device == "cpu" else None
    )
    failed = False
    for family in options.families.split(","):
        checkpoint = write_checkpoint(family, options.out / family)
        for tps in (parse_pair(text) for text in options.pairs.split(",")):
            try:
                result = try_pair(checkpoint, tps, options)
            except Exception as error:  # an engine that does not start, or ends: the next may not
                result = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
            failed = failed or not result["ok"]
            print(json.dumps({"family": family, "tp": tps, **result}), flush=True)
            if not result["ok"]:
                print_logs(logs_of(checkpoint, tps, options))
    if options.nursery is not None:
        options.nursery.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
