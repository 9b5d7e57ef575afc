"""Reports in an hour which changes another vLLM release would require; changes nothing.

`upstream.py [VERSION] [--report FILE] [--suite]`, run by `nox -s upstream`, creates an environment
with that vLLM, compares the sources of all names that our code depends on, then runs contract tests
and some end-to-end tests there, or all tests with --suite. The report lists changes by file; it is
written before and after the tests. Exits with 1 if a test fails. Parts have no time limit and show
their progress.

The default is the newest release that installs with core's torch; the report says why newer
releases do not.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import versions
import wheel_cache
from progress import StepFailedError, Steps
from versions import ROOT

GROUPS = ("build", "test")
# Quick tests first, whose failures say most; generation last.
TESTS = (
    "tests/contract/test_vllm_interface.py",
    "tests/contract/test_upstream_overrides.py",
    "tests/contract/test_components.py",
    "packages/core/tests/config",
    "packages/core/tests/attention",
    "tests/e2e/test_generate.py",
    "tests/e2e/test_generate_paths.py",
    "tests/e2e/test_exactness.py",
)
SUITE = ("packages", "tests/contract", "tests/e2e")
INDEX_LIMIT_S = 300.0
MOST_SHOWN = 300  # maximum characters of a failure
# Kinds of upstream_hooks.py; those that break a start come first.
KINDS = {
    "imported": "Names that are imported",
    "overridden": "Methods that are overridden",
    "attribute": "Attributes that methods of ours read",
    "kernel": "Kernels that have stand-ins",
}


# Each failed installation may include a build; older releases would add nothing.
MOST_TRIED = 4
_FINAL = re.compile(r"\d+\.\d+\.\d+(?:\.post\d+)?")


@dataclass(frozen=True)
class Failure:
    test: str
    reason: str


def key(version: str) -> tuple[int, ...]:
    """Sort key for releases."""
    return tuple(map(int, re.findall(r"\d+", version)))


def newer_releases(listed: str) -> list[str]:
    """Returns final releases after the supported one, newest first.

    listed: output of `pip index versions vllm`
    """
    _, _, versions_of = listed.partition("Available versions:")
    found = versions_of.split("\n")[0].replace(" ", "").split(",")
    final = [version for version in found if _FINAL.fullmatch(version)]
    newer = [version for version in final if key(version) > key(versions.VLLM_VERSION)]
    return sorted(newer, key=key, reverse=True)


def newest_that_installs(
    releases: Sequence[str], install: Callable[[str], None]
) -> tuple[str | None, dict[str, str]]:
    """Returns the first release for which `install` succeeds, and why earlier ones in the list
    fail.
    """
    refused: dict[str, str] = {}
    for version in releases[:MOST_TRIED]:
        try:
            install(version)
        except StepFailedError as error:
            lines = [line for line in str(error).splitlines() if line.startswith("ERROR")]
            refused[version] = " ".join((lines or str(error).splitlines()[:1])[0].split())
        else:
            return version, refused
    return None, refused


def environment_of(version: str) -> Path:
    return ROOT / ".nox" / f"upstream-{version}"


def install(version: str) -> None:
    directory = environment_of(version)
    steps = Steps(1, directory.parent / f"{directory.name}-logs")
    steps.start(f"environment with vLLM {version}")
    steps.run(
        [
            sys.executable,
            ROOT / "ci" / "prepare_environment.py",
            f"--directory={directory}",
            f"--vllm={version}",
            *(f"--group={group}" for group in GROUPS),
        ]
    )


def run_newest(report: Path | None, tests: Sequence[str]) -> int:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", "vllm"],
        stdout=subprocess.PIPE, text=True, timeout=INDEX_LIMIT_S, check=True,
    ).stdout  # fmt: skip
    releases = newer_releases(listed)
    version, refused = newest_that_installs(releases, install)
    why = "".join(f"vLLM {each} does not install: {reason}\n" for each, reason in refused.items())
    if version is not None:
        return run(version, report, tests, why)
    found = f"{len(releases)} releases of vLLM are newer than {versions.VLLM_VERSION}"
    text = f"# {found}; none installs beside torch {versions.TORCH_VERSION}\n\n{why}"
    return write(report or ROOT / "results" / "upstream.md", text)


def write(report: Path, text: str) -> int:
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(text, encoding="utf-8")
    print(f"{text}\nwritten to {report}", flush=True)
    return 0


def run(version: str, report: Path | None, tests: Sequence[str], refused: str = "") -> int:
    """Runs the comparison and `tests`; writes the report. refused: a note on releases"""
    report = report or ROOT / "results" / f"upstream-{version}.md"
    directory = environment_of(version)
    steps = Steps(2, directory.parent / f"{directory.name}-logs")
    steps.start(f"hooks of vLLM {versions.VLLM_VERSION} in {version}")
    compared = compare(directory / "bin" / "python", version, steps)
    after = f"\n{refused}" if refused else ""
    write(report, page(version, compared, None) + after)
    steps.start("tests")
    failures, num_tests = run_tests(directory, version, tests, steps)
    write(report, page(version, compared, (failures, num_tests)) + after)
    return 1 if failures else 0


def compare(python: Path, version: str, steps: Steps) -> dict[str, Any]:
    """Compares both vLLM releases in the supported one's environment, where our packages work."""
    wheels = [
        wheel_cache.vllm_wheel(python, steps, each) for each in (versions.VLLM_VERSION, version)
    ]
    serving = ROOT / ".nox" / "serving" / "bin"
    if not (serving / "vnpu").exists():
        raise StepFailedError(f"{serving} does not exist: run nox -s tests once, then this again")
    result = steps.log_directory / "hooks.json"
    program = (serving / "python", ROOT / "ci" / "upstream_hooks.py")
    steps.run([serving / "vnpu", "run", "--", *program, *wheels, result])
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def run_tests(
    directory: Path, version: str, tests: Sequence[str], steps: Steps
) -> tuple[list[Failure], int]:
    results = directory / "results.xml"
    results.unlink(missing_ok=True)
    commands = directory / "bin"
    tests = [test for test in tests if (ROOT / test).exists()]
    try:
        steps.run(
            [commands / "vnpu", "run", "--", commands / "python", "-m", "pytest", "--no-header",
             "-v", f"--junitxml={results}", "--continue-on-collection-errors", *tests],
            environment={
                "DAVINCI_ACCEPT_VLLM": version,
                "HF_HUB_OFFLINE": "1",
                "PATH": f"{commands}:/usr/local/bin:/usr/bin:/bin",
            },
        )  # fmt: skip
    except StepFailedError:
        if not results.exists():
            raise
    cases = list(ElementTree.parse(results).iter("testcase"))
    return list(failures_of(cases)), len(cases)


def failures_of(cases: list[ElementTree.Element]) -> Iterator[Failure]:
    for case in cases:
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
                yield Failure(name, " ".join((found.get("message") or "").split())[:MOST_SHOWN])


def page(version: str, compared: dict[str, Any], tests: tuple[list[Failure], int] | None) -> str:
    """Returns the report. tests: failures, and the number of tests; None before they have run"""
    changes = compared["changes"]
    failures, num_tests = tests or ([], 0)
    lines = [
        f"# vLLM {version}, with packages made for {versions.VLLM_VERSION}",
        "",
        f"{len(changes)} of {compared['compared']} hooks have changed.",
        f"{len(failures)} of {num_tests} tests fail." if tests else "The tests have not run yet.",
        "",
    ]
    for kind, title in KINDS.items():
        lines += [f"## {title}", "", *_moved([each for each in changes if each["kind"] == kind])]
    lines += ["## Tests that fail", ""]
    for reason, same in groupby(sorted(failures, key=lambda f: f.reason), key=lambda f: f.reason):
        tests_of_it = [failure.test for failure in same]
        lines.append(f"- {reason or 'no message'}")
        lines += [f"  - {test}" for test in tests_of_it[:5]]
        lines += [f"  - and {len(tests_of_it) - 5} more"] if len(tests_of_it) > 5 else []
    return "\n".join(lines) + "\n"


def _moved(changes: list[dict[str, Any]]) -> Iterator[str]:
    """Yields lines on one kind of change, by vLLM's file."""
    for file, own in groupby(changes, key=lambda change: change["file"]):
        yield from (f"`{file}`", "")
        for name, users in groupby(own, key=lambda change: (change["name"], change["what"])):
            ours = sorted({user["ours"] for user in users})
            yield f"- `{name[0]}`: {name[1]}. Used by {', '.join(f'`{o}`' for o in ours)}"
        yield ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "version", nargs="?", help="version of vLLM (default: the newest that installs)"
    )
    parser.add_argument("--report", type=Path, help="(default: results/upstream-VERSION.md)")
    parser.add_argument(
        "--suite", action="store_true", help="run all tests instead of a short part"
    )
    options = parser.parse_args()
    tests = SUITE if options.suite else TESTS
    try:
        if options.version is None:
            return run_newest(options.report, tests)
        install(options.version)
        return run(options.version, options.report, tests)
    except StepFailedError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
