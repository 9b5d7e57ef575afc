"""A run's report in JSON: every finding of every part, with details."""

import datetime
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_davinci.verify.errors import VerificationError
from vllm_davinci.verify.journal import Journal
from vllm_davinci.verify.parts import PARTS

FORMAT = 1
FILE = "report.json"
Findings = dict[str, dict[str, Any]]
Report = dict[str, Any]


def assembled(journals: Mapping[str, Journal]) -> Report:
    """Assembles the report of the parts that have run."""
    parts: list[dict[str, Any]] = [
        {
            "name": part.name,
            "asks": part.asks,
            "seconds": journals[part.name].seconds,
            "passed": _count(journals[part.name].findings, True),
            "failed": _count(journals[part.name].findings, False),
            "findings": journals[part.name].findings,
        }
        for part in PARTS
        if part.name in journals
    ]
    now = datetime.datetime.now(datetime.UTC)
    report = {"format": FORMAT, "written": now.isoformat(timespec="seconds"), "parts": parts}
    return {**report, "seconds": round(sum(part["seconds"] for part in parts), 1)}


def read_report(path: Path) -> Report:
    """Reads a report from its file or its run's directory. Raises VerificationError."""
    file = path / FILE if path.is_dir() else path
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise VerificationError(
            f"{file}: {error}. Name a report.json that `vllm-davinci verify` has written."
        ) from error
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise VerificationError(
            f"{file} is not a report of format {FORMAT}. Name a report.json of this release."
        )
    return report


def write_report(report: Report, path: Path) -> None:
    text = json.dumps(report, indent=1) + "\n"
    path.write_text(text, encoding="utf-8")


def findings_of(report: Report) -> Findings:
    """Findings by name, in the report's order."""
    return {finding["name"]: finding for part in report["parts"] for finding in part["findings"]}


def value_of(report: Report, name: str) -> Any:
    """A finding's value; None if the report has no finding of that name."""
    return findings_of(report).get(name, {}).get("value")


def failed_of(report: Report) -> Iterator[dict[str, Any]]:
    for part in report["parts"]:
        yield from (each for each in part["findings"] if each.get("passed") is False)


def _count(findings: list[dict[str, Any]], passed: bool) -> int:
    return sum(finding.get("passed") is passed for finding in findings)
