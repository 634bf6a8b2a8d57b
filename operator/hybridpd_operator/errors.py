"""The operator's exceptions. Each one says which field, what was expected, what was found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FieldError:
    """One thing wrong in the text of a custom resource.

    `path` is the field as a user writes it (`spec.prefill.tensorParallelSize`, `spec.env[2].name`).
    """

    path: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, got {self.got}"


class OperatorError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidSpecError(OperatorError):
    """The custom resource does not fit the schema; `problems` holds every field error found."""

    def __init__(self, problems: tuple[FieldError, ...]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems


class DocumentError(OperatorError):
    """A file given to the command line cannot be read as what it should be."""

    def __init__(self, source: str, expected: str, got: str) -> None:
        super().__init__(f"{source}: expected {expected}, got {got}")
        self.source = source
        self.expected = expected
        self.got = got


class FlagError(OperatorError):
    """`extraArgs` holds something that is not a well-formed vLLM flag."""

    def __init__(self, path: str, expected: str, got: str) -> None:
        super().__init__(f"{path}: expected {expected}, got {got}")
        self.problem = FieldError(path, expected, got)
