"""`hybridpd plan`: what it prints, and the exit codes that pipelines rely on.

The text of every documented example and of every file in plan_inputs is a golden file
(`--update-golden` writes them); children are checked one by one in the tests of the manifests.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridpd_operator import cli, report
from hybridpd_operator.plan import render

ROOT = Path(__file__).resolve().parents[2]
INPUTS = ROOT / "operator" / "tests" / "plan_inputs"
FILES = sorted([*(ROOT / "docs" / "examples").glob("*.yaml"), *INPUTS.glob("*.yaml")])
EXIT_CODES = {
    "incompatible": cli.EXIT_INCOMPATIBLE,
    "invalid": cli.EXIT_BAD_INPUT,
    "unknown": cli.EXIT_UNKNOWN,
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONNECTOR", "ROUTER", "ENGINE"):
        monkeypatch.delenv(f"HYBRIDPD_{name}_IMAGE", raising=False)


def run(
    capsys: pytest.CaptureFixture[str], path: Path | str, *arguments: str
) -> tuple[int, str, str]:
    code = cli.main(["plan", "-f", str(path), *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_text_of_a_file(path: Path, capsys: pytest.CaptureFixture[str], golden: Any) -> None:
    code, out, err = run(capsys, path)
    assert (code, err) == (EXIT_CODES.get(path.stem, cli.EXIT_COMPATIBLE), "")
    for revision in re.findall(r"at revision (\w+)", out):
        out = out.replace(revision, "REVISION")
    golden.check(f"plan/{path.stem}.txt", out)


def test_the_exit_codes_are_what_the_help_says(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for code in (0, 1, 2, 3):
        assert f"\n  {code}  " in text
    assert "hybridpd plan -f service.yaml" in text


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_programs_get_the_verdict_and_the_whole_children(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, ROOT / "docs" / "examples" / "nemotron-3-nano.yaml", "-o", form)
    assert code == 0
    data = json.loads(out) if form == "json" else yaml.safe_load(out)
    assert data["verdict"] == "Compatible"
    assert data["problems"] == []
    assert data["geometry"]["decode"]["tensorParallelSize"] == 2
    assert data["accelerators"] == {
        "resource": "nvidia.com/gpu",
        "prefill": 2,
        "decode": 2,
        "total": 4,
    }
    sets = [child for child in data["children"] if child["kind"] == "StatefulSet"]
    assert [child["spec"]["replicas"] for child in sets] == [2, 1]
    for child in sets:
        assert child["metadata"]["labels"]["hybridpd.dev/revision"] == data["revision"]


def test_json_and_yaml_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    for path in FILES:
        _, as_yaml, _ = run(capsys, path, "-o", "yaml")
        _, as_json, _ = run(capsys, path, "--output=json")
        documents = list(yaml.safe_load_all(as_yaml))
        assert documents == json.loads("[" + as_json.replace("}\n{", "},\n{") + "]")


def test_problems_are_data_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, INPUTS / "incompatible.yaml", "-o", "yaml")
    assert code == cli.EXIT_INCOMPATIBLE
    first, second = yaml.safe_load_all(out)
    assert [one["reason"] for one in first["problems"]] == ["TensorParallelSize", "MaxModelLen"]
    assert [one["reason"] for one in second["problems"]] == [
        "ReservedFlag",
        "ReservedEnv",
        "ImpossibleEngine",
        "LayoutMismatch",
    ]
    for data in (first, second):
        assert data["verdict"] == "Incompatible"
        assert data["children"] == []


def test_standard_input_and_other_objects(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "examples" / "falcon-h1.yaml").read_text()
    other = "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n---\n---\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(other + text))
    code, out, _ = run(capsys, "-")
    assert code == 0
    assert out.startswith("falcon-h1: Compatible")


def test_a_config_map_elsewhere_leaves_the_model_unknown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    items = yaml.safe_load((INPUTS / "config-map.yaml").read_text())["items"]
    path = tmp_path / "service.yaml"
    path.write_text(yaml.safe_dump(items[1]))
    code, out, _ = run(capsys, path)
    assert code == cli.EXIT_UNKNOWN
    assert "ConfigMap facts, key config.json" in out
    path.write_text(yaml.safe_dump_all([items[1], {**items[0], "data": {"config.json": "[]"}}]))
    code, out, _ = run(capsys, path)
    assert code == cli.EXIT_INCOMPATIBLE
    assert "expected a JSON object, got list" in out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "expected YAML or JSON"),
        ("- 1\n", "expected objects, got list"),
        ("", "expected at least one HybridPDService, got nothing"),
        ("kind: Secret\n", "expected at least one HybridPDService, got Secret"),
    ],
)
def test_bad_input_is_told_on_standard_error(
    text: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "input.yaml"
    path.write_text(text)
    code, out, err = run(capsys, path)
    assert (code, out) == (cli.EXIT_BAD_INPUT, "")
    assert err.startswith("hybridpd: ")
    assert expected in err


@pytest.mark.parametrize(
    "text",
    ["a: " + "[" * 3000, "a: " + "9" * 5000, "a: !!binary aGk=", "a: !!set {b}"],
    ids=["nested", "a huge number", "bytes", "a set"],
)
def test_what_is_not_json_is_bad_input(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "input.yaml"
    path.write_text(text, encoding="utf-8")
    code, out, err = run(capsys, path)
    assert (code, out) == (cli.EXIT_BAD_INPUT, "")
    assert "expected YAML or JSON" in err


def test_dates_and_numbers_as_keys_are_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As the API server reads the same file."""
    text = (ROOT / "docs" / "examples" / "nemotron-3-nano.yaml").read_text("utf-8")
    service = yaml.safe_load(text)
    annotations = "{built: 2026-01-31, 7: seven}"
    service["spec"]["prefill"]["podTemplate"] = {"metadata": {"annotations": "PLACE"}}
    path = tmp_path / "input.yaml"
    path.write_text(yaml.safe_dump(service).replace("PLACE", annotations), encoding="utf-8")
    code, out, _ = run(capsys, path, "-o", "json")
    assert code == cli.EXIT_COMPATIBLE
    assert '"built": "2026-01-31"' in out
    assert '"7": "seven"' in out


def test_what_kubectl_calls_a_list_of_services_is_opened(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    service = json.dumps(yaml.safe_load((INPUTS / "unknown.yaml").read_text("utf-8")))
    path = tmp_path / "input.json"
    path.write_text(f'{{"kind": "HybridPDServiceList", "items": [{service}]}}', encoding="utf-8")
    assert run(capsys, path)[0] == cli.EXIT_UNKNOWN


def test_the_installed_command_is_this_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["hybridpd"].partition(":")
    assert getattr(importlib.import_module(module), function) is cli.main


def test_a_missing_file_is_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, tmp_path / "nothing.yaml")
    assert code == cli.EXIT_BAD_INPUT
    assert "nothing.yaml" in err


def test_the_worst_verdict_decides(capsys: pytest.CaptureFixture[str]) -> None:
    good = str(ROOT / "docs" / "examples" / "falcon-h1.yaml")
    for name, code in EXIT_CODES.items():
        assert run(capsys, good, "-f", str(INPUTS / f"{name}.yaml"))[0] == code
    verdicts = [report.UNKNOWN, report.COMPATIBLE, report.INCOMPATIBLE, report.INVALID]
    assert report.worst(verdicts) == report.INVALID


def test_default_images_are_the_charts_and_the_environment_wins() -> None:
    values = yaml.safe_load((ROOT / "charts" / "hybridpd" / "values.yaml").read_text())
    chart = yaml.safe_load((ROOT / "charts" / "hybridpd" / "Chart.yaml").read_text())
    for name in ("connector", "router", "engine"):
        image = values[name]["image"]
        reference = f"{image['repository']}:{image['tag'] or chart['appVersion']}"
        assert getattr(cli.DEFAULT_IMAGES, name) == reference
    assert cli.images({"HYBRIDPD_ROUTER_IMAGE": "mine:1"}).router == "mine:1"


def test_what_is_printed_is_what_the_operator_applies() -> None:
    path = ROOT / "docs" / "examples" / "tiny-nemotron.yaml"
    documents = list(yaml.safe_load_all(path.read_text()))
    (one,) = cli.plan(documents, cli.DEFAULT_IMAGES)
    service = one.assessment.service
    assert service is not None
    context = cli.Context(service, one.revision, one.revision, cli.DEFAULT_IMAGES)
    assert one.children == render(context)


@pytest.mark.parametrize(
    ("count_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (49082368, "46.8 MiB"),
        (1 << 50, "1024.0 TiB"),
    ],
)
def test_bytes_for_people(count_bytes: int, text: str) -> None:
    assert report.size(count_bytes) == text
