"""The chart against its sources: CRD copy, closed schema, values all used, README current."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridpd_operator.settings import from_environment

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "hybridpd"


def _paths(values: dict[str, Any], schema: dict[str, Any]) -> list[tuple[str, ...]]:
    """Every leaf of values.yaml; an object the schema leaves open counts as one leaf."""
    found: list[tuple[str, ...]] = []
    for name, value in values.items():
        part = schema["properties"][name]
        if isinstance(value, dict) and "properties" in part:
            found += [(name, *rest) for rest in _paths(value, part)]
        else:
            found.append((name,))
    return found


def _values() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def _schema() -> dict[str, Any]:
    return json.loads((CHART / "values.schema.json").read_text())


def _objects(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Every object of the schema that lists properties, with its dotted path."""
    found: list[tuple[str, dict[str, Any]]] = []
    if "properties" in schema:
        found.append((path, schema))
        for name, part in schema["properties"].items():
            found += _objects(part, f"{path}.{name}".lstrip("."))
    return found


def test_chart_crds_equal_their_source() -> None:
    sources = {path.name: path.read_text() for path in (ROOT / "crds").glob("*.yaml")}
    copies = {path.name: path.read_text() for path in (CHART / "files" / "crds").glob("*.yaml")}
    assert sources, "crds/ holds no definition"
    assert copies == sources, "run: cp crds/*.yaml charts/hybridpd/files/crds/"


def test_crds_leave_room_for_the_keep_annotation() -> None:
    """templates/crds.yaml adds the annotation by text, so the source must not have its own."""
    for path in (ROOT / "crds").glob("*.yaml"):
        text = path.read_text()
        assert len(re.findall(r"^metadata:\n", text, re.MULTILINE)) == 1
        assert "annotations" not in yaml.safe_load(text)["metadata"]


@pytest.mark.parametrize("path", [path for path, _ in _objects(_schema())])
def test_schema_is_closed(path: str) -> None:
    objects = dict(_objects(_schema()))
    if path != "global":
        assert objects[path]["additionalProperties"] is False


def test_values_and_schema_name_the_same_fields() -> None:
    values = {path[: len(path)] for path in _paths(_values(), _schema())}
    for path, part in _objects(_schema()):
        names = set(part["properties"]) - {"global"}
        at: Any = _values()
        for step in filter(None, path.split(".")):
            at = at[step]
        assert set(at) == names, path
    assert values


@pytest.mark.parametrize("value", ["resyncSeconds", "verifySeconds"])
@pytest.mark.parametrize("bound", ["minimum", "maximum"])
def test_what_the_schema_takes_the_operator_starts_with(value: str, bound: str) -> None:
    number = _schema()["properties"]["operator"]["properties"][value][bound]
    variable = f"HYBRIDPD_{value.removesuffix('Seconds').upper()}_SECONDS"
    images = {"HYBRIDPD_CONNECTOR_IMAGE": "c:1", "HYBRIDPD_ROUTER_IMAGE": "r:1"}
    from_environment({**images, variable: str(number)})


def test_no_pod_label_takes_the_place_of_one_of_ours() -> None:
    """The Deployment's selector would not match its own pods."""
    labels = _schema()["properties"]["operator"]["properties"]["podLabels"]
    refused = re.compile(labels["propertyNames"]["not"]["pattern"])
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    ours = re.findall(r"^((?:app\.kubernetes\.io|helm\.sh)/[a-z-]+): ", helpers, re.MULTILINE)
    assert len(ours) > 3
    assert all(refused.search(label) for label in ours)
    assert not refused.search("team")


def test_every_value_is_used_by_a_template() -> None:
    """A value no template reads is a promise the chart does not keep."""
    texts = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    image_fields = {"repository", "tag", "digest"}
    unused = []
    for path in _paths(_values(), _schema()):
        if path[-1] in image_fields and path[-2] == "image":
            used = f".Values.{'.'.join(path[:-1])} " in texts and f".image.{path[-1]}" in texts
        else:
            used = re.search(rf"\.Values\.{re.escape('.'.join(path))}\b", texts) is not None
        if not used:
            unused.append(".".join(path))
    assert unused == []


def test_templates_read_no_undeclared_value() -> None:
    known = {".".join(path[:end]) for path in _paths(_values(), _schema()) for end in (1, 2, 3, 4)}
    read: set[str] = set()
    for path in (CHART / "templates").iterdir():
        read |= set(re.findall(r"\.Values\.([A-Za-z.]+)", path.read_text()))
    assert read - known == set()


def test_readme_is_written_from_values() -> None:
    spec = importlib.util.spec_from_file_location(
        "values_readme", ROOT / "charts" / "values_readme.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    expected = module.readme((CHART / "values.yaml").read_text())
    assert (CHART / "README.md").read_text() == expected, (
        "run: python3 charts/values_readme.py --write"
    )


def test_readme_explains_every_value() -> None:
    readme = (CHART / "README.md").read_text()
    missing = [".".join(path) for path in _paths(_values(), _schema())]
    assert [path for path in missing if f"| `{path}` |" not in readme] == []


def test_chart_version_is_the_distribution_version() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == project["version"]
    assert chart["appVersion"] == project["version"]
