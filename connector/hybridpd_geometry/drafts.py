"""Which hybrid models may draft tokens: what was seen to be right, on GPUs, and nothing else.

What a state looks like while tokens are drafted is decided by the kernels of its kind, by vLLM's
caching mode and by its version, so that one run says nothing about another kind (ADR 14).
"""

from collections.abc import Collection
from dataclasses import dataclass

SHOWN_METHODS = ("ngram", "ngram_gpu")
"""Speculative methods; `suffix` drafts from the prompt too, and has not been seen."""

SHOWN_STATES = ("MAMBA2",)
"""Kinds of state, by vLLM's names (`MambaSpec.mamba_type`)."""

SHOWN_MODES = ("none",)
"""Values of vLLM's `mamba_cache_mode`: "align", of prefix caching, has not been seen."""

SHOWN_RELEASES = ((0, 32),)
"""(major, minor) of vLLM."""


@dataclass(frozen=True)
class Unshown:
    """Why an engine of a hybrid model may not draft. `field`: the setting that can be changed."""

    field: str
    expected: str
    got: str
    instead: str = ""

    @property
    def reason(self) -> str:
        """Why, and the ways out."""
        first = f"{self.instead}, or " if self.instead else ""
        return f"no test has shown its tokens right: {first}remove --speculative-config"


def unshown_drafts(
    method: str, states: Collection[str], mode: str, release: tuple[int, int] | None
) -> Unshown | None:
    """What of a hybrid model's drafting has not been seen to be right on a GPU; None: all has.

    `states`: vLLM's names of the kinds of state. `release`: None where it is not known.
    """
    if others := [name for name in states if name not in SHOWN_STATES]:
        return Unshown(
            "speculative_config",
            f"none for a model with other states than {' or '.join(SHOWN_STATES)}",
            f"{method} with {', '.join(dict.fromkeys(others))}",
        )
    if method not in SHOWN_METHODS:
        expected = f"{' or '.join(SHOWN_METHODS)} for a hybrid model"
        return Unshown("speculative_config.method", expected, method, "use ngram")
    if mode not in SHOWN_MODES:
        expected = f"{' or '.join(SHOWN_MODES)} where a hybrid model drafts tokens"
        return Unshown("mamba_cache_mode", expected, mode, "set --no-enable-prefix-caching")
    if release is not None and release not in SHOWN_RELEASES:
        known = " or ".join(".".join(map(str, one)) for one in SHOWN_RELEASES)
        expected = f"{known} where a hybrid model drafts tokens"
        got = ".".join(map(str, release))
        return Unshown("vllm.version", expected, got, f"use an image with vLLM {known}")
    return None
