"""`vllm-davinci quantize SOURCE DESTINATION`: converts a float checkpoint to int8."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from vllm_davinci.meta import core_access

if TYPE_CHECKING:
    import torch

    from vllm_davinci.core.export import plan

DEFAULT_TYPE = "W8A8_DYNAMIC"
# Maximum loss of perplexity on held-out text, as a share; 1.8 % aims at 3 % on other texts.
DEFAULT_BUDGETS, DEFAULT_BUDGET = {"W8A8": 0.018}, 0.015
DTYPES = ("bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, help="directory of a checkpoint of floats, or of fp8 in blocks"
    )
    parser.add_argument("destination", type=Path, help="directory to write")
    parser.add_argument(
        "--type",
        default=DEFAULT_TYPE,
        help="W8A8_DYNAMIC scales each token at run time; W8A8 takes the input scale from "
        "--calibrate; W8A16 keeps inputs in 16 bits; FLOAT converts fp8 to floats (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="UTF-8 text like the model's later inputs; required by W8A8. Moves outliers from "
        "activations into weights, and keeps more bits in the layers that lose most",
    )
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        default=12_288,
        metavar="N",
        help="tokens from all parts of FILE, a third of them held out (default: %(default)s)",
    )
    parser.add_argument(
        "--budget",
        type=_share,
        metavar="PERCENT",
        help="maximum loss of perplexity on the held-out tokens, plus twice its standard error, "
        "or none (default: 1.8%% for W8A8, for 3%% on other texts; else 1.5%% with --calibrate)",
    )
    parser.add_argument("--no-smoothing", action="store_true", help="do not move outliers")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write each layer's cost, as JSON"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the model (default: the source's, else bfloat16)"
    )


def run(options: argparse.Namespace) -> int:
    """Exit status 0 if the checkpoint was written; 1 if not, with the reason; 2 for bad options."""
    console = Console(stderr=True)
    if problem := _problem_with(options):
        console.print(f"vllm-davinci quantize: {problem}", markup=False, soft_wrap=True)
        return 2
    core_access.prepare()
    from vllm_davinci.core.errors import CoreError  # imports torch and vLLM
    from vllm_davinci.core.export import exporter
    from vllm_davinci.core.weight_files import files

    try:
        scheme = exporter.written_scheme(options.type)
        config = files.read_config(options.source)
        dtype = exporter.model_dtype(config, options.dtype)
        work = exporter.Exporter(options.source, options.destination, scheme.name, dtype)
        work.require_room()
        found: plan.Plan | None = None
        with _progress(console) as progress:
            if options.calibrate is not None:
                found = _calibrated(options, config, dtype, progress)
                work.ranges, work.types, work.folds = found.ranges, found.types, found.folds
            size = sum(path.stat().st_size for path in files.tensor_files(options.source))
            task = progress.add_task("rounding (bytes)", total=size)
            written = work.run(lambda count: progress.advance(task, count))
            progress.update(task, completed=size)
        if found is not None and options.report is not None:
            options.report.write_text(json.dumps(found.report(), indent=2) + "\n")
    except CoreError as error:
        console.print(f"vllm-davinci quantize: {error}", markup=False, soft_wrap=True)
        return 1
    if found is not None:
        _tell(found, console)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(written.counts.items()))
    print(
        f"{written.directory}: {written.num_bytes / 2**20:.1f} MiB "
        f"({written.num_bytes / written.source_bytes:.2f} of the source); matrices: {counts}"
    )
    return 0


def _calibrated(
    options: argparse.Namespace, config: dict[str, Any], dtype: torch.dtype, progress: Progress
) -> plan.Plan:
    """Runs calibration on the text; see core's `export.plan`."""
    from vllm_davinci.core.export import calibration, plan, source
    from vllm_davinci.core.weight_files import files

    source.require_calibratable(options.source, config)
    windows = calibration.text_windows(
        options.source, options.calibrate, options.calibration_tokens
    )
    stored = {
        name for path in files.tensor_files(options.source) for name in files.read_header(path)
    }
    budget = DEFAULT_BUDGETS.get(options.type, DEFAULT_BUDGET)
    task = progress.add_task("calibrating (tokens)", total=plan.num_tokens(windows))

    def advance(count: int) -> None:
        done = progress.tasks[task].completed + count
        progress.update(task, completed=done, total=max(done, progress.tasks[task].total or 0))

    found = plan.make_plan(
        options.source,
        options.type,
        config,
        windows,
        dtype,
        budget if options.budget is None else options.budget,
        not options.no_smoothing,
        stored,
        advance,
    )
    progress.update(task, total=progress.tasks[task].completed)
    return found


def _tell(found: plan.Plan, console: Console) -> None:
    """Prints the loss, the costliest layers, and warnings."""
    table = Table("costs most", "written as", "strength", *found.costs[0].losses)
    for cost in sorted(found.costs, key=lambda cost: -next(iter(cost.losses.values())))[:10]:
        first, *others = cost.layers
        name = "".join([first, *(f", {other.rpartition('.')[2]}" for other in others)])
        losses = (f"{math.expm1(loss):.2%}" for loss in cost.losses.values())
        table.add_row(name, cost.kind, f"{cost.strength:.1f}", *losses)
    console.print(table)
    console.print(
        f"held-out text: perplexity {found.perplexity:.3f} in floats, "
        f"{found.perplexity * (1 + found.loss.share):.3f} as written ({found.loss.share:+.2%}, "
        f"standard error {found.loss.error:.2%})",
        soft_wrap=True,
    )
    for note in found.notes:
        console.print(f"outliers stay in {note}", markup=False, soft_wrap=True)
    for warning in found.warnings:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)


def _share(text: str) -> float:
    """Parses 3% or 3 as 0.03, none as infinity. Raises ArgumentTypeError for anything else."""
    if text == "none":
        return math.inf
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage such as 3%, nor none")
    return value


def _problem_with(options: argparse.Namespace) -> str | None:
    """The first mistake in the options that can be found before core is imported, which is slow."""
    known = _scheme_names()
    if known and options.type not in known:
        close = difflib.get_close_matches(options.type.upper(), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known)}"
        return f"--type {options.type} is no quantization type: {hint}"
    if options.type == "W8A8" and options.calibrate is None:
        return "--type W8A8 needs --calibrate FILE, a text whose activations set the input scales"
    if options.calibration_tokens < 1:
        return f"--calibration-tokens is {options.calibration_tokens} and must be at least 1"
    if options.calibrate is None and (options.budget is not None or options.report is not None):
        return "--budget and --report need --calibrate FILE, the text to measure with"
    if options.calibrate is not None and options.type == "FLOAT":
        return "--calibrate applies to types that round; --type FLOAT does not round"
    if options.report is not None and not options.report.parent.is_dir():
        return f"--report {options.report}: its directory does not exist"
    if options.calibrate is not None and not options.calibrate.is_file():
        return f"--calibrate {options.calibrate} is not a file: name a UTF-8 text"
    destination = options.destination
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        return f"{destination} exists and is not an empty directory: name a new one"
    if not (options.source / "config.json").is_file():
        return f"{options.source} has no config.json: name the directory of a checkpoint"
    return None


def _scheme_names() -> list[str]:
    """Names of core's schemes, read from their files; empty if the files are not found."""
    package = find_spec("vllm_davinci")
    folders = [] if package is None else package.submodule_search_locations or []
    return sorted(
        name.strip('"')
        for folder in folders
        for path in Path(folder).glob("core/quantization/schemes/*.py")
        for name in re.findall(
            r'^    name = ("\w+"|FLOAT)$', path.read_text(encoding="utf-8"), re.M
        )
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
