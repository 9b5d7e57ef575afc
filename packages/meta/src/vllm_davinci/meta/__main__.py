"""`vllm-davinci COMMAND`: report on environment, configuration, checkpoints; generate, compare,
quantize, score, dry-run, plan pools, list deployments, verify a device."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from vllm_davinci.meta import (
    check_model,
    compare,
    doctor,
    explain,
    generate,
    perplexity,
    pools,
    quantize,
    show_config,
)
from vllm_davinci.meta.deployments import command as deployments
from vllm_davinci.meta.dry_run import command as dry_run
from vllm_davinci.meta.report_table import print_report
from vllm_davinci.meta.verify import command as verify

# What follows `--` is for vLLM's own parser.
_TAKE_ENGINE_ARGUMENTS = ("compare", "config", "explain", "generate", "perplexity")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-davinci", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("doctor", help="can a model run here?")
    report.add_argument("--json", action="store_true", help="the report for programs")
    for name, module, question in (
        ("config", show_config, "what would an engine run with, who decided it, and why?"),
        (
            "check-model",
            check_model,
            "what a checkpoint would be loaded as, what is missing or disagrees",
        ),
        ("generate", generate, "text from a local checkpoint or GGUF file"),
        ("compare", compare, "are its greedy tokens those of transformers on the CPU?"),
        ("quantize", quantize, "write an int8 checkpoint"),
        ("explain", explain, "why was this step not split into ubatches?"),
        ("perplexity", perplexity, "how well does a checkpoint predict text, as it is served?"),
        (
            "dry-run",
            dry_run,
            "would a model fit, and how long would its steps take? No NPU needed",
        ),
        ("pools", pools, "how many engines for prefills and for decodes does a load need?"),
        ("deployments", deployments, "how are released models deployed, and would each start?"),
        ("verify", verify, "does a device compute, refuse and cost what we believe?"),
    ):
        module.add_arguments(commands.add_parser(name, help=question))
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 only if the answer is a good one; see each command."""
    parser = _parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    engine_arguments: list[str] = []
    if given[:1] and given[0] in _TAKE_ENGINE_ARGUMENTS and "--" in given:
        at = given.index("--")
        given, engine_arguments = given[:at], given[at + 1 :]
    if given[:1] == ["dry-run"]:  # options that it does not know are vLLM's
        options, engine_arguments = parser.parse_known_args(given)
        return dry_run.run(options, engine_arguments)
    options = parser.parse_args(given)
    match options.command:
        case "config":
            return show_config.run(options, engine_arguments)
        case "generate":
            return generate.run(options, engine_arguments)
        case "compare":
            return compare.run(options, engine_arguments)
        case "explain":
            return explain.run(options, engine_arguments)
        case "perplexity":
            return perplexity.run(options, engine_arguments)
        case "deployments":
            return deployments.run(options)
        case "verify":
            return verify.run(options)
        case "check-model":
            return check_model.run(options)
        case "pools":
            return pools.run(options)
        case "quantize":
            return quantize.run(options)
    report = doctor.run_checks()
    if options.json:
        print(report.to_json())
    else:
        print_report(report, Console())
    return 0 if report.can_run else 1


if __name__ == "__main__":
    sys.exit(main())
