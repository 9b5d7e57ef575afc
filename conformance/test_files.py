"""Runs pytest or unittest files of other projects, one or several in a process.

If a process ends during a test, a new one runs the remaining tests, so that a crash costs only one
test.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from progress import wait_for_all

HERE = Path(__file__).parent
MOST_STARTS = 12
_ENDED = (0, 1, 5)  # pytest's exit statuses after all requested tests have run


@dataclass(frozen=True)
class Outcome:
    """outcome: passed, failed, skipped or crashed. message: one line, empty if it passed"""

    test: str
    outcome: str
    message: str = ""

    @property
    def file(self) -> str:
        return self.test.split("::")[0]


@dataclass(frozen=True)
class TestRun:
    """Settings for running tests.

    directory: base of relative file paths
    environment: further environment variables
    arguments:   further arguments of pytest
    python:      interpreter that runs the tests
    inherited:   environment variables of this process that the tests see
    """

    directory: Path
    environment: Mapping[str, str]
    arguments: Sequence[str] = ()
    python: Path = Path(sys.executable)
    inherited: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    test_limit_s: int = 300
    file_limit_s: float = 400.0

    def outcomes(self, files: Sequence[str], log: Path, only: Sequence[str] = ()) -> list[Outcome]:
        """Runs the tests in `files` until one exceeds the limit; returns outcomes. Output goes to
        `log`.

        only: names of tests of these files; the others do not run
        """
        found: dict[str, Outcome] = {}
        for _ in range(MOST_STARTS):
            done, status = self._run_once(files, log, list(found), only)
            found |= {outcome.test: outcome for outcome in done}
            if status is None or not any(outcome.outcome == "crashed" for outcome in done):
                break
        for file in set(files) - {outcome.file for outcome in found.values()}:
            how = "skipped" if status in _ENDED else "crashed"
            found[file] = Outcome(file, how, f"no test was collected, status {status}")
        return list(found.values())

    def _run_once(
        self, files: Sequence[str], log: Path, left_out: list[str], only: Sequence[str]
    ) -> tuple[list[Outcome], int | None]:
        with tempfile.TemporaryDirectory() as scratch, log.open("a", encoding="utf-8") as output:
            written = Path(scratch) / "outcomes.jsonl"
            path = [str(HERE), self.environment.get("PYTHONPATH", "")]
            process = subprocess.Popen(
                [
                    self.python, "-m", "pytest", "-c", os.devnull, f"--rootdir={self.directory}",
                    "-p", "outcome_plugin", "-p", "no:cacheprovider", "-p", "no:randomly",
                    "--tb=short", "-v", f"--timeout={self.test_limit_s}",
                    "--continue-on-collection-errors",
                    *self.arguments, *(f"--deselect={test}" for test in left_out), *(only or files),
                ],
                cwd=self.directory, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={
                    **self.inherited, **self.environment,
                    "PYTHONPATH": os.pathsep.join(filter(None, path)),
                    "CONFORMANCE_OUTCOMES": str(written),
                },
            )  # fmt: skip
            status = wait_for_all(process, self.file_limit_s * len(files))
            lines = written.read_text(encoding="utf-8").splitlines() if written.exists() else []
            return list(_outcomes(map(json.loads, lines), status)), status


def _outcomes(lines: Iterator[dict[str, str]], status: int | None) -> Iterator[Outcome]:
    """Returns the latest outcome of each test; the process ended in a test that has only begun."""
    last: dict[str, Outcome] = {}
    for line in lines:
        before = last.get(line["test"])
        if before is None or before.outcome != "failed":
            last[line["test"]] = Outcome(line["test"], line["outcome"], line["message"])
    for outcome in last.values():
        if outcome.outcome == "begun":
            how = "ran past its file's limit" if status is None else f"ended with status {status}"
            yield Outcome(outcome.test, "crashed", f"the process {how}")
        else:
            yield outcome
