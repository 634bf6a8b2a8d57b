"""Greedy tokens through prefill and decode on GPUs equal one engine's, at each TP pair.

Tiny float32 checkpoints from disk; every request must load N-1 tokens and move the predicted
bytes. Prints one JSON line per family and TP pair, and exits 1 when anything differs.

    PYTHONPATH=SITE:connector:connector/testkit python benchmarks/gpu/tokens_on_gpu.py --gpus 2
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from hybridpd_testkit.checkpoints import write_checkpoint
from hybridpd_testkit.engines import Engine, EngineSpec, running
from hybridpd_testkit.expectations import MAX_TOKENS, prompts
from hybridpd_testkit.pd_client import Pair, complete, measured, require_nothing_left


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
        environment={"CUDA_VISIBLE_DEVICES": gpus},
        arguments=("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", "2G"),
        num_blocks=64,
    )


def gpu_list(first: int, count: int, available: int) -> str:
    """`count` GPUs from `first` on, wrapping round."""
    return ",".join(str((first + i) % available) for i in range(count))


def checksums_of(decode: Engine) -> dict[str, int]:
    """Loads that D's ranks compared with P's sums, by result."""
    samples = decode.metrics().samples
    name = "hybridpd_checksums_total"
    return {dict(key[1])["result"]: int(value) for key, value in samples.items() if key[0] == name}


def try_pair(
    checkpoint: Path, tps: tuple[int, int], gpus: int, logs: Path, checksum: str
) -> dict[str, Any]:
    """Start one engine, P and D; compare all prompts. Keys: lengths, equal, bytes_as_predicted."""
    specs = [
        gpu_spec("single", checkpoint, gpu_list(gpus - 1, 1, gpus), None),
        gpu_spec("p", checkpoint, gpu_list(0, tps[0], gpus), "kv_producer", checksum),
        gpu_spec("d", checkpoint, gpu_list(tps[0], tps[1], gpus), "kv_consumer", checksum),
    ]
    equal = loaded = bytes_equal = 0
    lengths, wrong = [], []
    with running(specs, logs) as (single, prefill, decode):
        pair = Pair(prefill, decode)
        for prompt in prompts():
            expected = complete(single, prompt, MAX_TOKENS).tokens
            answer, counted = measured(decode, lambda p=prompt: pair.complete(p, MAX_TOKENS))
            lengths.append(len(prompt))
            same = answer.tokens == expected
            equal += same
            loaded += counted.external_tokens == len(prompt) - 1
            bytes_equal += counted.read_bytes == counted.predicted_bytes
            if not same:
                wrong.append({"length": len(prompt), "one": expected, "pd": answer.tokens})
        require_nothing_left(prefill)
        checksums = checksums_of(decode)
    return {
        "lengths": lengths,
        "equal": equal,
        "loaded": loaded,
        "bytes_as_predicted": bytes_equal,
        "checksums": checksums,
        "wrong": wrong[:2],
    }


def main() -> int:
    """Run every family at every TP pair that the GPUs allow."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2, help="GPUs on this machine")
    parser.add_argument("--families", default="nemotron-h,falcon-h1,llama")
    parser.add_argument("--pairs", default="1-1,1-2,2-1", help="prefill-decode TP sizes")
    parser.add_argument("--checksum", default="all", help="off, sample or all, on P and on D")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "gpu-tokens")
    arguments = parser.parse_args()
    failed = False
    for family in arguments.families.split(","):
        checkpoint = arguments.out / family
        write_checkpoint(family, checkpoint)
        for tps in (parse_pair(text) for text in arguments.pairs.split(",")):
            logs = arguments.out / f"{family}-{tps[0]}-{tps[1]}"
            result = try_pair(checkpoint, tps, arguments.gpus, logs, arguments.checksum)
            count = len(result["lengths"])
            good = all(result[k] == count for k in ("equal", "loaded", "bytes_as_predicted"))
            if arguments.checksum == "all":
                compared = sum(length > 1 for length in result["lengths"]) * tps[1]
                good = good and result["checksums"].get("ok", 0) == compared
                good = good and sum(result["checksums"].values()) == compared
            failed = failed or not good
            print(json.dumps({"family": family, "tp": tps, "ok": good, **result}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
