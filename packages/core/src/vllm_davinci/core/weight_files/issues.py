"""The result of a checkpoint check, ready to be printed."""

from dataclasses import dataclass, field
from enum import StrEnum


class Severity(StrEnum):
    PROBLEM = "problem"  # the model cannot be loaded, or not as intended
    NOTE = "note"


@dataclass(frozen=True)
class Issue:
    """One finding. `subject` is a tensor, a layer or a file."""

    severity: Severity
    subject: str
    what: str


@dataclass(frozen=True)
class LayerKind:
    """Layers that differ only in their numbers, and the type as which they load.

    name:   `*` in place of each number
    loads:  a quantization type, or FLOAT
    dtype:  of the stored weight
    shape:  of the first layer's stored weight
    """

    name: str
    loads: str
    count: int
    dtype: str
    shape: tuple[int, ...]


@dataclass
class CheckReport:
    """The issues of a checkpoint directory, and its layers as they would be loaded."""

    directory: str
    quantization: str = "none"
    num_tensors: int = 0
    num_bytes: int = 0
    kinds: list[LayerKind] = field(default_factory=list)
    issues: list[Issue] = field(default_factory=list)

    @property
    def can_load(self) -> bool:
        return not self.problems()

    def problems(self) -> list[str]:
        """The problems, one sentence each, for error messages."""
        return [
            f"{issue.subject}: {issue.what}"
            for issue in self.issues
            if issue.severity is Severity.PROBLEM
        ]

    def problem(self, subject: str, what: str) -> None:
        self.issues.append(Issue(Severity.PROBLEM, subject, what))

    def note(self, subject: str, what: str) -> None:
        self.issues.append(Issue(Severity.NOTE, subject, what))
