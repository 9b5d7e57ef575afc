"""Runs programs in processes forked from one that has imported torch but not touched a device.

Importing takes seconds. Settings are read at the first use of the device, so each program can have
its own.
"""

import multiprocessing
import os
import pathlib
import tempfile
import time
from dataclasses import dataclass

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch", "torch.distributed"])


@dataclass
class Ended:
    """How a process ended."""

    code: int  # exit status, negative for a signal
    text: str  # what it printed, standard output and errors together


def _be_program(source: str, variables: dict[str, str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(variables)
    exec(compile(source, "<program>", "exec"), {"__name__": "__program__"})


def run_together(sources: list[str], variables: list[dict[str, str]], limit: float) -> list[Ended]:
    """Runs the programs at the same time and waits for all, at most `limit` seconds.

    Tracebacks and call sites name a program's file "<program>". The processes end without C's exit
    handlers. Raises TimeoutError with what the programs printed if one does not end in time.
    """
    with tempfile.TemporaryDirectory() as directory:
        outputs = [pathlib.Path(directory) / str(n) for n in range(len(sources))]
        processes = [
            _processes.Process(target=_be_program, args=(source, own, str(output)))
            for source, own, output in zip(sources, variables, outputs, strict=True)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + limit
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
        late = [n for n, process in enumerate(processes) if process.is_alive()]
        for n in late:
            processes[n].kill()
            processes[n].join()
        ended = [
            Ended(process.exitcode or 0, output.read_text() if output.exists() else "")
            for process, output in zip(processes, outputs, strict=True)
        ]
    if late:
        raise TimeoutError(f"programs {late} still ran after {limit} s: {ended}")
    return ended
