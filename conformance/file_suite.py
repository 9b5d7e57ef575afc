"""Runs another project's suite of pytest or unittest files on the virtual NPU.

Beside the suite's `run.py` are `files.txt` (one path or pattern per line), `reasons.toml`, and
`results.json` from the last run with `--record` (results.py). If a suite excludes files of its
folders, `excluded.toml` lists these with the reason:

    [[excluded]]
    why = "train models"
    files = ["test/train/test_*.py"]   # paths or patterns
"""

import argparse
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import checkout
import results
from test_files import Outcome, TestRun

from progress import Steps
from versions import read_toml

# Limits waits, so that a stream that waits forever does not delay the end of the process.
WAITS = {"VNPU_WAIT_LIMIT": "40"}


@dataclass(frozen=True)
class Suite:
    """
    directory:   folder of its `run.py`
    what:        subject of the tests, for the table
    source:      where to get a checkout
    tests:       the checkout's folder of tests
    imported:    further folders: packages that are not installed
    folders:     folders of whose files `files.txt` selects some; it may also name other files
    packages:    packages that only these tests import
    packages_folder: folder for them, beside the wheel cache
    import_from: folders to import from: absolute, or of the checkout
    environment: further environment variables
    arguments:   further arguments of pytest
    plugins:     pytest plugins in `directory`, for runs on our devices
    together: number of files per process, because importing torch takes longer than a file's tests.
        A file that fails there for an unknown reason runs once more, alone
    alone:       regular expression of files that get a process of their own
    rule:        how files and cases are chosen, for the page
    test_limit:  maximum seconds of a test
    file_limit:  maximum seconds of a file
    """

    directory: Path
    what: str
    source: str
    tests: str
    folders: tuple[str, ...]
    packages: tuple[str, ...]
    packages_folder: str = "conformance-packages"
    imported: tuple[str, ...] = ()
    import_from: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    together: int = 1
    alone: str | None = None
    rule: str = ""
    test_limit: int = 300
    file_limit: float = 400.0

    def main(self) -> int:
        parser = argparse.ArgumentParser(description=self.what)
        parser.add_argument("names", nargs="*", help="parts of files' names; default: all files")
        parser.add_argument("--checkout", type=Path, required=True, help=self.source)
        parser.add_argument("--record", action="store_true", help="write results.json")
        parser.add_argument(
            "--keep",
            type=Path,
            help="a directory for the tests' output and outcomes; files whose tests all passed "
            "there, or have a reason, are not run again",
        )
        options = parser.parse_args()
        reasons = results.read_reasons(self.directory / "reasons.toml")
        with tempfile.TemporaryDirectory() as scratch:
            source = checkout.tests_of(options.checkout, self.tests, Path(scratch))
            for folder in self.imported:
                checkout.tests_of(options.checkout, folder, Path(scratch))
            logs = (options.keep or Path(scratch) / "logs").resolve()
            excluded = self._excluded(source)
            files = self._files(source, excluded)
            names = options.names or [""]
            chosen = [file for file in files if any(name in file for name in names)]
            kept = results.settled(results.kept(logs), reasons)
            kept = [each for each in kept if each.file in chosen]
            done = {each.file for each in kept}
            outcomes = kept + self._run(
                source, logs, [file for file in chosen if file not in done], reasons
            )
            in_folders = set(self._all(source))
        record = results.report(
            outcomes,
            reasons,
            {
                "suite": self.directory.name,
                "what": self.what,
                "source": self.source,
                "version": checkout.version_of(options.checkout),
                "selection": self._selection(files, in_folders),
                **({"rule": self.rule} if self.rule else {}),
                "excluded": {why: len(its) for why, its in excluded.items()},
            },
        )
        return results.finish(record, self.directory / "results.json", options.record)

    def _selection(self, files: list[str], in_folders: set[str]) -> str:
        if not self.folders:
            return f"{len(files)} files"
        count = len(set(files) - in_folders)
        return (
            f"{len(files)} of {len(in_folders.union(files))} files of {', '.join(self.folders)}"
            f"{f' and {count} of other folders' if count else ''}"
        )

    def _all(self, source: Path) -> list[str]:
        return [
            str(file.relative_to(source))
            for folder in self.folders
            for file in (source / folder).glob("**/test_*.py")
        ]

    def _files(self, source: Path, excluded: Mapping[str, list[str]]) -> list[str]:
        """Returns the files of files.txt without the excluded ones.

        If the suite excludes files, raises SystemExit for a file that is neither run nor excluded.
        """
        lines = (self.directory / "files.txt").read_text(encoding="utf-8").split()
        left_out = {file for files in excluded.values() for file in files}
        chosen = [file for file in _matching(source, lines, "files.txt") if file not in left_out]
        if excluded and (open_ := sorted({*self._all(source)} - left_out - {*chosen})):
            raise SystemExit(
                f"{', '.join(open_)}: name each in files.txt, or in excluded.toml with a reason."
            )
        return chosen

    def _excluded(self, source: Path) -> dict[str, list[str]]:
        """Returns the excluded files by reason."""
        path = self.directory / "excluded.toml"
        tables = read_toml(path).get("excluded", []) if path.exists() else []
        return {
            table["why"]: _matching(source, table["files"], "excluded.toml") for table in tables
        }

    def _run(
        self, source: Path, logs: Path, chosen: list[str], reasons: list[results.Reason]
    ) -> list[Outcome]:
        path = [str(source / folder) for folder in self.import_from]
        path += [str(self._packages()), str(self.directory)]
        environment = {"PYTHONPATH": os.pathsep.join(path), **WAITS, **self.environment}
        plugins = [argument for name in self.plugins for argument in ("-p", name)]
        run = TestRun(
            source,
            environment,
            [*plugins, *self.arguments],
            test_limit_s=self.test_limit,
            file_limit_s=self.file_limit,
        )
        groups = self._groups(source, chosen)
        steps = Steps(len(groups), logs)
        outcomes: list[Outcome] = []
        for files in groups:
            steps.start(files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more")
            found = run.outcomes(files, logs / f"{Path(files[0]).stem}.log")
            doubtful = {each.file for each in found if not results.is_explained(each, reasons)}
            for file in sorted(doubtful) if len(files) > 1 else ():
                steps.note(f"once more, alone: {file}")
                again = run.outcomes([file], logs / f"{Path(file).stem}.alone.log")
                found = [each for each in found if each.file != file] + again
            good = [each for each in found if results.is_good(each)]
            steps.note(f"{len(good)} of {len(found)}")
            outcomes += found
            results.keep(logs, found)
        return outcomes

    def _packages(self) -> Path:
        return checkout.extra_packages(*self.packages, folder=self.packages_folder)

    def _groups(self, source: Path, files: list[str]) -> list[list[str]]:
        """Groups files by folder, because pytest does not allow equal names from two folders."""
        groups: list[list[str]] = []
        open_group: list[str] = []
        for file in files:
            if self.alone and re.search(self.alone, (source / file).read_text(encoding="utf-8")):
                groups.append([file])
                continue
            is_far = open_group and Path(open_group[0]).parent != Path(file).parent
            if not open_group or is_far or len(open_group) == self.together:
                open_group = []
                groups.append(open_group)
            open_group.append(file)
        return groups


def _matching(source: Path, patterns: Iterable[str], where: str) -> list[str]:
    found = {pattern: sorted(source.glob(pattern)) for pattern in patterns}
    if missing := [pattern for pattern, files in found.items() if not files]:
        raise SystemExit(f"the checkout has no {', '.join(missing)}: correct {where}.")
    return list(
        dict.fromkeys(str(f.relative_to(source)) for files in found.values() for f in files)
    )
