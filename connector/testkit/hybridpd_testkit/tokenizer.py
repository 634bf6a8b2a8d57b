"""A small offline tokenizer: printable characters merged into made-up syllables.

The vocabulary is a list of pieces in a fixed order, so ids never change between runs:
four special tokens, newline and the printable ASCII characters, then ``MERGES`` byte-pair
merges ("b"+"a", " "+"ba", "ba"+"be", …). Every ordinary token decodes to printable text, so a
completion of a random model reads as nonsense words and never as broken UTF-8.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

UNKNOWN, BEGIN, END, PAD = "<unk>", "<s>", "</s>", "<pad>"
SPECIAL_TOKENS = (UNKNOWN, BEGIN, END, PAD)
_CHARACTERS = ("\n", *(chr(code) for code in range(32, 127)))
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
BASE_VOCABULARY_SIZE = len(SPECIAL_TOKENS) + len(_CHARACTERS)


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs to merge, each made only of pieces that are already in the vocabulary."""
    syllables = [c + v for c in _CONSONANTS for v in _VOWELS]
    yield from itertools.product(_CONSONANTS, _VOWELS)
    yield from ((" ", syllable) for syllable in syllables)
    yield from itertools.product(syllables, syllables)


def tokenizer_documents(vocabulary_size: int, max_tokens: int) -> dict[str, Any]:
    """File name → JSON document of a tokenizer with exactly ``vocabulary_size`` entries."""
    merge_count = vocabulary_size - BASE_VOCABULARY_SIZE
    merges = list(itertools.islice(_merges(), max(merge_count, 0)))
    if merge_count < 0 or len(merges) != merge_count:
        raise ValueError(
            f"vocabulary_size: expected {BASE_VOCABULARY_SIZE} or more, got {vocabulary_size}"
        )
    pieces = (*SPECIAL_TOKENS, *_CHARACTERS, *(left + right for left, right in merges))
    special = [_added_token(index, token) for index, token in enumerate(SPECIAL_TOKENS)]
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": UNKNOWN,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {piece: index for index, piece in enumerate(pieces)},
                "merges": [list(pair) for pair in merges],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_tokens,
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": PAD,
            "unk_token": UNKNOWN,
            "clean_up_tokenization_spaces": False,
        },
    }


def _added_token(index: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, "special": True, **flags}
