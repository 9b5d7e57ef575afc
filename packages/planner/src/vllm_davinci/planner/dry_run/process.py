"""Runs a dry-run in a separate process, for commands that compare several."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_davinci.planner.errors import DryRunError
from vllm_davinci.planner.time_limit import time_limit


def report_of(
    options: argparse.Namespace,
    work: Sequence[str],
    steps: int,
    engine_arguments: Sequence[str],
    shortened_by: str,
) -> dict[str, Any]:
    """Dry-runs this model on this machine and returns the report. Raises DryRunError.

    work:         options that describe the requests
    steps:        maximum number of their steps
    shortened_by: option that shortens the run, for the timeout's message
    """
    limit_s = time_limit(steps)
    with tempfile.TemporaryDirectory(prefix="vllm-davinci-dry-runs.") as directory:
        report = Path(directory) / "report.json"
        command = [
            *(sys.executable, "-m", "vllm_davinci.meta", "dry-run", f"--model={options.model}"),
            *(f"--chip={options.chip}", f"--topology={options.topology}"),
            *(f"--routing={options.routing}", *work, f"--json={report}", *engine_arguments),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise DryRunError(
                f"a dry-run to compare took more than {limit_s:.0f} s. Lower {shortened_by}."
            ) from error
        if done.returncode != 0:
            last = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise DryRunError(f"a dry-run to compare failed:\n{last}")
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found
