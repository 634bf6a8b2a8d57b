"""D runs out of blocks after the loads: requests are preempted, and nothing is lost or stays."""

from hybridpd_testkit.expectations import random_prompt
from hybridpd_testkit.pd_client import Pair, complete, evidence, require_nothing_left

# D has 25 usable blocks. A request loads into three state blocks and one attention page; later it
# needs a second page, which six such requests cannot all have.
IN_FLIGHT = 6
PROMPT_TOKENS = 60
MAX_TOKENS = 96


def test_vllm_preemption_after_the_load(pool):
    pair = Pair(*pool.engines("nemotron-h", "p1", "t1"))
    prompts = [random_prompt(PROMPT_TOKENS, 300 + index) for index in range(IN_FLIGHT)]
    expected = [complete(pair.prefill, prompt, MAX_TOKENS).tokens for prompt in prompts]
    before = pair.decode.metrics()
    answers = pair.complete_all(prompts, MAX_TOKENS)
    growth = pair.decode.metrics().since(before)
    assert [answer.tokens for answer in answers] == expected
    assert growth.total("vllm:num_preemptions_total") > 0
    counted = evidence(growth)
    assert (counted.loads, counted.failures) == (IN_FLIGHT, 0)
    require_nothing_left(pair.prefill, pair.decode)
