"""Write a tiny random checkpoint that vLLM loads from disk.

Weights are on disk rather than dummy because dummy weights differ between TP ranks and so prove
nothing across TP sizes. The same family and seed always give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from hybridpd_testkit.checkpoint_families import (
    ALL_FAMILIES,
    MAX_TOKENS,
    VOCABULARY_SIZE,
    Family,
    Weight,
    config_of,
    weights_of,
)
from hybridpd_testkit.tokenizer import SPECIAL_TOKENS, tokenizer_documents

Array = np.ndarray[Any, np.dtype[np.float32]]


def write_checkpoint(
    family_name: str, directory: Path, seed: int | None = None, words: int | None = None
) -> Path:
    """Write config, weights (float32, safetensors) and tokenizer; returns ``directory``.

    ``seed`` None is the family's own. Files are readable by everybody, since a pod may run as
    another user. config.json is written last: a directory that has one is whole. With ``words``
    the model says only so many different tokens, and so repeats itself.
    """
    family = ALL_FAMILIES[family_name]
    seed = family.seed if seed is None else seed
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {weight.name: _values(weight, family, seed) for weight in weights_of(family)}
    if words is not None:
        tensors[_output_of(family)][len(SPECIAL_TOKENS) + words :] = 0.0  # as of special tokens
    _write(directory / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    for name, document in tokenizer_documents(VOCABULARY_SIZE, MAX_TOKENS).items():
        _write(directory / name, _json_bytes(document))
    _write(directory / "config.json", _json_bytes(config_of(family)))
    return directory


def _values(weight: Weight, family: Family, seed: int) -> Array:
    """Values that depend on family, seed and tensor name only, not on the order of writing."""
    stream = zlib.crc32(f"{family.name}/{weight.name}".encode())
    random = np.random.default_rng([seed, stream])
    values = random.standard_normal(weight.shape, dtype=np.float32)
    values = values * np.float32(weight.scale) + np.float32(weight.offset)
    if weight.name == _output_of(family):
        # Logit 0 never wins against hundreds of random ones: no early end, no special token.
        values[: len(SPECIAL_TOKENS)] = 0.0
    result: Array = values.astype(np.float32)
    return result


def _output_of(family: Family) -> str:
    return "model.embed_tokens.weight" if family.tied else "lm_head.weight"


def _json_bytes(document: object) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o644)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: ``python -m hybridpd_testkit.checkpoints``."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridpd_testkit.checkpoints",
        description="Write a tiny random checkpoint (about 1 MB) that vLLM can serve.",
        epilog="example: python -m hybridpd_testkit.checkpoints "
        "--family nemotron-h --out /tmp/tiny-nemotron-h",
    )
    parser.add_argument("--family", required=True, choices=sorted(ALL_FAMILIES))
    parser.add_argument("--out", required=True, type=Path, help="directory, made when missing")
    parser.add_argument("--seed", type=int, help="default: the family's own, chosen for its output")
    options = parser.parse_args(arguments)
    print(write_checkpoint(options.family, options.out, options.seed))


if __name__ == "__main__":
    main()
