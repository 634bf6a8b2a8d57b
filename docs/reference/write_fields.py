"""Writes docs/reference/fields.md from the definition in crds/.

`python docs/reference/write_fields.py` replaces the file; a test fails while it is not current.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = Path(__file__).resolve().parent / "fields.md"

HEADER = """# Fields of a HybridPDService

Written from `crds/` by `docs/reference/write_fields.py`. `kubectl explain hpd.spec` says the same.
A field without a default may be left out unless it is marked required. The rules under a field are
checked by the API server, also in a server-side dry-run.
"""


def rows(schema: dict[str, Any], path: str, required: bool = False) -> Iterator[str]:
    """One list entry for this field, then its children's."""
    yield _entry(schema, path, required)
    children = schema.get("items", schema)
    found = [*_rules(schema), *(_rules(children) if children is not schema else ())]
    yield from (f"  - rule: {_line(rule['message'])}" for rule in found)
    suffix = "[]" if "items" in schema else ""
    for name, child in children.get("properties", {}).items():
        yield from rows(child, f"{path}{suffix}.{name}", name in children.get("required", []))


def _rules(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for rule in schema.get("x-kubernetes-validations", []):
        if "message" in rule:
            yield rule


def _entry(schema: dict[str, Any], path: str, required: bool) -> str:
    kind = schema.get("type", "integer or string")
    if "enum" in schema:
        kind = " / ".join(map(str, schema["enum"]))
    bounds = [
        f"{word} {schema[key]}"
        for key, word in (("minimum", "from"), ("maximum", "to"))
        if key in schema
    ]
    parts = [kind, *([" ".join(bounds)] if bounds else [])]
    if required:
        parts.append("required")
    if schema.get("default") not in (None, {}):
        parts.append(f"default `{json.dumps(schema['default'])}`")
    return f"- `{path}` ({', '.join(parts)}): {_line(schema.get('description', ''))}"


def _line(text: str) -> str:
    return " ".join(text.split())


def document() -> str:
    """The whole page."""
    parts = [HEADER]
    for source in sorted((ROOT / "crds").glob("*.yaml")):
        (version,) = yaml.safe_load(source.read_text())["spec"]["versions"]
        schema = version["schema"]["openAPIV3Schema"]
        parts.append("\n".join(f"- rule: {_line(rule['message'])}" for rule in _rules(schema)))
        for name in ("spec", "status"):
            lines = list(rows(schema["properties"][name], name))
            parts.append(f"\n## `{name}`\n\n" + "\n".join(lines))
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(document())
