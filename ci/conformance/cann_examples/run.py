"""CANN's example programs over the virtual NPU: `run.py --checkout DIR... --programs DIR [NAMES]`.

The checkouts say which programs there are, and which of them call operators that are not exported.
Programs are run, not built: `--programs` names a directory that has each at its source's path below
its project's name, `DIR/ops-nn/activation/elu/examples/test_aclnn_elu`; or, where it could not be
built, what the compiler said in a file of the same name that ends in `.txt`.

A program passes when its exit status is 0, it prints no failure, and it prints each line that its
page says it prints (pages.py). Exit status 1 where one does not pass, or could not be built, for
which `reasons.toml` has no reason.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parents[1]), str(HERE.parent)]

import checkout  # noqa: E402 - in the folder above
import results  # noqa: E402
from cann_examples.examples import PATTERNS, Example, examples_of, project_of  # noqa: E402
from cann_examples.pages import is_expected, not_printed  # noqa: E402
from test_files import Outcome  # noqa: E402

from progress import Steps, wait_for_all  # noqa: E402

WHAT = (
    "C++ programs that CANN's sources give as examples of their operators, and of the runtime, "
    "linked with the virtual NPU's libraries: those for Ascend910B and 910C that need no device "
    "code"
)
SOURCE = "a checkout of CANN's ops-math, ops-nn, ops-transformer or runtime"
RULE = (
    "A program passes when its exit status is 0, it prints no failure, and it prints each line of "
    "a sample of output on its page, on an Ascend910B or else on a 910C. Pages of the runtime's "
    "examples have such lines; pages of operators give no results. Where CANN's build makes a "
    "header, or its toolkit has it, programs were built with a stand-in."
)
LACKS_OPERATOR = "calls an operator that is not exported"
NOT_BUILT = "not built"
# Some examples are written for this one alone; the default is an Ascend910B.
ASCEND_910C = "Ascend910_9391"
LIMIT_S = 180.0
MOST_MESSAGE = 300
# "12 passed, 0 failed" and "fail=0" tell of none.
_FAILURE = re.compile(r"(?<!\b0 )\b(?:fail(?:ed|s|ure)?|error)\b(?!\s*[=:]\s*0\b)", re.IGNORECASE)
# `vnpu run` alone has to tell programs where the libraries are.
_NOT_INHERITED = ("LD_LIBRARY_PATH",)
# Examples of several devices ask for their number.
_ENVIRONMENT = {"ENV_DEV_NUM": "8"}


@dataclass(frozen=True)
class Suite:
    """
    programs: directory of what was built
    logs:     directory for what the programs print, and for kept outcomes
    commands: that start a program over a virtual NPU, one for each chip: a program passes on one
    is_exported: whether the virtual NPU has an operator
    """

    programs: Path
    logs: Path
    reasons: list[results.Reason]
    commands: tuple[tuple[str, ...], ...]
    is_exported: Callable[[str], bool]

    def outcomes(self, examples: Iterable[Example]) -> list[Outcome]:
        """Outcomes of examples that are not left out and call exported symbols only.

        Runs those that are built, but for what is settled in `logs`.
        """
        able = [each for each in examples if self.why_not(each) is None]
        kept = results.settled(results.kept(self.logs), self.reasons)
        done = {each.test: each for each in kept if each.outcome != NOT_BUILT}
        steps = Steps(len([each for each in able if each.name not in done]), self.logs)

        def one(example: Example) -> Outcome:
            if example.name in done:
                return done[example.name]
            outcome = self._outcome(example)
            steps.start(example.name)
            if not results.is_good(outcome):
                steps.note(f"{outcome.outcome}: {outcome.message}")
            results.keep(self.logs, [outcome])
            return outcome

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(one, able))

    def why_not(self, example: Example) -> str | None:
        """Why an example is not run, None where it is."""
        if example.left_out is None and not all(map(self.is_exported, example.operators)):
            return LACKS_OPERATOR
        return example.left_out

    def _outcome(self, example: Example) -> Outcome:
        for name in (example.name, *example.partners):
            program = self.programs / name
            if not program.is_file():
                said = program.with_name(f"{program.name}.txt")
                why = said.read_text(encoding="utf-8") if said.exists() else "no such program"
                return Outcome(example.name, NOT_BUILT, _one_line(why.splitlines()[:1]))
        outcome = self._run(example, self.commands[0])
        for command in self.commands[1:]:
            if results.is_good(outcome):
                break
            elsewhere = self._run(example, command)
            outcome = elsewhere if results.is_good(elsewhere) else outcome
        return outcome

    def _run(self, example: Example, command: tuple[str, ...]) -> Outcome:
        name = example.name
        names = (name, *example.partners)
        inherited = {key: said for key, said in os.environ.items() if key not in _NOT_INHERITED}
        with tempfile.TemporaryDirectory() as scratch:
            for folder in example.folders:
                (Path(scratch) / folder).mkdir()
            processes = []
            for each in names:
                with self._log(each).open("wb") as output:
                    process = subprocess.Popen(
                        [*command, str((self.programs / each).resolve())],
                        cwd=scratch, env=inherited | _ENVIRONMENT, start_new_session=True,
                        stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    )  # fmt: skip
                processes.append(process)
            status, *_ = [wait_for_all(process, LIMIT_S) for process in processes]
        lines = self._printed(name)
        failures = [
            line
            for line in lines
            if _FAILURE.search(line) and not is_expected(line, example.prints)
        ]
        if status is None:
            return Outcome(name, "crashed", f"ran past {LIMIT_S:.0f} s")
        if status < 0:
            return Outcome(name, "crashed", f"signal {-status}: {_one_line(lines[-2:])}")
        if status or failures:
            said_why = _one_line(failures[:2] or lines[-2:])
            return Outcome(name, "failed", f"status {status}: {said_why}")
        missing = not_printed(
            example.prints, [line for each in names for line in self._printed(each)]
        )
        if missing:
            return Outcome(name, "failed", f"prints no: {_one_line(missing[:2])}")
        return Outcome(name, results.PASSED)

    def _log(self, name: str) -> Path:
        return self.logs / f"{name.replace('/', '.')}.log"

    def _printed(self, name: str) -> list[str]:
        return self._log(name).read_text(encoding="utf-8", errors="replace").splitlines()


def _one_line(lines: list[str]) -> str:
    return " | ".join(" ".join(line.split()) for line in lines)[:MOST_MESSAGE]


def record(
    suite: Suite, examples: list[Example], outcomes: list[Outcome], versions: dict[str, str]
) -> dict[str, Any]:
    """Writes down a run in the form of the other suites; `sources` has the numbers of each project.

    versions: of the projects, by name
    """
    ran = [each for each in outcomes if each.outcome != NOT_BUILT]
    not_built = results.report(
        [each for each in outcomes if each.outcome == NOT_BUILT], suite.reasons, {}
    )
    passed = {each.test for each in ran if results.is_good(each)}
    built = {each.test for each in ran}
    left_out = {each.name: suite.why_not(each) for each in examples}
    sources = []
    for project, version in versions.items():
        own = [each.name for each in examples if each.project == project]
        sources.append(
            {
                "name": project,
                "version": version,
                "programs": len(own),
                "left_out": Counter(why for name in own if (why := left_out[name])),
                "built": len(built.intersection(own)),
                "passed": len(passed.intersection(own)),
            }
        )
    report = results.report(
        ran,
        suite.reasons,
        {
            "suite": HERE.name,
            "what": WHAT,
            "source": SOURCE,
            "arguments": "--checkout DIR... --programs BUILT",
            "rule": RULE,
            "version": ", ".join(f"{name} {version}" for name, version in versions.items()),
            "selection": f"{len(ran)} of {len(examples)} programs",
            "sources": sources,
            "not_built": not_built["reasons"],
        },
    )
    report["lacks_operator"] = sum(why == LACKS_OPERATOR for why in left_out.values())
    report["unexplained"] |= not_built["unexplained"]
    return report


def _exported_operators() -> Callable[[str], bool]:
    from vllm_davinci.vnpu import library_directory

    library = CDLL(str(library_directory() / "libopapi.so"))
    return lambda operator: hasattr(library, f"{operator}GetWorkspaceSize")


def main() -> int:
    parser = argparse.ArgumentParser(description=WHAT)
    parser.add_argument("names", nargs="*", help="parts of programs' names; default: all")
    parser.add_argument(
        "--checkout", type=Path, required=True, action="append", help=f"{SOURCE}; repeat it"
    )
    parser.add_argument("--programs", type=Path, required=True, help="what was built of them")
    parser.add_argument("--record", action="store_true", help="write results.json")
    parser.add_argument(
        "--keep",
        type=Path,
        help="a directory for output and outcomes; programs that passed there, or have a reason, "
        "are not run again",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        logs = (options.keep or scratch / "logs").resolve()
        examples, versions = [], {}
        for source in options.checkout:
            project = project_of(source)
            files = checkout.files_of(source, PATTERNS[project], scratch / project)
            examples += examples_of(project, files)
            versions[project] = checkout.version_of(source)
        names = options.names or [""]
        examples = [each for each in examples if any(name in each.name for name in names)]
        suite = Suite(
            options.programs,
            logs,
            results.read_reasons(HERE / "reasons.toml"),
            (("vnpu", "run", "--"), ("vnpu", "run", f"--soc={ASCEND_910C}", "--")),
            _exported_operators(),
        )
        logs.mkdir(parents=True, exist_ok=True)
        found = record(suite, examples, suite.outcomes(examples), versions)
    for each in found["sources"]:
        left_out = ", ".join(f"{number} {why}" for why, number in each["left_out"].items())
        print(
            f"{each['name']}: {results.share(each['passed'], each['built'])} programs passed, "
            f"of {each['programs']}; left out: {left_out or 'none'}"
        )
    for why, programs in found["not_built"].items():
        print(f"{len(programs):5}  not built: {why}")
    return results.finish(found, HERE / "results.json", options.record)


if __name__ == "__main__":
    sys.exit(main())
