"""`vllm-davinci deployments [NAME...]`: lists the table of deployments, or dry-runs its rows.

vllm-davinci deployments --model deepseek --chip Ascend910B3
    lists these rows; a named row with its source and options
vllm-davinci deployments --run DIRECTORY --page FILE [--resume] [NAME...]
    dry-runs these rows, or all, in turn; reports and logs go into the directory
vllm-davinci deployments --step-costs DIRECTORY [--resume] [NAME...]
    models their step times by schedule; the files are for the option step_costs
vllm-davinci deployments --step-costs DIRECTORY --stamp-costs [NAME...]
    models a few steps of each file from another timing model; if they take the file's times, the
    file counts as the installed model's
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
from pathlib import Path
from typing import get_args

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_davinci.planner.deployments.costs import stamp_costs, write_costs
from vllm_davinci.planner.deployments.page import page_of
from vllm_davinci.planner.deployments.run import Outcome, run_all
from vllm_davinci.planner.deployments.table import Deployment, Role, all_deployments, deployment
from vllm_davinci.planner.errors import DeploymentError

_WIDE = 130  # terminal width that fits six columns, in characters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="rows, or patterns such as 'glm-4.7-*' (default: all)",
    )
    parser.add_argument(
        "--model",
        metavar="TEXT",
        help="rows whose checkpoint's name contains this or matches this pattern",
    )
    parser.add_argument("--chip", metavar="NAME", help="rows of this chip, as in 910b3")
    parser.add_argument("--role", choices=get_args(Role), help="rows for this work")
    parser.add_argument("--json", action="store_true", help="the rows for programs")
    parser.add_argument("--run", type=Path, metavar="DIRECTORY", help="dry-run the rows")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="with --run and --step-costs: skip rows whose result is in the directory",
    )
    parser.add_argument(
        "--step-costs", type=Path, metavar="DIRECTORY", help="model the step times of each schedule"
    )
    parser.add_argument(
        "--stamp-costs",
        action="store_true",
        help="with --step-costs: stamp files whose steps still take the same times",
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="with --run: write the results as Markdown"
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="OPTION",
        help="with --run: an option of dry-run or of `vllm serve` for every row, as in "
        "--also=--enable-dbo",
    )
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="time limit per dry-run (default: from its steps and this host's load)",
    )
    parser.add_argument(
        "--stamp", default="", metavar="LINE", help="first line of the page: date and versions"
    )


def run(options: argparse.Namespace) -> int:
    """Exit status 0; 1 for unknown rows or, with --run, if a row started or failed contrary to the
    table; 2 for contradicting options.
    """
    console = Console(stderr=True)
    problem = None
    if options.page is not None and options.run is None:
        problem = "--page needs --run DIRECTORY"
    elif options.stamp_costs and options.step_costs is None:
        problem = "--stamp-costs needs --step-costs DIRECTORY"
    elif options.also and options.run is None:
        problem = "--also needs --run DIRECTORY"
    elif options.limit is not None and (not options.limit > 0 or _runs_nothing(options)):
        problem = f"--limit {options.limit:g}: seconds above 0, with --run or --step-costs"
    if problem is not None:
        console.print(f"vllm-davinci deployments: {problem}", markup=False, soft_wrap=True)
        return 2
    try:
        rows = _chosen(options)
    except DeploymentError as error:
        console.print(f"vllm-davinci deployments: {error}", markup=False, soft_wrap=True)
        return 1
    if options.run is not None:
        return _run(rows, options)
    if options.step_costs is not None:
        found = (
            stamp_costs(rows, options.step_costs, options.limit)
            if options.stamp_costs
            else write_costs(rows, options.step_costs, options.resume, options.limit)
        )
        for name, file, reason in found:
            print(f"{name}: {reason if file is None else file.name}", flush=True)
        return 0
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    elif options.names and len(rows) == 1:
        _print_row(rows[0], Console())
    else:
        _print(rows, Console())
    return 0


def _runs_nothing(options: argparse.Namespace) -> bool:
    return options.run is None and options.step_costs is None


def _chosen(options: argparse.Namespace) -> list[Deployment]:
    """The selected rows, in the table's order. Raises DeploymentError if there are none."""
    known = all_deployments()
    names: list[str] = []
    for pattern in options.names or ["*"]:
        names += fnmatch.filter(known, pattern) or [deployment(pattern).name]
    rows = [known[name] for name in dict.fromkeys(names)]
    if options.model is not None:
        pattern = f"*{options.model.lower()}*"
        rows = [
            row
            for row in rows
            if fnmatch.fnmatchcase(
                f"{row.checkpoint.name} {row.checkpoint.config}".lower(), pattern
            )
        ]
    if options.chip is not None:
        asked = chip_of(options.chip)
        rows = [row for row in rows if asked in row.chip]
    if options.role is not None:
        rows = [row for row in rows if row.role == options.role]
    if not rows:
        models = sorted({row.checkpoint.name for row in known.values()})
        chips = sorted({row.chip for row in known.values()})
        raise DeploymentError(
            f"no row matches all of these options. Models: {', '.join(models)}. Chips: "
            f"{', '.join(chips)}."
        )
    return rows


def chip_of(spoken: str) -> str:
    """The table's name of a chip, from its name or a part of it: 910B3, Ascend910_9391."""
    try:
        from vllm_davinci.vnpu.timing.chip_files import chip_and_soc
    except ModuleNotFoundError:  # the virtual NPU, which knows SoCs, is not installed
        return spoken.lower()
    return (chip_and_soc(spoken) or (spoken.lower(),))[0]


def _run(rows: list[Deployment], options: argparse.Namespace) -> int:
    outcomes: list[Outcome] = []
    unexpected = []
    for row, outcome in zip(
        rows, run_all(rows, options.run, options.resume, options.limit, options.also), strict=True
    ):
        outcomes.append(outcome)
        print(f"{outcome.name}: {outcome.reason or 'started'}", flush=True)
        if not outcome.is_expected(row):
            unexpected.append(outcome.name)
        if options.page is not None:
            page = page_of(all_deployments(), outcomes, options.stamp)
            options.page.write_text(page, encoding="utf-8")
    if unexpected:
        print(
            f"unexpected results: {', '.join(unexpected)}. Find the cause, or correct `refused`, "
            "a part of the reason why a row does not start."
        )
    return 1 if unexpected else 0


def _print(rows: list[Deployment], console: Console) -> None:
    """Prints four columns in 80 characters, more in a wider terminal."""
    table = Table(
        title=f"{len(rows)} deployment{'' if len(rows) == 1 else 's'}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    wide = console.width >= _WIDE
    for column in ("name", "for", "chip", "hosts", *(("checkpoint", "topology") if wide else ())):
        table.add_column(column, no_wrap=True)
    for row in rows:
        cells = (row.name, row.role, row.chip.removeprefix("ascend"), str(row.hosts))
        table.add_row(*cells, *((row.checkpoint.name, row.topology) if wide else ()))
    console.print(table)
    console.print(
        "`vllm-davinci deployments NAME` prints a row's source and options.", markup=False
    )


def _print_row(row: Deployment, console: Console) -> None:
    for name, value in dataclasses.asdict(row).items():
        if name == "checkpoint":
            value = f"{row.checkpoint.name} ({row.checkpoint.source})"
        elif isinstance(value, dict):
            value = " ".join(f"{key}={each}" for key, each in value.items())
        elif isinstance(value, tuple):
            value = ", ".join(value)
        if value not in ("", None):
            console.print(f"{name}: {str(value).strip()}", markup=False, soft_wrap=True)
