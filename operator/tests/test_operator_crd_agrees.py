"""The CRD against the dataclasses, the table of owned flags, and the table of violations.

Left out: what only an API server can tell (cost of CEL rules, their messages): the end-to-end
tests send every row of crd_violations.yaml as a server-side dry-run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from operator_world import World

from hybridpd_operator import names, reserved_args
from hybridpd_operator.observed import EngineSample
from hybridpd_operator.spec import Spec, parse_service
from hybridpd_operator.spec_fields import Nested
from hybridpd_operator.spec_roles import H200_PRODUCTS
from hybridpd_operator.validate import assess

ROOT = Path(__file__).resolve().parents[2]
CRD = yaml.safe_load((ROOT / "crds" / "hybridpd.dev_hybridpdservices.yaml").read_text())
VERSION = CRD["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
SPEC = SCHEMA["properties"]["spec"]
VIOLATIONS = yaml.safe_load((ROOT / "operator" / "tests" / "crd_violations.yaml").read_text())
#: What a schema says besides the values it takes.
ANNOTATIONS = ("description", "x-kubernetes-validations")


def nodes(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}" if path else name)
    for key, suffix in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], path + suffix)


def values_only(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without the parts that people read."""
    out = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    for key in ("items", "additionalProperties"):
        if key in out:
            out[key] = values_only(out[key])
    if "properties" in out:
        out["properties"] = {name: values_only(one) for name, one in out["properties"].items()}
    return out


def rules() -> list[tuple[str, dict[str, str]]]:
    return [
        (path, rule)
        for path, schema in nodes(SCHEMA, "")
        for rule in schema.get("x-kubernetes-validations", [])
    ]


def violating(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": row.get("metadata", {"name": "violation"}),
        "spec": row["spec"],
    }


def test_fields_types_bounds_enums_defaults_and_required_are_the_dataclasses() -> None:
    assert values_only(SPEC) == Nested(Spec).schema()


def test_names_are_the_operators() -> None:
    spec = CRD["spec"]
    assert (spec["group"], VERSION["name"]) == (names.GROUP, names.VERSION)
    assert (spec["names"]["kind"], spec["names"]["plural"]) == (names.KIND, names.PLURAL)
    assert CRD["metadata"]["name"] == f"{names.PLURAL}.{names.GROUP}"
    assert spec["names"]["shortNames"] == ["hpd"]
    assert spec["names"]["categories"] == ["all"]
    assert VERSION["subresources"] == {"status": {}}


def test_every_field_is_described() -> None:
    silent = [
        path
        for path, schema in nodes(SCHEMA, "")
        if not schema.get("description", "").endswith(".")
        and path not in ("metadata",)
        and not path.endswith(("[]", "{}"))
    ]
    assert silent == []


def test_the_schema_is_structural_and_bounded() -> None:
    """Every node has a type, every list and map of the spec a limit (CEL costs depend on it)."""
    for path, schema in nodes(SCHEMA, ""):
        assert "type" in schema or schema.get("x-kubernetes-int-or-string"), path
        if path.startswith("spec") and schema.get("type") == "array":
            assert "maxItems" in schema, path
        if path.startswith("spec") and "additionalProperties" in schema:
            assert "maxProperties" in schema, path
        if path.startswith("spec") and schema.get("type") == "string":
            assert "maxLength" in schema or "enum" in schema, path


def test_printer_columns_show_fields_that_exist() -> None:
    paths = {path for path, _ in nodes(SCHEMA, "")}
    for column in VERSION["additionalPrinterColumns"]:
        plain = re.sub(r"\[\?[^]]*\]", "[]", column["jsonPath"]).lstrip(".")
        assert plain in paths or plain.startswith("metadata."), column["name"]


def test_defaults_satisfy_the_schema_of_their_own_field() -> None:
    for path, schema in nodes(SPEC, "spec"):
        if "default" in schema:
            jsonschema.validate(schema["default"], values_only(schema))
            assert path != "spec"


def test_the_default_nodes_are_those_of_the_rule() -> None:
    in_rules = {
        product for _, rule in rules() for product in re.findall(r"'(NVIDIA-[^']+)'", rule["rule"])
    }
    assert in_rules == set(H200_PRODUCTS)


def test_the_longest_name_of_the_rule_is_the_operators() -> None:
    (limit,) = (
        int(found.group(1))
        for _, rule in rules()
        if (found := re.fullmatch(r"size\(self\.metadata\.name\) <= (\d+)", rule["rule"]))
    )
    assert limit == names.MAX_SERVICE_NAME


@pytest.mark.parametrize("field", ["engine", "prefill", "decode", "router"])
def test_the_rule_on_extra_args_knows_every_owned_flag(field: str) -> None:
    owned = reserved_args.OWNED_ROUTER_FLAGS if field == "router" else reserved_args.OWNED_FLAGS
    items = SPEC["properties"][field]["properties"]["extraArgs"]["items"]
    (rule,) = items["x-kubernetes-validations"]
    pattern = re.search(r"matches\('(.*)'\)", rule["rule"])
    assert pattern is not None
    refused = re.compile(pattern.group(1))
    for flag in owned:
        under = flag.name.replace("-", "_")
        for text in (f"--{flag.name}", f"--{under}=1", f"--no-{flag.name}", f"--{flag.name}.a=1"):
            assert refused.search(text), text
        if flag.short:
            assert refused.search(f"-{flag.short}"), flag.short
            assert refused.search(f"-{flag.short}=2"), flag.short
    for flag in (*reserved_args.GEOMETRY_FLAGS, reserved_args.Owned("max-num-seqs", "")):
        assert not refused.search(f"--{flag.name}"), flag.name


@pytest.mark.parametrize("field", ["engine", "prefill", "decode"])
def test_the_rule_on_env_knows_every_owned_variable(field: str) -> None:
    items = SPEC["properties"][field]["properties"]["env"]["items"]
    rule = items["x-kubernetes-validations"][0]["rule"]
    assert re.findall(r"'([^']+)'", rule) == [one.name for one in reserved_args.OWNED_ENV]


def test_every_rule_says_what_to_change_and_has_a_violation() -> None:
    here = Counter((path, rule["rule"]) for path, rule in rules())
    assert here
    missing = []
    for path, rule in rules():
        texts = [rule["message"], rule.get("messageExpression", "")]
        rows = [
            row
            for row in VIOLATIONS
            if row["at"] == path and any(_says(text, row["message"]) for text in texts)
        ]
        if not rows:
            missing.append((path, rule["message"]))
    assert missing == []


def _says(text: str, message: str) -> bool:
    """`message` is what `text` gives; an expression begins with a quoted literal."""
    literal = re.match(r"'([^']*)'", text)
    return message in text or bool(literal and message.startswith(literal.group(1)))


def test_every_violation_is_of_a_rule() -> None:
    at = {path for path, _ in rules()}
    assert [row["name"] for row in VIOLATIONS if row["at"] not in at] == []
    assert len({row["name"] for row in VIOLATIONS}) == len(VIOLATIONS)


@pytest.mark.parametrize("row", VIOLATIONS, ids=[row["name"] for row in VIOLATIONS])
def test_a_violation_is_refused_without_a_cluster_too(row: dict[str, Any]) -> None:
    """And breaks one rule only, so that the API server's answer is about that rule."""
    value = violating(row)
    parse_service(value)
    (problem,) = assess(value).spec_problems
    assert problem.field.startswith(row["at"].split(".")[0] or "metadata")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that refuses fields it does not name, as server-side apply does."""
    out = dict(schema)
    if "properties" in out:
        out["properties"] = {name: closed(one) for name, one in out["properties"].items()}
        out["additionalProperties"] = False
    if "items" in out:
        out["items"] = closed(out["items"])
    return out


@pytest.mark.parametrize(
    "patch",
    [
        {},
        {"prefill": {"tensorParallelSize": 3}},
        {"prefill": {"replicas": "many"}},
        {"model": {"id": "org/unheard-of"}, "router": {"kind": "None"}},
        {"decode": {"kvCacheMiB": 65536, "tensorParallelSize": 4}},
    ],
    ids=["ready", "incompatible", "invalid", "unknown", "unequal"],
)
def test_every_status_the_operator_writes_fits_the_schema(
    world: World, patch: dict[str, Any]
) -> None:
    schema = closed(SCHEMA["properties"]["status"])
    world.scraper.decode = EngineSample(
        "", names.DECODE, loads=3, load_failures=1, read_bytes=10, predicted_bytes=10
    )
    world.create(patch)
    world.run()
    jsonschema.validate(world.status, schema)
    world.settle(ready=False)
    jsonschema.validate(world.status, schema)
    world.settle()
    jsonschema.validate(world.status, schema)
    if "prefill" not in patch:
        assert "prefill" in world.status


def test_status_fields_and_conditions() -> None:
    status = SCHEMA["properties"]["status"]["properties"]
    assert status["conditions"]["x-kubernetes-list-map-keys"] == ["type"]
    engine = status["geometry"]["properties"]["prefill"]
    assert values_only(engine) == values_only(status["geometry"]["properties"]["decode"])
    assert values_only(status["prefill"]) == values_only(status["decode"])
