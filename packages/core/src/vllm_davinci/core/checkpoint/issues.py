"""What the examination of a checkpoint found, ready to be printed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Severity(str, Enum):
    PROBLEM = "problem"  # the model cannot be loaded, or not as it was meant
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One thing to know. `subject` is a tensor, a layer or a file."""

    severity: Severity
    subject: str
    what: str


@dataclass(frozen=True)
class LayerKind:
    """Layers that differ only in their numbers, and how they would be loaded.

    name:   `*` in place of each number
    loads:  a quantization type, or FLOAT
    dtype:  of the stored weight
    shape:  of the first one's stored weight
    """

    name: str
    loads: str
    count: int
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Examination:
    """The answer, ready to be printed."""

    directory: str
    quantization: str = "none"
    num_tensors: int = 0
    num_bytes: int = 0
    kinds: list[LayerKind] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def can_load(self) -> bool:
        return all(finding.severity is not Severity.PROBLEM for finding in self.findings)

    def problem(self, subject: str, what: str) -> None:
        self.findings.append(Finding(Severity.PROBLEM, subject, what))

    def note(self, subject: str, what: str) -> None:
        self.findings.append(Finding(Severity.NOTE, subject, what))
