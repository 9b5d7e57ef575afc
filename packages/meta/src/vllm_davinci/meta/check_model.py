"""`vllm-davinci check-model DIRECTORY [--json]`: says how a checkpoint would be loaded."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_davinci.meta import core_access
from vllm_davinci.meta.given_arguments import missing_directory

if TYPE_CHECKING:
    from vllm_davinci.core.weight_files.issues import CheckReport

_STYLES = {"problem": "bold red", "note": "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="a checkpoint's directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Exit status 0 only if the checkpoint can be loaded completely."""
    if not options.json and (problem := missing_directory(options.directory)) is not None:
        Console(stderr=True).print(
            f"vllm-davinci check-model: {problem}", markup=False, soft_wrap=True
        )
        return 1
    core_access.prepare()
    from vllm_davinci.core.checkpoint.check import check_checkpoint  # imports torch and vLLM

    report = check_checkpoint(Path(options.directory))
    if options.json:
        print(json.dumps({"can_load": report.can_load, **asdict(report)}, indent=2))
    else:
        print_report(report, Console())
    return 0 if report.can_load else 1


def print_report(report: CheckReport, console: Console) -> None:
    """Prints a table of layer kinds, then problems and notes, then the verdict."""
    console.print(
        Text(
            f"{report.directory}: {report.num_tensors} tensors, "
            f"{report.num_bytes / 2**20:.1f} MiB, quantization {report.quantization}"
        ),
        soft_wrap=True,
    )
    if report.kinds:
        table = Table()
        for column in ("layers", "count", "loads as", "stored", "shape of the first"):
            table.add_column(
                column, justify="right" if column == "count" else "left", overflow="fold"
            )
        for kind in report.kinds:
            shape = " x ".join(map(str, kind.shape))
            table.add_row(Text(kind.name), str(kind.count), kind.loads, kind.dtype, shape)
        console.print(table)
    for issue in report.issues:
        severity = issue.severity.value
        line = Text(f"{severity}: ", style=_STYLES[severity])
        text = issue.what
        if not text.startswith(issue.subject):
            text = f"{issue.subject}: {text}"
        console.print(line.append(text, style="default"), soft_wrap=True)
    if report.can_load:
        console.print("This checkpoint can be loaded.", style="bold green")
    else:
        console.print("This checkpoint cannot be loaded as it is.", style="bold red")
