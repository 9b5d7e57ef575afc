"""A suite of pytest or unittest files in other people's repository, run over the virtual NPU.

Beside the suite's `run.py` lie `files.txt`, one path a line, `reasons.toml` and, of the last run
with `--record`, `results.json` (results.py).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import checkout
import results
from test_files import Outcome, TestRun

from progress import Steps

# A test that leaves a stream waiting for what never comes does not hold up the process's end.
WAITS = {"VNPU_WAIT_LIMIT": "40"}


@dataclass(frozen=True)
class Suite:
    """
    directory:   of its `run.py`
    what:        whose tests of what, for the table
    source:      where a checkout comes from
    tests:       folder of the checkout that is needed
    folders:     that `files.txt` chooses from
    packages:    that the tests import and no other session does
    import_from: folders of the checkout on the path of imports
    environment: further variables
    arguments:   further ones of pytest
    """

    directory: Path
    what: str
    source: str
    tests: str
    folders: tuple[str, ...]
    packages: tuple[str, ...]
    import_from: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    def main(self) -> int:
        parser = argparse.ArgumentParser(description=self.what)
        parser.add_argument("names", nargs="*", help="parts of files' names; default: all files")
        parser.add_argument("--checkout", type=Path, required=True, help=self.source)
        parser.add_argument("--record", action="store_true", help="write results.json")
        parser.add_argument("--keep", type=Path, help="a directory for the tests' output")
        options = parser.parse_args()
        with tempfile.TemporaryDirectory() as scratch:
            source = checkout.tests_of(options.checkout, self.tests, Path(scratch))
            logs = (options.keep or Path(scratch) / "logs").resolve()
            outcomes = self._run(source, logs, options.names)
            total = sum(
                len(list((source / folder).glob("**/test_*.py"))) for folder in self.folders
            )
        record = results.report(
            outcomes,
            results.read_reasons(self.directory / "reasons.toml"),
            {
                "suite": self.directory.name,
                "what": self.what,
                "version": checkout.version_of(options.checkout),
                "selection": f"{len(self._files())} of {total} files of {', '.join(self.folders)}",
            },
        )
        return results.finish(record, self.directory / "results.json" if options.record else None)

    def _files(self) -> list[str]:
        return (self.directory / "files.txt").read_text(encoding="utf-8").split()

    def _run(self, source: Path, logs: Path, names: list[str]) -> list[Outcome]:
        files = [file for file in self._files() if not names or any(name in file for name in names)]
        path = [str(source / folder) for folder in self.import_from]
        path.append(str(checkout.extra_packages(*self.packages)))
        environment = {"PYTHONPATH": os.pathsep.join(path), **WAITS, **self.environment}
        run = TestRun(source, environment, self.arguments)
        steps = Steps(len(files), logs)
        outcomes = []
        for file in files:
            steps.start(file)
            found = run.outcomes(file, logs / f"{Path(file).stem}.log")
            good = [each for each in found if each.outcome in (results.PASSED, results.SKIPPED)]
            steps.note(f"{len(good)} of {len(found)}")
            outcomes += found
        return outcomes
