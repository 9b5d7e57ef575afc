"""Parts of a benchmark that need a process of their own: engines, other settings or packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

LINES_SHOWN = 30


def run_child(
    arguments: Sequence[str],
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    python: Path | str = sys.executable,
) -> str:
    """Runs `python arguments`, quietly; raises RuntimeError with its last lines when it fails.

    Returns what it has printed.
    environment: all variables of the child but two, or None for this process's
    """
    inherited = os.environ if environment is None else environment
    process = subprocess.run(
        [str(python), *arguments],
        env={**inherited, "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(
            f"{python} {' '.join(arguments[:3])} ended with status {process.returncode}. "
            "Its last lines:\n"
            + "\n".join((process.stdout + process.stderr).splitlines()[-LINES_SHOWN:])
        )
    return process.stdout
