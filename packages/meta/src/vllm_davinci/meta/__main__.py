"""`vllm-davinci COMMAND`: report on environment, configuration, checkpoints; quantize, score,
dry-run, list deployments."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from vllm_davinci.meta import check_model, doctor, explain, perplexity, quantize, show_config
from vllm_davinci.meta.deployments import command as deployments
from vllm_davinci.meta.dry_run import command as dry_run
from vllm_davinci.meta.report_table import print_report


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 only if the answer is a good one; see each command."""
    parser = argparse.ArgumentParser(prog="vllm-davinci", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor_parser = commands.add_parser("doctor", help="can a model run here?")
    doctor_parser.add_argument("--json", action="store_true", help="the report for programs")
    config_parser = commands.add_parser(
        "config", help="what would an engine run with, who decided it, and why?"
    )
    show_config.add_arguments(config_parser)
    check_parser = commands.add_parser(
        "check-model", help="what a checkpoint would be loaded as, what is missing or disagrees"
    )
    check_model.add_arguments(check_parser)
    quantize_parser = commands.add_parser("quantize", help="write an int8 checkpoint")
    quantize.add_arguments(quantize_parser)
    explain_parser = commands.add_parser(
        "explain", help="why was this step not split into ubatches?"
    )
    explain.add_arguments(explain_parser)
    perplexity_parser = commands.add_parser(
        "perplexity", help="how well does a checkpoint predict text, as it is served?"
    )
    perplexity.add_arguments(perplexity_parser)
    dry_run_parser = commands.add_parser(
        "dry-run", help="would a model fit, and how long would its steps take? No NPU needed"
    )
    dry_run.add_arguments(dry_run_parser)
    deployments_parser = commands.add_parser(
        "deployments", help="how are released models deployed, and would each start?"
    )
    deployments.add_arguments(deployments_parser)
    given = list(sys.argv[1:] if arguments is None else arguments)
    engine_arguments: list[str] = []
    if (
        given[:1] in (["config"], ["explain"], ["perplexity"]) and "--" in given
    ):  # what follows is for vLLM's own parser
        at = given.index("--")
        given, engine_arguments = given[:at], given[at + 1 :]
    if given[:1] == ["dry-run"]:  # options that it does not know are vLLM's
        options, engine_arguments = parser.parse_known_args(given)
        return dry_run.run(options, engine_arguments)
    options = parser.parse_args(given)
    if options.command == "config":
        return show_config.run(options, engine_arguments)
    if options.command == "deployments":
        return deployments.run(options)
    if options.command == "check-model":
        return check_model.run(options)
    if options.command == "quantize":
        return quantize.run(options)
    if options.command == "explain":
        return explain.run(options, engine_arguments)
    if options.command == "perplexity":
        return perplexity.run(options, engine_arguments)
    report = doctor.run_checks()
    if options.json:
        print(report.to_json())
    else:
        print_report(report, Console())
    return 0 if report.can_run else 1


if __name__ == "__main__":
    sys.exit(main())
