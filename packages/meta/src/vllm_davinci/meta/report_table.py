"""The doctor's report as a table on the terminal."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import PurePath

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_davinci.meta.report import Check, Report, Status

_STYLES = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "bold red"}


def print_report(report: Report, console: Console) -> None:
    """Prints one row per check, grouped by area, then the verdict and the remedies."""
    table = Table(title="vllm-davinci doctor", title_justify="left")
    for column in ("area", "subject", "status", "seen"):
        table.add_column(column, overflow="fold")
    for area, group in groupby(report.checks, key=lambda check: check.area):
        table.add_section()
        checks = list(group)
        rows = _libraries_by_directory(checks) if area == "libraries" else checks
        for number, row in enumerate(rows):
            status = Text(row.status.value, style=_STYLES[row.status])
            table.add_row("" if number else area, row.subject, status, Text(row.seen))
    console.print(table)
    for kind in (Status.PROBLEM, Status.NOTE):
        for subjects, remedy in _remedies(report, kind):
            line = Text(f"{kind.value}: ", style=_STYLES[kind])
            console.print(line.append(f"{subjects}: {remedy}", style="default"), soft_wrap=True)
    if report.can_run:
        console.print("A model can run here.", style="bold green")
    else:
        console.print("No model can run here until the problems are solved.", style="bold red")


def _libraries_by_directory(checks: Iterable[Check]) -> Iterator[Check]:
    """One row for all libraries of a directory, or for all that were not found."""

    def place(check: Check) -> tuple[Status, str]:
        is_found = check.status is Status.OK
        return check.status, str(PurePath(check.seen).parent) if is_found else check.seen

    for (status, seen), group in groupby(sorted(checks, key=place), key=place):
        names = "\n".join(check.subject for check in group)
        yield Check("libraries", names, status, seen)


def _remedies(report: Report, kind: Status) -> Iterator[tuple[str, str]]:
    """Each remedy once, with the checks that it fixes."""
    subjects: dict[str, list[str]] = {}
    for check in report.checks:
        if check.status is kind and check.remedy:
            subjects.setdefault(check.remedy, []).append(check.subject)
    for remedy, names in subjects.items():
        yield ", ".join(names), remedy
