"""`vllm-davinci verify`: compares a device with what vllm-davinci expects of it.

Runs on a chip, or on a virtual NPU (`vnpu run --`), where nothing is measured: times are modelled,
and only with `vnpu run --chip NAME --`. Results are stored in the directory as they come, so that a
second run resumes the first. At the end the directory has report.html to read and report.json to
send to us.
"""

import argparse
import json
import shutil
from pathlib import Path

from rich.console import Console

from vllm_davinci.verify import comparison, fit
from vllm_davinci.verify.errors import VerificationError
from vllm_davinci.verify.journal import Journal
from vllm_davinci.verify.page import page
from vllm_davinci.verify.parts import NAMES, PARTS, journal_of, run_part
from vllm_davinci.verify.report import FILE, Report, assembled, failed_of, read_report, write_report
from vllm_davinci.verify.settings import FILE as SETTINGS_FILE
from vllm_davinci.verify.settings import Settings, open_directory

MOST_LINES = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("verify-report"),
        metavar="DIRECTORY",
        help="directory of the run; an existing run is resumed (default: %(default)s)",
    )
    parser.add_argument("--restart", action="store_true", help="start the directory's run again")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(NAMES),
        metavar="PART,...",
        help=f"parts to run, of {', '.join(NAMES)} (default: all)",
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIRECTORY",
        help="small models whose tokens are compared, such as the project's tiny_llama and "
        "tiny_deepseek; without any, the part `tokens` is skipped",
    )
    parser.add_argument(
        "--models",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME,...",
        help="models in whose sizes operators are called (default: all five)",
    )
    parser.add_argument(
        "--ranks", type=int, default=8, metavar="N", help="maximum number of devices in collectives"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of random operands")
    _add_ways_without_a_run(parser)


def _add_ways_without_a_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("A", "B"),
        help="run nothing; print the differences of two reports. Exit status 1 if there are any",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=comparison.TOLERANCE,
        metavar="PART",
        help="with --compare: relative difference up to which times count as equal (default: "
        "%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="with --compare: print JSON")
    parser.add_argument(
        "--fit",
        type=Path,
        metavar="REPORT",
        help="run nothing; derive a chip's figures from a report",
    )
    parser.add_argument(
        "--chip", metavar="NAME", help="with --fit: chip of `vnpu machines` to base it on"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.toml",
        help="with --fit: file to write, for `vnpu run --chip`",
    )


def run(options: argparse.Namespace) -> int:
    """Exit status 0 only if all findings are as expected, or the two reports are equal."""
    errors = Console(stderr=True)
    try:
        if options.compare is not None:
            return _compare(options)
        if options.fit is not None:
            return _fit(options)
        return _verify(options, errors)
    except VerificationError as error:
        errors.print(f"vllm-davinci verify: {error}", markup=False, soft_wrap=True)
        return 2


def _verify(options: argparse.Namespace, console: Console) -> int:
    if unknown := [name for name in options.only if name not in NAMES]:
        raise VerificationError(f"--only {', '.join(unknown)}: the parts are {', '.join(NAMES)}.")
    checkpoints = [path.resolve() for path in options.checkpoints]
    if missing := [path for path in checkpoints if not (path / "config.json").is_file()]:
        raise VerificationError(f"--checkpoints {missing[0]} has no config.json.")
    if options.models:
        # Imports torch, which `vllm-davinci` avoids for commands without a device.
        from vllm_davinci.verify.models import MODELS

        if unknown := [name for name in options.models if name not in MODELS]:
            names = ", ".join(MODELS)
            raise VerificationError(f"--models {', '.join(unknown)}: there are {names}.")
    if options.ranks < 1:
        raise VerificationError(f"--ranks {options.ranks}: name at least one device.")
    directory = options.directory.resolve()
    if options.restart and (directory / SETTINGS_FILE).is_file():
        shutil.rmtree(directory)
    paths, models = tuple(map(str, checkpoints)), tuple(options.models)
    open_directory(directory, Settings(paths, models, options.ranks, options.seed))
    journals: dict[str, Journal] = {}
    for part in PARTS:
        if part.name not in options.only or (part.name == "tokens" and not checkpoints):
            earlier = journal_of(part, directory)
            journals |= {part.name: earlier} if earlier.is_finished else {}
            continue
        console.print(f"{part.name}: {part.asks}", markup=False, highlight=False, soft_wrap=True)
        journal = run_part(
            part, directory, lambda line: console.print(line, markup=False, soft_wrap=True)
        )
        wrong = sum(each.get("passed") is False for each in journal.findings)
        right = sum(each.get("passed") is True for each in journal.findings)
        told = f"  {right} as expected, {wrong} not, {journal.seconds:.0f} s"
        console.print(told, style="red" if wrong else "green", highlight=False)
        journals[part.name] = journal
    report = assembled(journals)
    write_report(report, directory / FILE)
    (directory / "report.html").write_text(page(report, directory), encoding="utf-8")
    return _verdict(report, directory, console)


def _verdict(report: Report, directory: Path, console: Console) -> int:
    failed = list(failed_of(report))
    for finding in failed[:MOST_LINES]:
        message = str(finding.get("details", {}).get("message", "")).splitlines()
        words = f": {message[0]}" if message else ""
        console.print(f"unexpected: {finding['name']} = {str(finding['value'])[:80]}{words}",
                      markup=False, soft_wrap=True)  # fmt: skip
    if len(failed) > MOST_LINES:
        console.print(f"and {len(failed) - MOST_LINES} more")
    print(directory / FILE)
    print(directory / "report.html")
    return 1 if failed else 0


def _compare(options: argparse.Namespace) -> int:
    one, other = (read_report(path) for path in options.compare)
    found = comparison.differences(one, other, options.tolerance)
    if options.json:
        print(json.dumps([each.fields() for each in found], indent=1))
    else:
        for each in found:
            print(f"{each.name}: {_short(each.one)} | {_short(each.other)} ({each.why})")
        print(f"{len(found)} differences" if found else "no difference")
    return 1 if found else 0


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _fit(options: argparse.Namespace) -> int:
    if options.chip is None or options.output is None:
        raise VerificationError("--fit needs --chip NAME and --output FILE.toml.")
    text = fit.fit(read_report(options.fit), options.chip)
    fit.write_chip(text, options.output)
    print(f"{options.output}: vnpu run --chip {options.output} -- COMMAND")
    return 0
