"""Runs a command whose processes write traces or timelines, and makes one file of them."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import FrameType

from vllm_davinci.vnpu.errors import TraceError


def run_traced(
    command: list[str],
    destination: pathlib.Path,
    variable: str,
    merge: Callable[[Sequence[pathlib.Path], pathlib.Path], int],
) -> int:
    """Runs `command` to its end; returns its exit status, 128 + n for signal n.

    variable: of the environment, which names the directory where each process writes its file
    merge:    makes one file of such directories and returns its number of tasks
    Raises TraceError when `destination` cannot be written (before the command starts) or no task
    ran, and FileNotFoundError or PermissionError for the command.
    """
    try:
        parts = tempfile.TemporaryDirectory(prefix=f"{destination.name}.", dir=destination.parent)
    except OSError as error:
        raise TraceError(
            f"{destination}: {error}. Name a file in a directory that can be written."
        ) from error
    with parts as directory:
        child = subprocess.Popen(command, env={**os.environ, variable: directory})

        def pass_on(number: int, frame: FrameType | None) -> None:
            child.send_signal(number)

        # A terminal sends its interrupt to the child as well.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, pass_on)
        signal.signal(signal.SIGHUP, pass_on)
        status = child.wait()
        try:
            count = merge([pathlib.Path(directory)], destination)
        except TraceError as error:
            print(f"vnpu: {error}", file=sys.stderr)
        else:
            print(f"vnpu: {destination} has {count} tasks.", file=sys.stderr)
    return status if status >= 0 else 128 - status
