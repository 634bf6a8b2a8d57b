"""Runs programs: one place for quiet runs whose output is shown when they fail."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridpd_cluster.errors import ClusterError
from hybridpd_cluster.settings import clean_environment

_SHOWN_CHARACTERS = 4000


def run(
    command: Sequence[str | Path],
    *,
    input_text: str | None = None,
    folder: Path | None = None,
    extra_environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 600,
) -> str:
    """Runs a program to its end; gives its output, or raises ClusterError with its last words."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            input=input_text,
            stdin=subprocess.DEVNULL if input_text is None else None,
            capture_output=True,
            text=True,
            cwd=folder,
            env={**clean_environment(), **(extra_environment or {})},
            timeout=timeout_seconds,
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{words[0]}: program not found") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(words)}: still running after {timeout_seconds} s") from error
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-_SHOWN_CHARACTERS:].strip()
        raise ClusterError(f"{' '.join(words)}: exit status {done.returncode}\n{said}")
    return done.stdout


def succeeds(command: Sequence[str | Path]) -> bool:
    """Whether a program ends with status 0; its output is dropped."""
    done = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=clean_environment(),
        check=False,
    )
    return done.returncode == 0
