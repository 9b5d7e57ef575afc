"""`vllm-davinci doctor [--json]`: can a model run here, and if not, what to do."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from vllm_davinci.meta import doctor
from vllm_davinci.meta.report_table import print_report


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 only if a model could run."""
    parser = argparse.ArgumentParser(prog="vllm-davinci", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor_parser = commands.add_parser("doctor", help="report on the environment")
    doctor_parser.add_argument("--json", action="store_true", help="the report for programs")
    options = parser.parse_args(arguments)
    report = doctor.examine()
    if options.json:
        print(report.to_json())
    else:
        print_report(report, Console())
    return 0 if report.can_run else 1


if __name__ == "__main__":
    sys.exit(main())
