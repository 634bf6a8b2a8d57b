"""The operator reads `extraArgs` as vLLM's own parser does.

Nothing that vLLM takes for a flag of the operator's gets past it, in no spelling, and what it lets
pass means to it what it means to vLLM.
"""

import json

import pytest
from test_geometry_quantized_cache import ASKED

from hybridpd_operator.engine_settings import engine_settings
from hybridpd_operator.reserved_args import GEOMETRY_FLAGS, OWNED_FLAGS, flag_problems
from hybridpd_operator.spec import parse_service


def read_by_vllm(quantization):
    method = quantization.get("quant_method", "") if isinstance(quantization, dict) else None
    return isinstance(method, str) and method != "compressed-tensors"


pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and vLLM, while they are imported


@pytest.fixture(scope="module")
def parser():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def spelled(flags, parser):
    """Every option string of `flags` that the parser knows, and to which action it leads."""
    wanted = [f"--{one.name}" for one in flags] + [f"-{one.short}" for one in flags if one.short]
    known = parser._option_string_actions
    return {text: known[text] for text in wanted if text in known}


def test_vllm_owned_flags_are_refused_in_every_spelling(parser):
    owned = spelled(OWNED_FLAGS, parser)
    assert len(owned) > 50
    actions = {id(action) for action in owned.values()}
    every = {t for t, action in parser._option_string_actions.items() if id(action) in actions}
    missed = []
    for whole in every:
        first = 3 if whole.startswith("--") else 2
        # Cut short, and for one letter with its value glued on.
        for text in {*(whole[:end] for end in range(first, len(whole) + 1)), whole + "2"}:
            exact = parser._option_string_actions.get(text)
            read = [exact] if exact else [found[0] for found in parser._get_option_tuples(text)]
            takes = len(read) == 1 and id(read[0]) in actions
            if takes and not flag_problems([text], "args", "prefill"):
                missed.append(text)
    assert missed == []


def test_vllm_owned_flags_leave_all_others_to_the_user(parser):
    taken = {id(action) for action in spelled((*OWNED_FLAGS, *GEOMETRY_FLAGS), parser).values()}
    free = [t for t, action in parser._option_string_actions.items() if id(action) not in taken]
    assert len(free) > 200
    assert [text for text in free if flag_problems([text], "args", "prefill")] == []


A, B = '{"method": "ngram", "num_speculative_tokens": 3}', '{"num_speculative_tokens": 4}'


@pytest.mark.parametrize(
    "args",
    [
        ["--speculative-config", A],
        ["--speculative-config", A, "--speculative-config", B],
        ["--speculative-config", A, "--speculative-config.num_speculative_tokens", "2"],
        ["--speculative-config.num_speculative_tokens=2", "--speculative_config", A],
        ["-sc.method", "suffix", "--speculative-config.num_speculative_tokens", "5"],
        ["--speculative-config.method", "suffix", "-sc.num_speculative_tokens", "5"],
        ["-sc.method=ngram", "-sc.num_speculative_tokens", "5"],
        ["-sc", A],
    ],
)
def test_vllm_owned_flags_of_drafts_mean_what_vllm_takes_them_for(parser, args):
    said = parser.parse_args(args).speculative_config
    found = settings_of(args)
    told = said.get("method"), said.get("num_speculative_tokens", 0)
    assert (found.spec_method, found.spec_tokens) == told


@pytest.mark.parametrize(
    "args",
    [
        ["--hf-overrides", '{"a": 1}', "--hf-overrides", '{"b": 2}'],
        ["--hf-overrides", '{"a": 1}', "--hf-overrides.b=2"],
        ["--hf-overrides.a.b", "1", "--hf-overrides.a.c", "2", "--hf-overrides.a.b", "3"],
        ["--hf-overrides.kinds+", "x,y", "--hf-overrides.kinds+=z"],
        ["--hf-overrides.a.b=1", "--hf-overrides.a=2", "--hf-overrides.t=text"],
    ],
)
def test_vllm_owned_flags_of_the_model_mean_what_vllm_takes_them_for(parser, args):
    assert json.loads(json.dumps(settings_of(args).hf_overrides)) == (
        parser.parse_args(args).hf_overrides
    )


def settings_of(args):
    """What the operator reads; the first argument comes from the engine, the others from a role."""
    cut = next((i for i, text in enumerate(args) if i and text.startswith("-")), len(args))
    service = parse_service(
        {
            "apiVersion": "hybridpd.dev/v1alpha1",
            "kind": "HybridPDService",
            "metadata": {"name": "demo"},
            "spec": {
                "model": {"id": "org/model"},
                "engine": {"extraArgs": args[:cut]},
                "prefill": {"extraArgs": args[cut:]},
            },
        }
    )
    found, unreadable = engine_settings(service.spec, "prefill")
    assert unreadable == ()
    return found


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [(asked, dtype) for asked, dtype in ASKED if read_by_vllm(asked)],
)
def test_vllm_owned_flags_left_out_mean_what_a_checkpoint_asks_for(quantization, dtype):
    """--kv-cache-dtype auto. Of compressed-tensors each layer asks, see quantized_cache."""
    from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

    said = get_kv_cache_quant_algo_string(quantization) or "auto"
    assert said.removesuffix("_e4m3") == dtype
