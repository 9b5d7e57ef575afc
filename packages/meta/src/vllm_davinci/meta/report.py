"""What the doctor found, for the table and for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum


class Status(str, Enum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report. A `problem` means that no model can run."""

    area: str
    subject: str
    status: Status
    seen: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    findings: list[Finding]

    @property
    def can_run(self) -> bool:
        return all(finding.status is not Status.PROBLEM for finding in self.findings)

    def to_json(self) -> str:
        findings = [
            {**asdict(finding), "status": finding.status.value} for finding in self.findings
        ]
        return json.dumps({"can_run": self.can_run, "findings": findings}, indent=2)
