"""The only place that reads and writes YAML: files in, plain data out, and back."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import yaml

from hybridpd_operator.errors import DocumentError
from hybridpd_operator.names import KIND


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
        found = [_plain(one) for one in yaml.load_all(text, _Loader) if one is not None]
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        raise DocumentError(path, "YAML or JSON", " ".join(str(error).split())) from error
    except RecursionError as error:
        raise DocumentError(path, "YAML or JSON", "lists or objects nested too deeply") from error
    documents: list[Mapping[str, Any]] = []
    for document in found:
        if not isinstance(document, Mapping):
            raise DocumentError(path, "objects", type(document).__name__)
        documents += _opened(document, path)
    return documents


class _Loader(yaml.SafeLoader):
    """Reads 2026-01-31 as text, as the API server does; JSON has no dates."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _plain(document: Any) -> Any:
    """The document as JSON has it: keys are text. Raises ValueError or TypeError for other data."""
    return json.loads(json.dumps(document))


def _opened(document: Mapping[str, Any], path: str) -> list[Mapping[str, Any]]:
    items = document.get("items")
    if document.get("kind") not in ("List", f"{KIND}List") or not isinstance(items, list):
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
