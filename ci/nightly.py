"""Runs everything that takes too long for every change, and says at the end how each part went.

Run by `nox -s nightly`; `-- NAMES` narrows it to the parts whose names begin so (`tests`, `bench
kernels`). A part that fails does not keep the others from running. The exit status is 1 when a
part failed, or missed a goal whose figure is counted or modelled, and so the same on every machine.
Missed goals of measured figures are shown; the machine may be the reason.
"""

from __future__ import annotations

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
from versions import ROOT

RESULTS = ROOT / "results" / "nightly"
LONG_LIMIT_S = 3 * 3600.0
BENCHMARK_LIMIT_S = 3600.0
# Sessions of the noxfile with their arguments. Those that this checkout's noxfile lacks are left
# out.
SESSIONS = (
    ("tests", "-m", "thorough"),
    ("isolated",),
    ("cpp_tests",),
    ("conformance",),
)
# What every change does on a 910B, here on a 910C: calls of operators, none of which may be refused
# (float32 is exact only on `reference`), and engines on the strict chip.
ON_910C = (
    (
        {"VNPU_SOC": "reference:Ascend910_9391"},
        ("tests", *(f"packages/{name}/tests" for name in ("kernels", "models", "core"))),
    ),
    ({"VNPU_SOC": "Ascend910_9391"}, ("demo",)),
)
# pytest's, GoogleTest's and CTest's last words.
CLOSING_LINE = re.compile(
    r"=+ (\d+ .* in [\d.]+s.*?) =+$|^(\[  PASSED  \] \d+ tests)|^(\d+% tests passed.*)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Part:
    """
    arguments:   of `nox -s`, first the session
    result:      the file that a benchmark writes
    environment: variables beside those of this process
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
    """The sessions, also on another chip. known: the names of those that there are"""
    parts = [Part(" ".join(arguments), arguments, LONG_LIMIT_S) for arguments in SESSIONS]
    parts += [
        Part(f"910C {arguments[0]}", arguments, LONG_LIMIT_S, environment=environment)
        for environment, arguments in ON_910C
    ]
    return [part for part in parts if part.arguments[0] in known]


def all_parts() -> list[Part]:
    """The sessions that there are, then every benchmark."""
    listed = json.loads(printed_by(sys.executable, "-m", "nox", "--list", "--json"))
    parts = session_parts({session["name"] for session in listed})
    # The first run of a session in a fresh checkout builds the environment.
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
        is_good, text = goals_of(json.loads(part.result.read_text(encoding="utf-8")))
    log = steps.log_directory / f"step-{steps.number}.log"
    if closing := CLOSING_LINE.findall(log.read_text(encoding="utf-8", errors="replace")):
        text += f": {''.join(closing[-1])}"
    return Outcome(part, is_good, text, time.monotonic() - began_s)


def goals_of(result: dict[str, Any]) -> tuple[bool, str]:
    """Whether a benchmark reached all goals that do not depend on the machine; all goals, in words.

    result: as `benchmarks/run.py --json` writes it
    """
    with_goal = [row for row in result["rows"] if row["is_met"] is not None]
    missed = [row for row in with_goal if not row["is_met"]]
    if not with_goal:
        return True, "ran; it has no goal"
    text = f"{len(with_goal) - len(missed)} of {len(with_goal)} goals met"
    for row in missed:
        value, unit = (row["ours"], row["unit"])
        if row["ratio"] is not None:
            value, unit = row["ratio"], "x"
        goal = " ".join(
            f"{sign} {row[key]:g}"
            for sign, key in ((">=", "at_least"), ("<=", "at_most"))
            if row[key] is not None
        )
        text += f"\nMISSED: {row['name']} {value:.3g} {unit}, goal {goal} ({row['kind']})"
    return all(row["kind"] == "measured" for row in missed), text


def summary(outcomes: list[Outcome]) -> str:
    """A table: part, time, result; a result's further lines below its first."""
    width = max(len(outcome.part.name) for outcome in outcomes)
    lines = [f"{'part':{width}}  {'time':>7}  result"]
    for outcome in outcomes:
        first, *more = outcome.text.split("\n")
        lines.append(f"{outcome.part.name:{width}}  {outcome.seconds:5.0f} s  {first}")
        lines += [f"{'':{width}}  {'':7}  {line}" for line in more]
    bad = [outcome.part.name for outcome in outcomes if not outcome.is_good]
    lines.append(f"not as they should be: {', '.join(bad)}" if bad else "all as they should be")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="how names of parts begin; default: all parts")
    names = tuple(parser.parse_args().names)
    try:
        parts = all_parts()
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
