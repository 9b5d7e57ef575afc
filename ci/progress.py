"""Numbered steps on the terminal: command, duration, and file of the full output."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

# Interval of output without a terminal, where a silent build looks like a hang.
HEARTBEAT_S = 15.0
# A command without a time limit counts as hung if it is silent for this long; unpacking gigabytes
# prints nothing.
QUIET_LIMIT_S = 3600.0
LINES_SHOWN_ON_FAILURE = 40
_COUNTED = re.compile(r"\[(\d+)/(\d+)\]")


def exit_status(work: Callable[[], object]) -> int:
    """Runs steps; returns 0, or prints the failed step and returns 1."""
    try:
        work()
    except StepFailedError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return 0


def print_problems(problems: Sequence[str], checked: str) -> int:
    """Prints each problem, and the number of checked things without one. Returns the exit
    status.
    """
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{checked}, {len(problems)} problems")
    return 1 if problems else 0


class StepFailedError(Exception):
    """A step's command failed or ran past its limit."""


class Steps:
    """Prints `step n/N` lines and runs the commands of each step with a time limit.

    total: number of steps announced; `start` counts up to it
    log_directory: directory of the commands' full output, one file per step
    """

    def __init__(self, total: int, log_directory: Path) -> None:
        self.total = total
        self.log_directory = log_directory
        self.number = 0
        self.began_s = time.monotonic()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_stopped = False
        log_directory.mkdir(parents=True, exist_ok=True)

    @property
    def log_path(self) -> Path:
        return self.log_directory / f"step-{self.number}.log"

    def start(self, title: str) -> None:
        self.number += 1
        elapsed_s = time.monotonic() - self.began_s
        print(f"step {self.number}/{self.total}  {title}  ({elapsed_s:.0f} s so far)", flush=True)

    def note(self, text: str) -> None:
        print(f"          {text}", flush=True)

    def run(
        self,
        command: Sequence[str | Path],
        *,
        limit_s: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Runs a command, showing its latest line; raises StepFailedError with its last lines.

        limit_s: limit of the whole command; None: the limit is QUIET_LIMIT_S of silence
        """
        log_path = self.log_path
        began_s = time.monotonic()
        with log_path.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(map(str, command))}\n")
            log.flush()
            process = subprocess.Popen(
                [str(part) for part in command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # also ends a build's compilers
            )
            self._running.add(process)
            if self._is_stopped:  # seconds since the command was started
                self.stop()
            display = self._display(began_s)
            reader = threading.Thread(target=_copy, args=(process, log, display), daemon=True)
            reader.start()
            try:
                if limit_s is not None:
                    status = wait_for_all(process, limit_s)
                else:
                    status = wait_for_all(process, QUIET_LIMIT_S, lambda: display.last_line_s)
            finally:
                self._running.discard(process)
                reader.join(timeout=5)
                if process.stdout is not None:
                    process.stdout.close()
                display.close()
        if status == 0:
            return
        tail = log_path.read_text(encoding="utf-8").splitlines()[-LINES_SHOWN_ON_FAILURE:]
        what = f"ended with status {status}"
        if status is None:
            what = f"printed nothing for {QUIET_LIMIT_S:.0f} s"
            what = what if limit_s is None else f"ran past {limit_s:.0f} s"
        raise StepFailedError(
            "\n".join(tail)
            + f"\n\n{' '.join(map(str, command))}\n{what}. The whole output is in {log_path}."
        )

    def stop(self) -> None:
        """Ends running commands and their children, and commands that are just being started."""
        self._is_stopped = True
        for process in tuple(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)

    def _display(self, began_s: float) -> _Display:
        return _Display(began_s)


class StepsBeside(Steps):
    """Commands that run in the background of the steps on the terminal, with output to a log of
    their own.
    """

    def __init__(self, name: str, log_directory: Path) -> None:
        super().__init__(1, log_directory)
        self.name = name

    @property
    def log_path(self) -> Path:
        return self.log_directory / f"{self.name}.log"

    def start(self, title: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def _display(self, began_s: float) -> _Display:
        return _NoDisplay(began_s)


def wait_for_all(
    process: subprocess.Popen[Any], limit_s: float, since_s: Callable[[], float] | None = None
) -> int | None:
    """Waits for a process; returns its status, or None if it was killed with its children at the
    limit.

    process: started with start_new_session=True
    since_s: returns the time.monotonic() from which the limit counts, polled; default: now
    """
    began_s = time.monotonic()
    try:
        while (left_s := limit_s + (since_s() if since_s else began_s) - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=left_s)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=10)
        raise


class _Display:
    """Shows a command's latest line: in place on a terminal, otherwise every HEARTBEAT_S."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.last_shown_s = self.last_line_s = began_s
        self.on_terminal = sys.stdout.isatty()

    def show(self, line: str) -> None:
        now_s = time.monotonic()
        if self.on_terminal:
            width = shutil.get_terminal_size().columns
            print(f"\r\033[K          {line[: max(width - 12, 20)]}", end="", flush=True)
        elif now_s - self.last_shown_s >= HEARTBEAT_S:
            self.last_shown_s = now_s
            print(f"          {now_s - self.began_s:4.0f} s  {line[:100]}", flush=True)

    def close(self) -> None:
        if self.on_terminal:
            print("\r\033[K", end="", flush=True)


class _NoDisplay(_Display):
    """Shows nothing, because another command uses the terminal."""

    def show(self, line: str) -> None:
        pass

    def close(self) -> None:
        pass


def _copy(process: subprocess.Popen[str], log: TextIO, display: _Display) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        log.write(line)
        display.last_line_s = time.monotonic()
        text = line.strip()
        if text and not text.startswith("Successfully installed"):
            counted = _COUNTED.search(text)
            display.show(f"{counted[0]} {text.rsplit(' ', 1)[-1]}" if counted else text)
