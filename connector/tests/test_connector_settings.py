"""The table of settings is what the engine's code reads: the same keys, the same defaults."""

import ast
import importlib
import pathlib

import pytest

import hybridpd_connector
from hybridpd_connector.settings import SETTINGS
from hybridpd_connector.vllm_compat import UnsupportedEngineError, check_flag, check_names

SOURCE = pathlib.Path(hybridpd_connector.__file__).parent / "vllm_engine.py"
READERS = ("extra", "get_from_extra_config")


def values_by_name(tree):
    """What names of the module stand for: its literal constants and its imports from this package.

    The module itself needs vLLM; what it imports of ours mostly does not.
    """
    values = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                values[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "hybridpd_connector."
        ):
            try:
                module = importlib.import_module(node.module)
            except ImportError:
                continue
            values.update({a.asname or a.name: getattr(module, a.name, None) for a in node.names})
    return values


def settings_in_code():
    tree = ast.parse(SOURCE.read_text())
    values = values_by_name(tree)
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in READERS:
                key, default = (
                    values[a.id] if isinstance(a, ast.Name) else ast.literal_eval(a)
                    for a in node.args
                )
                found[key] = default
    return found


def test_the_table_is_what_the_code_reads():
    found = settings_in_code()
    assert len(found) >= 6
    assert {setting.name: setting.default for setting in SETTINGS} == found


def test_every_setting_is_explained():
    for setting in SETTINGS:
        assert len(setting.meaning.split()) > 4
        assert not setting.meaning.endswith(".")
        assert setting.side in ("prefill", "decode", "both")


@pytest.mark.parametrize("value", [None, "UCX", [], [1], [""]])
def test_other_lists_of_names_are_refused(value):
    assert check_names("backends", ["UCX", "POSIX"]) == ("UCX", "POSIX")
    with pytest.raises(UnsupportedEngineError, match="backends"):
        check_names("backends", value)


@pytest.mark.parametrize("value", [None, "true", 1])
def test_other_switches_are_refused(value):
    assert check_flag("require_fast_link", True) is True
    with pytest.raises(UnsupportedEngineError, match="require_fast_link"):
        check_flag("require_fast_link", value)
