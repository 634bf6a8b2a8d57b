"""`hybridpd plan`: what a HybridPDService would become, without a cluster.

Needs the base install only. Exit codes are for pipelines:

0  every service is compatible
1  a service is incompatible, or breaks a rule
2  the input cannot be read, or does not fit the schema
3  nothing is known to be wrong, but a model's geometry is not known
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TextIO

from hybridpd_operator import documents, report
from hybridpd_operator.errors import DocumentError
from hybridpd_operator.manifests import Context
from hybridpd_operator.names import KIND
from hybridpd_operator.plan import render
from hybridpd_operator.report import Report
from hybridpd_operator.revision import revision_of
from hybridpd_operator.settings import Images
from hybridpd_operator.spec import Service
from hybridpd_operator.validate import assess

EXIT_COMPATIBLE: Final = 0
EXIT_INCOMPATIBLE: Final = 1
EXIT_BAD_INPUT: Final = 2
EXIT_UNKNOWN: Final = 3
_EXIT: Final[Mapping[str, int]] = {
    report.COMPATIBLE: EXIT_COMPATIBLE,
    report.INCOMPATIBLE: EXIT_INCOMPATIBLE,
    report.INVALID: EXIT_BAD_INPUT,
    report.UNKNOWN: EXIT_UNKNOWN,
}

#: What the chart gives to services that name no image; HYBRIDPD_*_IMAGE replaces it.
DEFAULT_IMAGES: Final = Images(
    connector="hybridpd/connector:0.1.0",
    router="hybridpd/router:0.1.0",
    engine="vllm/vllm-openai:v0.32.0",
)

_EPILOG: Final = """\
examples:
  hybridpd plan -f service.yaml                 verdict, cache geometry and children
  kustomize build . | hybridpd plan -f -        in a GitOps pipeline
  hybridpd plan -f service.yaml -o yaml | yq '.children[]'

ConfigMaps in the same input answer spec.model.config.configMap. Other objects are ignored.

exit codes:
  0  every service is compatible
  1  a service is incompatible, or breaks a rule
  2  the input cannot be read, or does not fit the schema
  3  nothing is known to be wrong, but a model's geometry is not known
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `hybridpd` command."""
    options = _parser().parse_args(arguments)
    try:
        found = [document for path in options.file for document in documents.read(path, sys.stdin)]
        reports = plan(found, images(os.environ))
    except DocumentError as error:
        print(f"hybridpd: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    write(reports, options.output, sys.stdout)
    return _EXIT[report.worst([one.verdict for one in reports])]


def plan(found: Sequence[Mapping[str, Any]], defaults: Images) -> list[Report]:
    """A report per HybridPDService among `found`. DocumentError when there is none."""
    services = [document for document in found if document.get("kind") == KIND]
    if not services:
        kinds = ", ".join(sorted({str(document.get("kind")) for document in found}))
        raise DocumentError("input", f"at least one {KIND}", kinds or "nothing")
    return [_report(resource, found, defaults) for resource in services]


def _report(
    resource: Mapping[str, Any], found: Sequence[Mapping[str, Any]], defaults: Images
) -> Report:
    config, problem = _config_map(resource, found)
    assessment = assess(resource, config, problem)
    service = assessment.service
    if service is None:
        metadata = resource.get("metadata")
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        return Report(str(name or "(no name)"), assessment)
    if not assessment.may_start:
        return Report(service.name, assessment)
    revision, children = _children(service, defaults)
    return Report(service.name, assessment, revision, children)


def _children(service: Service, defaults: Images) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    revision = revision_of(service.spec)
    return revision, render(Context(service, revision, revision, defaults))


def _config_map(
    resource: Mapping[str, Any], found: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any] | None, str]:
    """The config.json that the service's ConfigMap holds, if that is in the input."""
    where: Any = resource.get("spec")
    for key in ("model", "config", "configMap"):
        where = where.get(key) if isinstance(where, Mapping) else None
    if not isinstance(where, Mapping):
        return None, ""
    name, key = where.get("name"), where.get("key") or "config.json"
    for document in found:
        metadata = document.get("metadata")
        is_it = isinstance(metadata, Mapping) and metadata.get("name") == name
        if document.get("kind") == "ConfigMap" and is_it:
            return _config_json(document.get("data"), f"ConfigMap {name}, key {key}", str(key))
    return None, ""


def _config_json(data: object, where: str, key: str) -> tuple[Mapping[str, Any] | None, str]:
    text = data.get(key) if isinstance(data, Mapping) else None
    if not isinstance(text, str):
        return None, f"{where}: expected text, got nothing"
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        return None, f"{where}: expected JSON, got {error}"
    if not isinstance(config, Mapping):
        return None, f"{where}: expected a JSON object, got {type(config).__name__}"
    return config, ""


def images(environment: Mapping[str, str]) -> Images:
    """The images of services that name none: those of the operator's environment, if set."""
    named = {
        field: environment.get(f"HYBRIDPD_{field.upper()}_IMAGE", "").strip()
        for field in ("connector", "router", "engine")
    }
    return replace(
        DEFAULT_IMAGES,
        connector=named["connector"] or DEFAULT_IMAGES.connector,
        router=named["router"] or DEFAULT_IMAGES.router,
        engine=named["engine"] or DEFAULT_IMAGES.engine,
    )


def write(reports: Sequence[Report], form: str, output: TextIO) -> None:
    """Print the reports as text, json or yaml."""
    if form == "json":
        output.write(documents.to_json(one.to_dict() for one in reports))
    elif form == "yaml":
        output.write(documents.to_yaml(one.to_dict() for one in reports))
    else:
        output.write("\n".join(report.text(one) for one in reports))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hybridpd", description="Prefill/decode services for hybrid models."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "plan",
        help="what a HybridPDService would become, without a cluster",
        description="Judge HybridPDServices and print what would be created, without a cluster.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "-f",
        "--file",
        action="append",
        required=True,
        metavar="FILE",
        help="YAML or JSON with one or more HybridPDServices; - reads standard input",
    )
    command.add_argument(
        "-o",
        "--output",
        choices=("text", "json", "yaml"),
        default="text",
        help="text for people (default), json or yaml for programs",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
