"""Commands and servers that must end on their own, and their output."""

import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from vllm_davinci_testing.engines.server_process import (
    END_LIMIT_S,
    START_LIMIT_S,
    ForkedServer,
    processes_of_session,
)
from vllm_davinci_testing.processes.forked import Ended
from vllm_davinci_testing.processes.waiting import becomes_true


def run_to_its_end(
    *command: str | Path, log: Path, environment: Mapping[str, str] | None = None
) -> Ended:
    """Runs a command that ends within a start's time limit and leaves no process behind."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return _ended(process, command, log)


def run_server_to_its_end(
    model: Path, *options: str, log: Path, environment: Mapping[str, str] | None = None
) -> Ended:
    """Like run_to_its_end, for a `vllm serve` with forked processes: see ForkedServer."""
    server = ForkedServer(model, log, *options, environment=environment)
    return _ended(server.process, ("vllm", "serve", model, *options), log)


def _ended(process: Any, command: Iterable[str | Path], log: Path) -> Ended:
    """Waits until a session's first process ends. process: Popen, or an object like it"""
    try:
        ended = becomes_true(lambda: process.poll() is not None, START_LIMIT_S)
        assert ended, f"{command} did not end in {START_LIMIT_S} s.\n{_tail(log)}"
        gone = becomes_true(lambda: not processes_of_session(process.pid), END_LIMIT_S)
        left = processes_of_session(process.pid)
        assert gone, f"{command} has left {left} behind.\n{_tail(log)}"
    finally:
        for left_over in processes_of_session(process.pid):
            left_over.kill()
        process.wait(10)
    return Ended(process.returncode, log.read_text(errors="replace"))


def assert_explained(ended: Ended, *words: str) -> None:
    """Asserts that a process failed, but not by a signal, and that its output has these words."""
    assert ended.status > 0, f"status {ended.status}\n{ended.output[-6000:]}"
    missing = [word for word in words if word not in ended.output]
    assert not missing, f"The output does not say {missing}:\n{ended.output[-6000:]}"


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-6000:]


def has_ended(process: psutil.Process) -> bool:
    """True if a process has ended; it is a zombie until its status is fetched."""
    with suppress(psutil.NoSuchProcess):
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


def assert_ended(processes: Iterable[psutil.Process]) -> None:
    """Asserts that the processes end within END_LIMIT_S."""
    end = time.monotonic() + END_LIMIT_S
    while not all(map(has_ended, processes)):
        assert time.monotonic() < end, processes
        time.sleep(0.1)
