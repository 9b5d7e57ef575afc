"""Runs a command to its end, for work that follows it."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from vllm_davinci.vnpu.errors import TraceError


def run_to_end(command: list[str], variables: Mapping[str, str]) -> int:
    """Runs `command` with additional variables; returns its exit status, 128 + n for signal n.

    Passes terminating signals on. Raises FileNotFoundError or PermissionError.
    """
    child = subprocess.Popen(command, env={**os.environ, **variables})

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    # The terminal sends its interrupt to the child as well.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGHUP, pass_on)
    status = child.wait()
    return status if status >= 0 else 128 - status


def run_traced(
    command: list[str],
    destination: pathlib.Path,
    variables: Mapping[str, str],
    variable: str,
    merge: Callable[[Sequence[pathlib.Path], pathlib.Path], int],
) -> int:
    """Runs a command whose processes write traces or timelines, and merges these.

    variables: additional environment variables of the command
    variable:  the variable for the directory of the processes' files
    merge:     merges such directories into one file and returns its number of tasks
    Returns the command's exit status. Raises TraceError if `destination` cannot be written
    (before the command starts) or no task ran, and FileNotFoundError or PermissionError for the
    command.
    """
    try:
        parts = tempfile.TemporaryDirectory(prefix=f"{destination.name}.", dir=destination.parent)
    except OSError as error:
        raise TraceError(
            f"{destination}: {error}. Name a file in a directory that can be written."
        ) from error
    with parts as directory:
        status = run_to_end(command, {**variables, variable: directory})
        try:
            count = merge([pathlib.Path(directory)], destination)
        except TraceError as error:
            print(f"vnpu: {error}", file=sys.stderr)
        else:
            print(f"vnpu: {destination} has {count} tasks.", file=sys.stderr)
    return status
