"""A prefill ends one token early: on vLLM's own request objects, without an engine."""

import pytest

PROMPT = [11, 12, 13, 14]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch, while it is imported
def test_vllm_truncation_leaves_the_clients_list_alone():
    """In one process, n samples and the client's answer share one list of prompt ids."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from hybridpd_connector.connector import drop_last_token, facts_of

    prompt = list(PROMPT)
    parameters = SamplingParams(max_tokens=9)
    children = [Request(f"{index}_r", prompt, parameters, None) for index in range(2)]
    for child in children:
        assert list(facts_of(child).token_ids) == PROMPT
        drop_last_token(child)
        assert child.prompt_token_ids == list(child.all_token_ids) == PROMPT[:-1]
        assert (child.num_prompt_tokens, child.num_tokens, child.max_tokens) == (3, 3, 1)
    assert prompt == PROMPT
