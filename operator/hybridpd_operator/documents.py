"""The only place that reads and writes YAML: files in, plain data out, and back."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import yaml

from hybridpd_operator.errors import DocumentError


def read(path: str, standard_input: TextIO) -> list[Mapping[str, Any]]:
    """Every document of a file (`-`: standard input). `List` objects are opened.

    Raises DocumentError when the file cannot be read, is no YAML, or holds something other than
    objects.
    """
    try:
        text = standard_input.read() if path == "-" else Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(path, "a readable text file", str(error)) from error
    try:
        found = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise DocumentError(path, "YAML or JSON", " ".join(str(error).split())) from error
    documents: list[Mapping[str, Any]] = []
    for document in found:
        if not isinstance(document, Mapping):
            raise DocumentError(path, "objects", type(document).__name__)
        documents += _opened(document, path)
    return documents


def _opened(document: Mapping[str, Any], path: str) -> list[Mapping[str, Any]]:
    items = document.get("items")
    if document.get("kind") != "List" or not isinstance(items, list):
        return [document]
    if not all(isinstance(item, Mapping) for item in items):
        raise DocumentError(path, "objects in a List", "something else")
    return items


def to_yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    """One YAML document per object, keys in their order."""
    return yaml.dump_all(
        [json.loads(json.dumps(document)) for document in documents],
        Dumper=_Indented,
        sort_keys=False,
        default_flow_style=False,
        width=100,
        explicit_start=True,
    )


def to_json(documents: Iterable[Mapping[str, Any]]) -> str:
    """One JSON object after the other, as `jq` reads them."""
    return "".join(json.dumps(document, indent=2) + "\n" for document in documents)


class _Indented(yaml.SafeDumper):
    """List items indented below their key, as people write them."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)
