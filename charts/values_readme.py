"""Writes charts/hybridpd/README.md from the comments of values.yaml.

`python3 charts/values_readme.py` prints it; `--write` replaces the file. A repository test fails
while the two differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

CHART = Path(__file__).resolve().parent / "hybridpd"

HEADER = """# The hybridpd chart

Installs the operator and the HybridPDService definition.

    helm install hybridpd charts/hybridpd --namespace hybridpd-system --create-namespace

Images are named by tag or, better, by digest. `watchNamespaces` limits the operator to a list of
namespaces and replaces the ClusterRole by Roles. The definition is a template behind
`crds.enabled`, so an upgrade reaches it, and `crds.keep` keeps it on uninstall.

## Values

Written from `values.yaml` by `charts/values_readme.py`.

| value | default | meaning |
|---|---|---|
"""


def value_rows(text: str) -> list[tuple[str, str, str]]:
    """Rows (dotted path, default, meaning) of every value that carries a `# --` comment."""
    rows: list[tuple[str, str, str]] = []
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# -- "):
            comment = [stripped[5:]]
        elif stripped.startswith("#"):
            if comment:
                comment.append(stripped.lstrip("# "))
        elif stripped and ":" in stripped:
            depth = (len(line) - len(line.lstrip())) // 2
            name, _, default = stripped.partition(":")
            path = [*path[:depth], name]
            if comment:
                rows.append(
                    (".".join(path), default.strip() or "see values.yaml", " ".join(comment))
                )
                comment = []
    return rows


def readme(text: str) -> str:
    """The whole README for the given values.yaml."""
    rows = value_rows(text)
    return HEADER + "".join(f"| `{path}` | `{default}` | {why} |\n" for path, default, why in rows)


def main() -> None:
    """Prints the README, or writes it with `--write`."""
    content = readme((CHART / "values.yaml").read_text())
    if "--write" in sys.argv[1:]:
        (CHART / "README.md").write_text(content)
    else:
        sys.stdout.write(content)


if __name__ == "__main__":
    main()
