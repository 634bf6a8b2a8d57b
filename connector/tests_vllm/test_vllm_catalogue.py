"""The operator's bundled catalogue and flag tables against the installed transformers and vLLM.

No engine is started. The catalogue's arithmetic is tested without these packages
(operator/tests/test_operator_catalogue.py).
"""

import dataclasses

import pytest
from transformers import AutoConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from hybridpd_geometry import facts_from_config
from hybridpd_operator import reserved_args
from hybridpd_operator.catalogue import entries

#: Fields of config.json that transformers keeps under other names.
RENAMED = {"architectures", "hybrid_override_pattern", "full_attention_interval", "dtype"}


def built(entry):
    return AutoConfig.for_model(**entry.config)


@pytest.mark.parametrize("entry", entries(), ids=[entry.name for entry in entries()])
def test_transformers_reads_every_field(entry):
    config = built(entry)
    read = {key: getattr(config, key) for key in entry.config if key not in RENAMED}
    assert read == {key: value for key, value in entry.config.items() if key not in RENAMED}


@pytest.mark.parametrize("entry", entries(), ids=[entry.name for entry in entries()])
def test_fields_said_to_be_defaults_are_the_defaults(entry):
    plain = AutoConfig.for_model(entry.config["model_type"])
    assert {key: getattr(plain, key) for key in entry.defaults} == {
        key: entry.config[key] for key in entry.defaults
    }


@pytest.mark.parametrize("entry", entries(), ids=[entry.name for entry in entries()])
def test_what_transformers_writes_gives_the_same_facts(entry):
    """A checkpoint saved by this transformers has other names for layers; the facts are equal."""
    written = {**built(entry).to_dict(), "dtype": entry.config["dtype"]}
    ours = facts_from_config(entry.config)
    theirs = facts_from_config(written)
    assert dataclasses.asdict(theirs) == dataclasses.asdict(ours)


@pytest.fixture(scope="module")
def known_flags():
    """vLLM's flags without dashes: long name → short names."""
    parser = make_arg_parser(FlexibleArgumentParser())
    flags = {}
    for action in parser._actions:
        longs = [o[2:] for o in action.option_strings if o.startswith("--")]
        shorts = [o[1:] for o in action.option_strings if not o.startswith("--")]
        for name in longs:
            flags[name] = shorts
    return flags


def test_every_flag_we_speak_of_exists_with_its_short_name(known_flags):
    for owned in (*reserved_args.OWNED_FLAGS, *reserved_args.GEOMETRY_FLAGS):
        assert owned.name in known_flags, owned.name
        assert [owned.short] == (known_flags[owned.name] or [None]), owned.name


def test_no_other_flag_of_vllm_is_refused(known_flags):
    """A whole flag must not look like the abbreviation of one that we own."""
    ours = {one.name for one in (*reserved_args.OWNED_FLAGS, *reserved_args.GEOMETRY_FLAGS)}
    others = [name for name in known_flags if name.removeprefix("no-") not in ours]
    refused = [n for n in others if reserved_args.flag_problems([f"--{n}"], "args", "prefill")]
    assert len(others) > 150
    assert refused == []


def test_vllm_reads_abbreviations_so_we_have_to(known_flags):
    parser = make_arg_parser(FlexibleArgumentParser())
    assert parser.parse_args(["--tensor-par", "4"]).tensor_parallel_size == 4
    assert parser.parse_args(["--tensor_parallel_size=2"]).tensor_parallel_size == 2
    assert "tensor-par" not in known_flags
