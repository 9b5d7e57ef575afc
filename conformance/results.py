"""A suite's outcomes, reasons for tests that do not pass, and the record of a run.

A suite's `reasons.toml` has one table per reason:

    [[reason]]
    why = "needs a second server"
    tests = ["test/distributed/test_x.py::*"]   # patterns of names; default: all
    message = "regular expression"              # in the failure's text; default: any
    lacks_operator = true                       # the test needs an operator that is not exported

`results.json` beside it has the outcomes of the last run with `--record`;
`ci/generate_reference.py` makes docs/reference/conformance.md from it.
"""

import fnmatch
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from test_files import Outcome

from versions import read_toml

PASSED, SKIPPED = "passed", "skipped"
# The same string as in outcome_plugin.py, which only other projects' tests import.
SAMPLED = "sampled"
KEPT = "outcomes.jsonl"


@dataclass(frozen=True)
class Reason:
    why: str
    tests: tuple[str, ...] = ("*",)
    message: str = ""
    lacks_operator: bool = False

    def explains(self, outcome: Outcome) -> bool:
        return any(fnmatch.fnmatchcase(outcome.test, test) for test in self.tests) and bool(
            re.search(self.message, outcome.message)
        )


def read_reasons(path: Path) -> list[Reason]:
    tables = read_toml(path).get("reason", [])
    return [Reason(**{**table, "tests": tuple(table.get("tests", "*"))}) for table in tables]


def is_good(outcome: Outcome) -> bool:
    return outcome.outcome in (PASSED, SKIPPED, SAMPLED)


def reason_of(outcome: Outcome, reasons: list[Reason]) -> Reason | None:
    return next((reason for reason in reasons if reason.explains(outcome)), None)


def is_explained(outcome: Outcome, reasons: list[Reason]) -> bool:
    return is_good(outcome) or reason_of(outcome, reasons) is not None


def keep(directory: Path, outcomes: Iterable[Outcome]) -> None:
    """Appends outcomes to those stored in `directory`."""
    with (directory / KEPT).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(each)) + "\n" for each in outcomes)


def kept(directory: Path) -> list[Outcome]:
    """Returns the latest outcome of each test in `directory`."""
    path = directory / KEPT
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [Outcome(**json.loads(line)) for line in lines]
    return list({each.test: each for each in found}.values())


def settled(outcomes: list[Outcome], reasons: list[Reason]) -> list[Outcome]:
    """Returns outcomes of the files in which every test passed or has a reason."""
    open_files = {each.file for each in outcomes if not is_explained(each, reasons)}
    return [each for each in outcomes if each.file not in open_files]


def report(
    outcomes: Iterable[Outcome], reasons: list[Reason], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a run's record: counts, and each test that does not pass, under its reason.

    about: source, version and selection of the tests
    """
    counts: Counter[str] = Counter()
    explained: dict[str, list[str]] = defaultdict(list)
    unexplained: dict[str, str] = {}
    files: set[str] = set()
    lacking: set[str] = set()
    broken: set[str] = set()
    kernels: set[str] = set()
    left_out = 0
    for outcome in outcomes:
        files.add(outcome.file)
        if outcome.outcome == SAMPLED:
            chosen, cases = map(int, outcome.message.split(" of "))
            left_out += cases - chosen
            continue
        if outcome.outcome == PASSED and outcome.message:
            kernels.update(outcome.message.split(", "))
        if is_good(outcome):
            counts[outcome.outcome] += 1
            continue
        broken.add(outcome.file)
        reason = reason_of(outcome, reasons)
        if reason is not None and reason.lacks_operator:
            counts["lacks_operator"] += 1
            lacking.add(outcome.file)
        else:
            counts["not_passed"] += 1
        if reason is None:
            unexplained[outcome.test] = f"{outcome.outcome}: {outcome.message}"
        else:
            explained[reason.why].append(outcome.test)
    return {
        **about,
        "files": len(files),
        "files_lacking_an_operator": len(lacking),
        "files_whole": len(files - broken),
        "passed": counts[PASSED],
        "skipped": counts[SKIPPED],
        "lacks_operator": counts["lacks_operator"],
        "not_passed": counts["not_passed"],
        **({"cases_left_out": left_out} if left_out else {}),
        **({"kernels": len(kernels)} if kernels else {}),
        "reasons": {why: sorted(tests) for why, tests in sorted(explained.items())},
        "unexplained": unexplained,
    }


def share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({100 * part / whole:.1f} %)" if whole else "")


def not_passed(record: Mapping[str, Any]) -> set[str]:
    """Returns tests that do not pass, with or without a reason, and programs that are not built."""
    lists = [*record["reasons"].values(), *record.get("not_built", {}).values()]
    return {*record["unexplained"], *(test for tests in lists for test in tests)}


def worse_than(earlier: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """Returns tests that do not pass, and that passed or did not exist in an earlier record."""
    return sorted(not_passed(record) - not_passed(earlier))


def finish(record: dict[str, Any], recorded: Path, is_to_be_recorded: bool) -> int:
    """Prints a record; writes it, or compares it with the last recorded run.

    Returns 1 if a test fails that passed in the recorded run. When recording, or without a record,
    returns 1 if a failed test has no reason.
    """
    ran = record["passed"] + record["not_passed"]
    print(
        f"{share(record['passed'], ran)} tests passed whose operators are exported; "
        f"{record['lacks_operator']} ask for others, {record['skipped']} skipped themselves"
    )
    able = record["files"] - record["files_lacking_an_operator"]
    print(f"{share(record['files_whole'], able)} files passed whole")
    for why, tests in record["reasons"].items():
        print(f"{len(tests):5}  {why}")
    for test, message in record["unexplained"].items():
        print(f"no reason is known: {test}: {message}")
    bad: list[str] = list(record["unexplained"])
    if is_to_be_recorded:
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        recorded.write_text(text, encoding="utf-8")
        print(f"written to {recorded}")
    elif recorded.exists():
        earlier = json.loads(recorded.read_text(encoding="utf-8"))
        bad = worse_than(earlier, record)
        print(f"{len(bad)} tests do not pass that are not in the record of {earlier['version']}")
        for test in bad:
            print(f"not in the record: {test}")
    if not ran:
        print("no test ran: without an NPU, run the suite under `vnpu run --`")
    return 1 if bad or not ran else 0
