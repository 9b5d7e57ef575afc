"""`vllm-davinci quantize SOURCE DESTINATION`: makes an int8 checkpoint of a float one."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from vllm_davinci.meta import core_access

DEFAULT_TYPE = "W8A8_DYNAMIC"
DTYPES = ("bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, help="directory of a checkpoint of floats, or of fp8 in blocks"
    )
    parser.add_argument("destination", type=Path, help="directory to write")
    parser.add_argument(
        "--type",
        default=DEFAULT_TYPE,
        help="W8A8_DYNAMIC scales every token when it comes; W8A8 takes the input's scale from "
        "--calibrate; W8A16 leaves inputs in 16 bits; FLOAT turns fp8 into floats (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="UTF-8 text like what the model will see; W8A8 needs it",
    )
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="tokens from the front of FILE (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the model (default: the source's, else bfloat16)"
    )


def run(options: argparse.Namespace) -> int:
    """Exit status 0 when a whole checkpoint was written; 1 with the reason, 2 for bad options."""
    console = Console(stderr=True)
    if problem := _problem_with(options):
        console.print(f"vllm-davinci quantize: {problem}", markup=False, soft_wrap=True)
        return 2
    core_access.prepare()
    from vllm_davinci.core.errors import CoreError  # imports torch and vLLM
    from vllm_davinci.core.export import calibration, exporter, source
    from vllm_davinci.core.weight_files import files

    try:
        scheme = exporter.written_scheme(options.type)
        config = files.read_config(options.source)
        size = sum(path.stat().st_size for path in files.tensor_files(options.source))
        with _progress(console) as progress:
            ranges = {}
            if scheme.needs_input_range:
                source.require_calibratable(options.source, config)
                windows = calibration.text_windows(
                    options.source, options.calibrate, options.calibration_tokens
                )
                tokens = sum(window.numel() for window in windows)
                task = progress.add_task("calibrating, twice (tokens)", total=2 * tokens)
                ranges = calibration.input_ranges(
                    options.source, windows, lambda count: progress.advance(task, count)
                )
            work = progress.add_task("rounding (bytes)", total=size)
            written = exporter.Exporter(
                options.source,
                options.destination,
                scheme.name,
                exporter.model_dtype(config, options.dtype),
                ranges,
            ).run(lambda count: progress.advance(work, count))
            progress.update(work, completed=size)
    except CoreError as error:
        console.print(f"vllm-davinci quantize: {error}", markup=False, soft_wrap=True)
        return 1
    counts = ", ".join(f"{count} {name}" for name, count in sorted(written.counts.items()))
    print(
        f"{written.directory}: {written.num_bytes / 2**20:.1f} MiB "
        f"({written.num_bytes / written.source_bytes:.2f} of the source); matrices: {counts}"
    )
    return 0


def _problem_with(options: argparse.Namespace) -> str | None:
    if options.type == "W8A8" and options.calibrate is None:
        return "--type W8A8 needs --calibrate FILE, a text whose activations set the input scales"
    if options.calibration_tokens < 1:
        return f"--calibration-tokens is {options.calibration_tokens} and must be at least 1"
    destination = options.destination
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        return f"{destination} exists and is not an empty directory: name a new one"
    return None


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
