"""Images and other items of prompts: which prompts that hold some can be handed over.

A hand-over ends one token before the prompt does, and D never looks at the items of what it loads.
So their names must tell one item from another, nothing that D needs may come from looking at them,
and the token that D computes may not be a part of one.
"""

from typing import Any


def names_items_by_content(vllm_config: Any) -> bool:
    """Does vLLM name images and other items by a hash of what they are? With both caches off it
    counts them, so that the two engines have other names for one item, and one for two."""
    items = _items_config(vllm_config)
    counted = items is not None and not getattr(items, "mm_processor_cache_gb", 1)
    return not counted or bool(vllm_config.cache_config.enable_prefix_caching)


def why_items_stay(vllm_config: Any) -> str:
    """Why prompts with items are computed on D, and the way out; empty when they are handed over.

    An engine that prunes videos learns the positions of all tokens behind one while it looks at it.
    """
    if not names_items_by_content(vllm_config):
        return (
            "with --mm-processor-cache-gb 0 and --no-enable-prefix-caching vLLM does not name "
            "items by their content; leave one of the two out"
        )
    if getattr(_items_config(vllm_config), "video_pruning_rate", None):
        return (
            "with --video-pruning-rate the positions of tokens are known only to the engine that "
            "has looked at the video; leave it out"
        )
    return ""


def items_of(request: Any) -> tuple[str, ...]:
    """Content hash and place of each multimodal item."""
    items = getattr(request, "mm_features", None)
    if not items:
        return ()
    return tuple(
        f"{item.identifier}@{item.mm_position.offset}+{item.mm_position.length}" for item in items
    )


def ends_in_item(request: Any) -> bool:
    """Is the last token of the prompt a part of an item? Some models let all tokens of an item look
    at each other: without the last one, the state of the others would be another."""
    items = getattr(request, "mm_features", None) or ()
    ends = (item.mm_position.offset + item.mm_position.length for item in items)
    return any(end >= request.num_prompt_tokens for end in ends)


def _items_config(vllm_config: Any) -> Any:
    return getattr(getattr(vllm_config, "model_config", None), "multimodal_config", None)
