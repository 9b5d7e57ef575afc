"""Runs everything that takes too long to run for every change; prints each part's result.

Run by `nox -s nightly`; `-- NAMES` selects parts by prefix (`tests`, `bench kernels`). The other
parts run even if one fails. `--checkouts DIR` names a folder with checkouts of upstream tests, each
under its suite's name; these suites run too, and fail if a test fails that passed in the recorded
results.json.

The exit status is 1 if a part failed, or missed a goal for a counted or modelled figure, which is
the same on every machine. known_misses.toml lists goals missed for a known reason: these fail only
if their figure changes. Missed goals for measured figures are only printed, because the machine may
be the cause.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from progress import StepFailedError, Steps
from versions import ROOT, read_toml

RESULTS = ROOT / "results" / "nightly"
LONG_LIMIT_S = 3 * 3600.0
BENCHMARK_LIMIT_S = 3 * 3600.0
# noxfile sessions with their arguments; those that this checkout's noxfile lacks are skipped.
SESSIONS = (
    ("tests", "--all"),
    ("other_machine", "all"),
    ("other_torch",),
    ("isolated",),
    ("triton",),
    ("cpp_tests",),
    ("conformance",),
    ("deployments",),
    ("faults", "--one-in", "24"),
    ("soak", "--seconds", "3600"),
    ("verify",),
    ("zoo",),
    ("clients",),
)
# A 910B's daily tests, run on a 910C: operator calls, none of which may be refused (float32 is
# exact only on `reference`), and engines on the strict chip.
ON_910C = (
    (
        {"VNPU_SOC": "reference:Ascend910_9391"},
        ("tests", *(f"packages/{name}/tests" for name in ("kernels", "models", "core"))),
    ),
    ({"VNPU_SOC": "Ascend910_9391"}, ("demo",)),
)
KNOWN_MISSES = ROOT / "ci" / "known_misses.toml"
# Summary lines of pytest, GoogleTest and CTest.
CLOSING_LINE = re.compile(
    r"=+ (\d+ .* in [\d.]+s.*?) =+$|^(\[  PASSED  \] \d+ tests)|^(\d+% tests passed.*)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Part:
    """
    arguments:   arguments of `nox -s`, the session first
    result:      result file of a benchmark
    environment: additional environment variables
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    result: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    part: Part
    is_good: bool
    text: str
    seconds: float


def nox(session: str, *options: str) -> list[str]:
    command = [sys.executable, "-m", "nox", "--non-interactive", "--session", session]
    return [*command, *(["--", *options] if options else [])]


def printed_by(*command: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LONG_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise StepFailedError(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def session_parts(known: Container[str]) -> list[Part]:
    """Returns the sessions' parts, some of them also for another chip. known: existing sessions"""
    parts = [Part(" ".join(arguments), arguments, LONG_LIMIT_S) for arguments in SESSIONS]
    parts += [
        Part(f"910C {arguments[0]}", arguments, LONG_LIMIT_S, environment=environment)
        for environment, arguments in ON_910C
    ]
    return [part for part in parts if part.arguments[0] in known]


def checkout_parts(checkouts: Path) -> list[Part]:
    """Returns parts for upstream test suites whose checkout is in the folder, under the suite's
    name.
    """
    parts = []
    for reasons in sorted((ROOT / "conformance").glob("*/reasons.toml")):
        suite = reasons.parent.name
        found = checkouts / suite
        if not found.is_dir():
            continue
        arguments = ("conformance", suite, "--checkout", str(found))
        parts.append(Part(f"conformance {suite}", arguments, LONG_LIMIT_S))
    return parts


def all_parts(checkouts: Path | None) -> list[Part]:
    """Returns all parts: sessions, suites with checkouts, benchmarks."""
    listed = json.loads(printed_by(sys.executable, "-m", "nox", "--list", "--json"))
    parts = session_parts({session["name"] for session in listed})
    parts += checkout_parts(checkouts) if checkouts is not None else []
    # A session's first run in a fresh checkout builds the environment.
    benchmarks = re.findall(r"^(\w+/\w+)\s", printed_by(*nox("bench", "--list")), re.MULTILINE)
    for name in benchmarks:
        result = RESULTS / f"{name.replace('/', '-')}.json"
        arguments = ("bench", name, "--json", str(result))
        parts.append(Part(f"bench {name}", arguments, BENCHMARK_LIMIT_S, result))
    return parts


def run(part: Part, steps: Steps) -> Outcome:
    steps.start(part.name)
    if part.result is not None:
        part.result.unlink(missing_ok=True)
    began_s = time.monotonic()
    is_good, text = True, "passed"
    try:
        steps.run(nox(*part.arguments), limit_s=part.limit_s, environment=part.environment)
    except StepFailedError as error:
        print(error, file=sys.stderr, flush=True)
        is_good, text = False, "FAILED"
    if is_good and part.result is not None:
        result = json.loads(part.result.read_text(encoding="utf-8"))
        is_good, text = goals_of(result, known_misses(part.arguments[1]))
    log = steps.log_directory / f"step-{steps.number}.log"
    if closing := CLOSING_LINE.findall(log.read_text(encoding="utf-8", errors="replace")):
        text += f": {''.join(closing[-1])}"
    return Outcome(part, is_good, text, time.monotonic() - began_s)


def goals_of(result: dict[str, Any], known: Mapping[str, float]) -> tuple[bool, str]:
    """Returns True if a benchmark met all machine-independent goals, and a text on all its goals.

    result: result file of `benchmarks/run.py --json`
    known:  value of each row whose goal is known to be missed
    """
    with_goal = [row for row in result["rows"] if row["is_met"] is not None]
    missed = [row for row in with_goal if not row["is_met"]]
    if not with_goal:
        return True, "ran; it has no goal"
    text = f"{len(with_goal) - len(missed)} of {len(with_goal)} goals met"
    is_good = True
    for row in missed:
        value, unit = (row["ours"], row["unit"])
        if row["ratio"] is not None:
            value, unit = row["ratio"], "x"
        goal = " ".join(
            f"{sign} {row[key]:g}"
            for sign, key in ((">=", "at_least"), ("<=", "at_most"))
            if row[key] is not None
        )
        was = known.get(row["name"])
        is_known = was is not None and f"{value:.2g}" == f"{was:.2g}"
        is_good &= is_known or row["kind"] == "measured"
        text += f"\n{'known' if is_known else 'MISSED'}: {row['name']} {value:.3g} {unit}, "
        text += f"goal {goal} ({row['kind']})"
        if was is not None and not is_known:
            text += f"; {KNOWN_MISSES.name} has {was:g}: find the cause, then correct it"
    if kept := set(known) - {row["name"] for row in missed}:
        is_good = False
        text += f"\nno longer missed, remove from {KNOWN_MISSES.name}: {', '.join(sorted(kept))}"
    return is_good, text


def known_misses(benchmark: str) -> dict[str, float]:
    """Returns a benchmark's rows whose goals are known to be missed, with their values."""
    misses = read_toml(KNOWN_MISSES)["miss"]
    return {miss["row"]: miss["value"] for miss in misses if miss["benchmark"] == benchmark}


def summary(outcomes: list[Outcome]) -> str:
    """Makes a table of part, time and result; a result may have several lines."""
    width = max(len(outcome.part.name) for outcome in outcomes)
    lines = [f"{'part':{width}}  {'time':>7}  result"]
    for outcome in outcomes:
        first, *more = outcome.text.split("\n")
        lines.append(f"{outcome.part.name:{width}}  {outcome.seconds:5.0f} s  {first}")
        lines += [f"{'':{width}}  {'':7}  {line}" for line in more]
    bad = [outcome.part.name for outcome in outcomes if not outcome.is_good]
    lines.append(f"failed: {', '.join(bad)}" if bad else "all parts passed")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="prefixes of part names (default: all parts)")
    parser.add_argument(
        "--checkouts", type=Path, help="a folder with checkouts, each under its suite's name"
    )
    options = parser.parse_args()
    names = tuple(options.names)
    try:
        parts = all_parts(options.checkouts and options.checkouts.resolve())
    except StepFailedError as error:
        print(error, file=sys.stderr)
        return 1
    chosen = [part for part in parts if not names or part.name.startswith(names)]
    if not chosen:
        known = ", ".join(part.name for part in parts)
        print(
            f"no part's name begins with {' or '.join(names)}: there are {known}", file=sys.stderr
        )
        return 1
    shutil.rmtree(RESULTS / "logs", ignore_errors=True)
    steps = Steps(len(chosen), RESULTS / "logs")
    outcomes = [run(part, steps) for part in chosen]
    text = summary(outcomes)
    print(f"\n{text}", flush=True)
    (RESULTS / "summary.txt").write_text(text + "\n", encoding="utf-8")
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
