"""`vllm-davinci deployments`: lists the table of deployments, or dry-runs its rows.

vllm-davinci deployments --run DIRECTORY --page FILE [--resume] [NAME...]
    runs these rows, or all, one after the other; reports and logs go into the directory
vllm-davinci deployments --step-costs DIRECTORY [--resume] [NAME...]
    models what their steps take by each schedule; the files are for the option step_costs
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_davinci.meta.deployments.costs import write_costs
from vllm_davinci.meta.deployments.page import page_of
from vllm_davinci.meta.deployments.run import Outcome, run_all
from vllm_davinci.meta.deployments.table import Deployment, all_deployments, deployment
from vllm_davinci.meta.errors import DeploymentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows; all where none is named")
    parser.add_argument("--json", action="store_true", help="the rows for programs")
    parser.add_argument("--run", type=Path, metavar="DIRECTORY", help="dry-run the rows")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="with --run and --step-costs: take what the directory has already",
    )
    parser.add_argument(
        "--step-costs", type=Path, metavar="DIRECTORY", help="model steps by each schedule"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="with --run: write what came of them as Markdown"
    )
    parser.add_argument(
        "--stamp", default="", metavar="LINE", help="of the page: when and of what it was made"
    )


def run(options: argparse.Namespace) -> int:
    """Exit status 0; 1 for a name that is not there, or with --run where a row did not start that
    should, or did that should not; 2 for options that do not go together."""
    console = Console(stderr=True)
    if options.page is not None and options.run is None:
        console.print("vllm-davinci deployments: --page needs --run DIRECTORY", markup=False)
        return 2
    try:
        rows = [deployment(name) for name in options.names] or [*all_deployments().values()]
    except DeploymentError as error:
        console.print(f"vllm-davinci deployments: {error}", markup=False, soft_wrap=True)
        return 1
    if options.run is not None:
        return _run(rows, options)
    if options.step_costs is not None:
        for name, file, reason in write_costs(rows, options.step_costs, options.resume):
            print(f"{name}: {reason if file is None else file.name}", flush=True)
        return 0
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    else:
        _print(rows, Console())
    return 0


def _run(rows: list[Deployment], options: argparse.Namespace) -> int:
    outcomes: list[Outcome] = []
    unexpected = []
    for row, outcome in zip(rows, run_all(rows, options.run, options.resume), strict=True):
        outcomes.append(outcome)
        print(f"{outcome.name}: {outcome.reason or 'started'}", flush=True)
        if not outcome.is_expected(row):
            unexpected.append(outcome.name)
        if options.page is not None:
            page = page_of(all_deployments(), outcomes, options.stamp)
            options.page.write_text(page, encoding="utf-8")
    if unexpected:
        print(
            f"not as the table says: {', '.join(unexpected)}. Find out why; `refused` of a row is "
            "a part of the reason why it does not start."
        )
    return 1 if unexpected else 0


def _print(rows: list[Deployment], console: Console) -> None:
    table = Table(title=f"{len(rows)} deployments")
    for column in ("name", "for", "checkpoint", "chip", "topology", "hosts", "source"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            *(row.name, row.role, row.checkpoint.name, row.chip, row.topology, str(row.hosts)),
            row.source,
        )
    console.print(table)
