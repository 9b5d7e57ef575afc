"""The parts of a run, in their order, each in a process of its own.

A part's module defines `cases(settings, directory)`. A device in error stays so until its process
ends; the part then continues in a new process after the failed case.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_davinci.verify.finding import Finding
from vllm_davinci.verify.journal import Journal

# A part that loses this many processes is given up.
MOST_PROCESSES = 40
GO_ON = 75
"""Exit status of a process that asks for a successor."""


@dataclass(frozen=True)
class Part:
    """
    asks:      the part's question, for the report
    limit_s:   time limit of a case, in seconds
    variables: environment variables of its process
    """

    name: str
    asks: str
    limit_s: float = 300.0
    variables: Mapping[str, str] = field(default_factory=dict)


PARTS = (
    Part("environment", "What is installed here, and which devices are there?"),
    Part("operators", "Does every operator that we launch compute what its definition says?"),
    Part("constraints", "Does the device refuse what we expect it to refuse, and accept the rest?"),
    Part("tokens", "Are a model's tokens those of its definition, with overlap and without?"),
    Part("streams", "Do streams run side by side, and what does the profiler see of them?"),
    # Only times: if they are modelled, arithmetic would only take this host's time.
    Part("costs", "What do launches, events, copies, memory and products cost?",
         variables={"VNPU_COMPUTE": "0"}),
    Part("collectives", "What do collectives cost by size, and are their results right?"),
)  # fmt: skip
NAMES = tuple(part.name for part in PARTS)


def journal_of(part: Part, directory: Path) -> Journal:
    """The part's journal, from this run and earlier ones of the directory."""
    return Journal(directory / f"{part.name}.jsonl")


def run_part(part: Part, directory: Path, tell: Callable[[str], None]) -> Journal:
    """Runs a part's missing cases; returns its journal.

    tell: receives a line for each lost process
    """
    path = directory / f"{part.name}.jsonl"
    for _ in range(MOST_PROCESSES):
        journal = Journal(path)
        if journal.is_finished:
            return journal
        if journal.begun is not None:
            case, how = journal.begun, _reason(directory / f"{part.name}.log")
            tell(f"{part.name}: lost its process at {case}: {how.splitlines()[-1]}")
            finding = Finding(case, "the process ended", passed=False, details={"message": how})
            journal.end(case, [finding], journal.seconds)
        status = _process(part, directory, path)
        journal = Journal(path)
        if status not in (0, GO_ON) and journal.begun is None and not journal.is_finished:
            how = _reason(directory / f"{part.name}.log")
            finding = Finding(part.name, "did not start", passed=False, details={"message": how})
            journal.end(part.name, [finding], journal.seconds)
            journal.finish(journal.seconds)
            return journal
    journal = Journal(path)
    journal.end(part.name, [Finding(part.name, "gave up", passed=False)], journal.seconds)
    journal.finish(journal.seconds)
    return journal


def _process(part: Part, directory: Path, path: Path) -> int:
    """Runs one process of a part; kills it if a case makes no progress in time."""
    command = [sys.executable, "-m", "vllm_davinci.verify.part_process", part.name]
    with (directory / f"{part.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*command, str(directory)],
            env={**os.environ, **part.variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return _wait(process, part, path, log.name)
        finally:
            _end(process)


def _wait(process: subprocess.Popen[bytes], part: Part, path: Path, log: str) -> int:
    size, since = -1, time.monotonic()
    while True:
        try:
            return process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            now = path.stat().st_size if path.exists() else 0
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > part.limit_s:
                _end(process)
                with Path(log).open("a", encoding="utf-8") as file:
                    file.write(f"\nno progress within {part.limit_s:.0f} s: ended\n")
                return -signal.SIGKILL


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)


def _reason(log: Path) -> str:
    """The last lines of a process's log."""
    text = log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""
    return "\n".join(text.splitlines()[-12:]) or "it said nothing"
