"""Models that are known and not moved, with one sentence each that says why.

A model that is missing here and in `model_config.READERS` is not known at all. These are: vLLM
serves them, and what it caches for them is more than full attention and one state per request.
"""

from collections.abc import Mapping
from types import MappingProxyType

from hybridpd_geometry.errors import UnsupportedModelError

MOVED = "full or latent attention and at most one kind of recurrent state, both moved whole"

LINEAR = (
    "Its linear-attention layers keep a state that is not described here, so that no shard of it "
    "could be checked or cut to another TP size."
)
RING = (
    "Its compressed attention keeps the latest tokens in a ring buffer, one block per request, and "
    "the plan has no pages of that kind."
)
INDEX = (
    "Its sparse attention keeps an index of the tokens beside the attention cache, and the index "
    "has a page size of its own."
)
WINDOW = (
    "Its sliding-window layers give back the blocks behind the window while a request runs, and "
    "the plan reads every token of every attention layer."
)
PREFIX_LM = (
    "The tokens of its prompt look at those behind them too, and what prefill hands over is "
    "computed without the last one."
)
NO_ATTENTION = (
    "A model of state layers only has no attention blocks, by which two engines pair their tokens."
)

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "minimax",
                "minimax_text_01",
                "minimax_m1",
                "minimax_vl_01",
                "bailing_hybrid",
                "bailing_moe_linear",
            ),
            LINEAR,
        ),
        **dict.fromkeys(
            (
                "deepseek_v41",
                "glm5_next",
                "glm5_next_text",
                "qwen4_exp",
                "qwen4_exp_text",
            ),
            RING,
        ),
        **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), INDEX),
        "hrm_text": PREFIX_LM,
        **dict.fromkeys(
            (
                "cohere2",
                "deepseek_v4",
                "gemma2",
                "gemma3",
                "gemma3_text",
                "gpt_oss",
                "llama4",
                "llama4_text",
            ),
            WINDOW,
        ),
    }
)
"""Model type -> why it is not moved."""


def refuse(field: str, got: object, reason: str) -> UnsupportedModelError:
    """The error for a model whose cache is not moved; `reason` is one sentence."""
    return UnsupportedModelError(field, MOVED, got, reason)
