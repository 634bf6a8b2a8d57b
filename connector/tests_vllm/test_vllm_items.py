"""Images and other items of a prompt, on vLLM's own request objects, without an engine.

With its processor cache and prefix caching off, vLLM names items by a counter of its process and
not by what is in them: P and D count apart, and one name may stand for two images.
"""

import types

import pytest

PROMPT = [11, 7, 7, 7, 12]


def config(*, multimodal=True, cache_gb=4.0, prefix_caching=True, pruned=None):
    settings = types.SimpleNamespace(mm_processor_cache_gb=cache_gb, video_pruning_rate=pruned)
    settings = settings if multimodal else None
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(multimodal_config=settings),
        cache_config=types.SimpleNamespace(enable_prefix_caching=prefix_caching),
    )


def request_with(name, place=(1, 3), **more):
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    item = MultiModalFeatureSpec(
        data=None, modality="image", identifier=name, mm_position=PlaceholderRange(*place)
    )
    items = [item] if name else []
    return Request("r", list(PROMPT), SamplingParams(max_tokens=9), None, mm_features=items, **more)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch, while it is imported
@pytest.mark.parametrize(
    ("settings", "named_by_content"),
    [
        ({}, True),
        ({"multimodal": False, "cache_gb": 0, "prefix_caching": False}, True),
        ({"cache_gb": 0}, True),
        ({"prefix_caching": False}, True),
        ({"cache_gb": 0, "prefix_caching": False}, False),
        ({"cache_gb": 0.0, "prefix_caching": None}, False),
    ],
)
def test_vllm_items_that_are_not_named_by_content_are_not_handed_over(settings, named_by_content):
    from hybridpd_connector.connector import facts_of
    from hybridpd_connector.vllm_items import names_items_by_content, why_items_stay

    by_content = names_items_by_content(config(**settings))
    assert by_content is named_by_content
    assert bool(why_items_stay(config(**settings))) is not by_content
    facts = facts_of(request_with("renderer0-mm-1-image-0"), with_items=by_content)
    assert facts.multimodal == ("renderer0-mm-1-image-0@1+3",)
    assert facts.token_ids == (PROMPT if named_by_content else None)
    # A request without items is as ever.
    assert facts_of(request_with(""), with_items=by_content).token_ids == PROMPT


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch, while it is imported
@pytest.mark.parametrize(
    ("place", "handed_over"), [((0, 3), True), ((1, 3), True), ((1, 4), False), ((4, 1), False)]
)
def test_vllm_items_at_the_end_of_a_prompt_keep_it(place, handed_over):
    """The token that D computes would be a part of the item, and P would see the item without."""
    from hybridpd_connector.connector import facts_of

    facts = facts_of(request_with("content", place))
    assert facts.token_ids == (PROMPT if handed_over else None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch, while it is imported
def test_vllm_items_do_not_matter_to_a_prompt_that_goes_on():
    """Streamed input: a token that is taken off the end would be missing in the middle."""
    from hybridpd_connector.connector import facts_of

    assert facts_of(request_with("", resumable=True)).token_ids is None
    assert facts_of(request_with("", resumable=False)).token_ids == PROMPT


@pytest.mark.parametrize("rate", [None, 0.0, 0.5])
def test_vllm_items_of_engines_that_prune_videos_are_not_handed_over(rate):
    from hybridpd_connector.vllm_items import why_items_stay

    why = why_items_stay(config(pruned=rate))
    assert ("leave it out" in why) is bool(rate)
    assert why_items_stay(config(pruned=rate, multimodal=False)) == ""


def test_vllm_items_are_named_in_every_version_as_is_looked_for():
    """The rule is vLLM's own: when it changes, ``names_items_by_content`` must."""
    import inspect

    from vllm.renderers.base import BaseRenderer

    rule = inspect.getsource(BaseRenderer._process_mm_uuids)
    assert "multimodal_config.mm_processor_cache_gb == 0" in rule
    assert "not self.config.cache_config.enable_prefix_caching" in rule
