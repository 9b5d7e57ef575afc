"""A suite of unittest files in a repository of torch_npu's, run over the virtual NPU.

Beside the suite's `run.py` lie `files.txt`, one path a line, `reasons.toml` and, of the last run
with `--record`, `results.json` (results.py).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import checkout
import results
from test_files import Outcome, TestRun

from progress import Steps

# That their tests import beside torch_npu.
PACKAGES = ("expecttest", "scipy", "parameterized")


@dataclass(frozen=True)
class Suite:
    """
    directory:  of its `run.py`
    what:       whose tests of what, for the table
    repository: where a checkout comes from
    folders:    that `files.txt` chooses from
    """

    directory: Path
    what: str
    repository: str
    folders: tuple[str, ...]

    def main(self, description: str) -> int:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("names", nargs="*", help="parts of files' names; default: all files")
        parser.add_argument(
            "--checkout", type=Path, required=True, help=f"a checkout of {self.repository}"
        )
        parser.add_argument("--record", action="store_true", help="write results.json")
        parser.add_argument("--keep", type=Path, help="a directory for the tests' output")
        options = parser.parse_args()
        with tempfile.TemporaryDirectory() as scratch:
            source = checkout.tests_of(options.checkout, "test", Path(scratch))
            logs = (options.keep or Path(scratch) / "logs").resolve()
            outcomes = self._run(source, logs, options.names)
            total = sum(len(list((source / folder).glob("test_*.py"))) for folder in self.folders)
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
        packages = checkout.extra_packages(*PACKAGES)
        path = os.pathsep.join([str(source / "test"), str(packages)])
        run = TestRun(source, {"PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1"})
        steps = Steps(len(files), logs)
        outcomes = []
        for file in files:
            steps.start(file)
            found = run.outcomes(file, logs / f"{Path(file).stem}.log")
            good = [each for each in found if each.outcome in (results.PASSED, results.SKIPPED)]
            steps.note(f"{len(good)} of {len(found)}")
            outcomes += found
        return outcomes
