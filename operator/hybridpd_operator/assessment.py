"""One verdict on a custom resource, from all checks: may its pair be started?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridpd_operator.problems import Problem
from hybridpd_operator.spec import Service


@dataclass(frozen=True)
class Assessment:
    """What is known before anything runs.

    ``service`` is None when the resource could not be read. ``has_facts`` is False when nobody
    told the model's dimensions: then nothing was checked against them, and ``why_unknown`` says
    why. ``geometry`` is ``status.geometry`` as predicted.
    """

    service: Service | None
    spec_problems: tuple[Problem, ...] = ()
    model_problems: tuple[Problem, ...] = ()
    has_facts: bool = True
    geometry: Mapping[str, Any] | None = None
    why_unknown: str = ""

    @property
    def accepted(self) -> bool:
        """The resource by itself is in order."""
        return self.service is not None and not self.spec_problems

    @property
    def compatible(self) -> bool | None:
        """True: proven; False: cannot work; None: nobody knows."""
        if self.model_problems:
            return False
        return True if self.accepted and self.has_facts else None

    @property
    def may_start(self) -> bool:
        """Start unless something is known to be wrong."""
        return self.accepted and not self.model_problems

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All of them, those of the resource itself first."""
        return self.spec_problems + self.model_problems
