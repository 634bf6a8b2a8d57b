"""What must be equal for the demo to succeed."""

from __future__ import annotations

import re

import completions
import waits
from kubectl import Kubectl

MEASURED = "hybridpd_read_bytes_total"
PREDICTED = "hybridpd_predicted_bytes_total"
RECOMPUTED = "hybridpd_recomputed_requests_total"


class DemoError(Exception):
    """Something differs from what it should be; the message shows both sides."""


def compare(
    answers: dict[str, completions.Answer], expected: dict[str, completions.Answer]
) -> None:
    """Print one line a prompt; DemoError unless every token is equal."""
    different = []
    for name, answer in sorted(answers.items(), key=lambda item: item[1].prompt_tokens):
        same = answer == expected[name]
        verdict = "equal" if same else "DIFFERENT"
        print(
            f"   {name:<14} {answer.prompt_tokens:>5} prompt tokens, "
            f"{len(answer.tokens)} answered: {verdict}"
        )
        if not same:
            different.append(f"{name}: pair {answer.tokens}, single {expected[name].tokens}")
    if different:
        raise DemoError("tokens differ from a single engine's\n" + "\n".join(different))


def counter(metrics: str, name: str) -> float:
    """Sum of a Prometheus counter over its label sets; 0 when it is not there."""
    found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", metrics, re.MULTILINE)
    return sum(float(value) for value in found)


def moved_bytes(kubectl: Kubectl, name: str) -> str:
    """Predicted and measured bytes of all decode pods; DemoError unless equal and above zero."""
    chosen = f"{waits.selector_of(name)},hybridpd.dev/role=decode"
    totals = dict.fromkeys((PREDICTED, MEASURED, RECOMPUTED), 0.0)
    for pod in kubectl.find("pods", chosen):
        target = f"pod/{pod['metadata']['name']}"
        with completions.port_forward(kubectl, target, 8000) as url:
            metrics = completions.fetch(f"{url}/metrics")
        for metric in totals:
            totals[metric] += counter(metrics, metric)
    text = f"   predicted {totals[PREDICTED]:,.0f}   measured {totals[MEASURED]:,.0f}"
    if totals[MEASURED] <= 0 or totals[MEASURED] != totals[PREDICTED]:
        raise DemoError(f"bytes moved differ from the prediction: {text.strip()}")
    if totals[RECOMPUTED]:
        raise DemoError(f"decode computed {totals[RECOMPUTED]:.0f} prompts itself")
    return text
