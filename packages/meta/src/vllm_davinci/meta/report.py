"""The doctor's report, for the table and for programs."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Check:
    """One line of the report. A check with a `problem` prevents any model from running."""

    area: str
    subject: str
    status: Status
    seen: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    checks: list[Check]

    @property
    def can_run(self) -> bool:
        return all(check.status is not Status.PROBLEM for check in self.checks)

    def to_json(self) -> str:
        checks = [{**asdict(check), "status": check.status.value} for check in self.checks]
        return json.dumps({"can_run": self.can_run, "checks": checks}, indent=2)
