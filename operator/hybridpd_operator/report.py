"""What `hybridpd plan` says about one service, as data and as text. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hybridpd_operator.assessment import Assessment
from hybridpd_operator.names import ENGINE_ROLES
from hybridpd_operator.problems import INVALID_FIELD, NO_FACTS
from hybridpd_operator.spec import Service

COMPATIBLE: Final = "Compatible"
INCOMPATIBLE: Final = "Incompatible"
INVALID: Final = "Invalid"
UNKNOWN: Final = "Unknown"

_EXAMPLE_TOKENS: Final = 4096
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_LABEL_WIDTH: Final = 28
#: Rows of the table: key of `status.geometry.<role>`, what it is called.
_ROWS: Final = (
    ("tensorParallelSize", "ranks of an engine"),
    ("blockTokens", "tokens in a block"),
    ("pageBytes", "bytes of a page"),
    ("stateBytes", "  of which state"),
    ("paddingBytes", "  of which padding"),
    ("kvBlocks", "blocks in the cache"),
)


@dataclass(frozen=True)
class Report:
    """One service's verdict and what would be created for it.

    `children` is empty when nothing would be started; `revision` is empty then, too.
    """

    name: str
    assessment: Assessment
    revision: str = ""
    children: tuple[Mapping[str, Any], ...] = ()

    @property
    def verdict(self) -> str:
        """Compatible, Incompatible, Invalid (it does not fit the schema) or Unknown."""
        if any(one.reason == INVALID_FIELD for one in self.assessment.spec_problems):
            return INVALID
        if self.assessment.problems:
            return INCOMPATIBLE
        return COMPATIBLE if self.assessment.compatible else UNKNOWN

    def to_dict(self) -> dict[str, Any]:
        """The report for programs."""
        out: dict[str, Any] = {"service": self.name, "verdict": self.verdict}
        if self.verdict == UNKNOWN:
            out["reason"] = NO_FACTS
            out["message"] = self.assessment.why_unknown
        out["problems"] = [
            {"reason": one.reason, "field": one.field, "message": one.message}
            for one in self.assessment.problems
        ]
        if self.assessment.geometry:
            out["geometry"] = dict(self.assessment.geometry)
        service = self.assessment.service
        if service is not None and self.children:
            out["accelerators"] = accelerators(service)
        out["revision"] = self.revision
        out["children"] = [dict(child) for child in self.children]
        return out


def accelerators(service: Service) -> dict[str, Any]:
    """How many devices the engines of a service ask for."""
    out: dict[str, Any] = {"resource": service.spec.engine.gpu_resource_name}
    total = 0
    for role in ENGINE_ROLES:
        side = service.spec.role(role)
        out[role] = side.replicas * side.tensor_parallel_size
        total += side.replicas * side.tensor_parallel_size
    return {**out, "total": total if out["resource"] else 0}


def text(report: Report) -> str:
    """The report for people."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    assessment = report.assessment
    yield f"{report.name}: {report.verdict}"
    if report.verdict == UNKNOWN:
        yield f"  {NO_FACTS}: {assessment.why_unknown}"
        yield "  It would be started all the same, with a warning."
    for problem in assessment.problems:
        yield f"  {problem.reason}  {problem.field}"
        yield f"      {problem.message}"
    if assessment.geometry:
        yield ""
        yield from _geometry(assessment.geometry)
    if assessment.service is not None and report.children:
        yield ""
        yield from _children(report, assessment.service)


def _geometry(geometry: Mapping[str, Any]) -> Iterator[str]:
    roles = [role for role in ENGINE_ROLES if role in geometry]
    title = f"Caches, by {geometry['factsSource']} facts"
    yield f"{title:<{_LABEL_WIDTH}}" + "".join(f"{role:>16}" for role in roles)
    for key, label in _ROWS:
        values = [geometry[role].get(key) for role in roles]
        if any(value is not None for value in values):
            cells = "".join(f"{_cell(value):>16}" for value in values)
            yield f"  {label:<{_LABEL_WIDTH - 2}}{cells}"
    if "requestStateBytes" in geometry:
        state, per_token = geometry["requestStateBytes"], geometry["requestTokenBytes"]
        total = state + _EXAMPLE_TOKENS * per_token
        yield (
            f"A request moves {size(state)} of state and {size(per_token)} per prompt token: "
            f"{size(total)} for {_EXAMPLE_TOKENS} tokens."
        )


def _cell(value: int | None) -> str:
    return "measured" if value is None else f"{value:,}"


def _children(report: Report, service: Service) -> Iterator[str]:
    yield f"Children at revision {report.revision}"
    rows = [(child["kind"], child["metadata"]["name"], _detail(child)) for child in report.children]
    wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for kind, name, detail in rows:
        yield f"  {kind:<{wide[0]}}  {name:<{wide[1]}}  {detail}".rstrip()
    devices = accelerators(service)
    if devices["resource"]:
        parts = ", ".join(f"{role} {devices[role]}" for role in ENGINE_ROLES)
        yield f"{devices['resource']}: {devices['total']} ({parts})"


def _detail(child: Mapping[str, Any]) -> str:
    spec = child.get("spec", {})
    if "replicas" in spec:
        return f"replicas: {spec['replicas']}"
    return ""


def size(count_bytes: int) -> str:
    """Bytes for people: 49082368 is 46.8 MiB."""
    tenths, unit = 10 * count_bytes, 0
    while tenths >= 10240 and unit < len(_UNITS) - 1:
        tenths, unit = tenths // 1024, unit + 1
    whole, rest = divmod(tenths, 10)
    return f"{whole}.{rest} {_UNITS[unit]}" if unit else f"{count_bytes} B"


def worst(verdicts: Sequence[str]) -> str:
    """The verdict that counts for several services."""
    order = (INVALID, INCOMPATIBLE, UNKNOWN, COMPATIBLE)
    return next(verdict for verdict in order if verdict in verdicts)
