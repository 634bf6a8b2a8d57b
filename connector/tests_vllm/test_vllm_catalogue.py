"""The operator's bundled catalogue and flag tables against the installed transformers and vLLM.

No engine is started; one process imports both packages and tells what they say. The catalogue's
arithmetic is tested without them (operator/tests/test_operator_catalogue.py).
"""

import dataclasses
import json
import subprocess
import sys

import pytest

from hybridpd_geometry import facts_from_config
from hybridpd_operator import reserved_args
from hybridpd_operator.catalogue import entries

ENTRIES = pytest.mark.parametrize("entry", entries(), ids=[entry.name for entry in entries()])
#: Fields of config.json that transformers keeps under other names.
RENAMED = {"architectures", "hybrid_override_pattern", "full_attention_interval", "dtype"}

PROGRAM = (
    f"RENAMED = {RENAMED}\n"
    + """
import json, sys
from transformers import AutoConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

wanted = json.load(sys.stdin)
parser = make_arg_parser(FlexibleArgumentParser())
flags = {}
for action in parser._actions:
    shorts = [o[1:] for o in action.option_strings if not o.startswith("--")]
    flags.update({o[2:]: shorts for o in action.option_strings if o.startswith("--")})

def say(model_type, fields, **config):
    made = AutoConfig.for_model(model_type, **config)
    return {field: shown(getattr(made, field), config.get(field)) for field in fields}

def shown(value, given):
    # A config inside the config is shown by the fields that were given.
    if isinstance(given, dict) and not isinstance(value, dict):
        return {key: getattr(value, key) for key in given if key not in RENAMED}
    return value

print("ANSWER" + json.dumps({
    "flags": flags,
    "abbreviated": [
        parser.parse_args(args).tensor_parallel_size
        for args in (["--tensor-par", "4"], ["--tensor_parallel_size=2"], ["-tp=8"])
    ],
    "read": {n: say(fields=one["fields"], **one["config"]) for n, one in wanted.items()},
    "defaults": {
        n: say(one["config"]["model_type"], one["defaults"]) for n, one in wanted.items()
    },
    "written": {n: AutoConfig.for_model(**one["config"]).to_dict() for n, one in wanted.items()},
}, default=str))
"""
)


@pytest.fixture(scope="module")
def installed():
    """What the installed packages say about every entry and flag."""
    wanted = {
        entry.name: {
            "config": dict(entry.config),
            "fields": [key for key in entry.config if key not in RENAMED],
            "defaults": list(entry.defaults),
        }
        for entry in entries()
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.rpartition("ANSWER")[2])


def in_new_words(config):
    """The config without fields that transformers renames, and with its own words for layers."""
    words = {"mamba": "linear_attention", "attention": "full_attention"}
    shown = {key: value for key, value in config.items() if key not in RENAMED}
    for key, value in shown.items():
        if isinstance(value, dict):
            shown[key] = in_new_words(value)
        elif key == "layer_types":
            shown[key] = [words.get(kind, kind) for kind in value]
    return shown


@ENTRIES
def test_transformers_reads_every_field(entry, installed):
    assert installed["read"][entry.name] == in_new_words(entry.config)


@ENTRIES
def test_fields_said_to_be_defaults_are_the_defaults(entry, installed):
    assert installed["defaults"][entry.name] == {key: entry.config[key] for key in entry.defaults}


@ENTRIES
def test_what_transformers_writes_gives_the_same_facts(entry, installed):
    """A checkpoint saved by this transformers has other names for layers; the facts are equal."""
    written = dict(installed["written"][entry.name])
    if "dtype" in entry.config:
        written["dtype"] = entry.config["dtype"]
    theirs, ours = facts_from_config(written), facts_from_config(entry.config)
    if (
        "vocab_size" not in entry.config and "text_config" not in entry.config
    ):  # the entry's source does not state it
        theirs = dataclasses.replace(theirs, vocab=None)
    assert dataclasses.asdict(theirs) == dataclasses.asdict(ours)


def test_every_flag_we_speak_of_exists_with_its_short_name(installed):
    flags = installed["flags"]
    for owned in (*reserved_args.OWNED_FLAGS, *reserved_args.GEOMETRY_FLAGS):
        assert owned.name in flags, owned.name
        assert flags[owned.name] == ([owned.short] if owned.short else []), owned.name


def test_no_other_flag_of_vllm_is_refused(installed):
    """A whole flag must not look like the abbreviation of one that we own."""
    ours = {one.name for one in (*reserved_args.OWNED_FLAGS, *reserved_args.GEOMETRY_FLAGS)}
    others = [name for name in installed["flags"] if name.removeprefix("no-") not in ours]
    refused = [n for n in others if reserved_args.flag_problems([f"--{n}"], "args", "prefill")]
    assert len(others) > 150
    assert refused == []


def test_vllm_reads_abbreviations_and_underscores_so_we_have_to(installed):
    assert installed["abbreviated"] == [4, 2, 8]
