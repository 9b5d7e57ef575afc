"""`vllm-davinci dry-run --model DIRECTORY --chip NAME`: would it fit, how long would a step take,
what bounds it?

The model's config.json is enough. Options that are not listed here are those of `vllm serve`. All
times are modelled: no NPU was involved.
"""

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_davinci.meta.errors import DeviceLibraryError
from vllm_davinci.meta.given_arguments import unknown_option
from vllm_davinci.meta.supported_versions import installed_version
from vllm_davinci.planner.devices import MOST_DEVICES
from vllm_davinci.planner.dry_run.default_prompt import MOST_TOKENS, fitting_prompt
from vllm_davinci.planner.dry_run.of_deployment import take_deployment
from vllm_davinci.planner.errors import DeploymentError, DryRunError

_DEFAULTS: dict[str, Any] = {"topology": "node-of-8", "requests": 4, "output_tokens": (4,)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.usage = (
        "%(prog)s (--model DIRECTORY --chip NAME | --deployment NAME) [options] "
        "[OPTIONS OF VLLM SERVE]"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", help="a directory with a config.json")
    parser.add_argument(
        "--deployment",
        metavar="NAME",
        help="a row of `vllm-davinci deployments`: its model, chip, work and options, unless "
        "given here",
    )
    parser.add_argument("--chip", metavar="NAME|FILE", help="`vnpu machines` lists them")
    parser.add_argument(
        "--topology",
        metavar="NAME|FILE",
        help=f"links between chips (default: {_DEFAULTS['topology']})",
    )
    _add_work(parser)
    _add_server(parser)
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the timeline, for Perfetto"
    )
    parser.add_argument(
        "--step-costs",
        type=Path,
        metavar="FILE",
        help="instead of a report: a step-time table of every possible schedule, for the option "
        "step_costs; prefill sizes from --prompt-tokens (default: 128 to 16384 tokens)",
    )
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="vary the assumed figures within their ranges: print intervals of times, and which "
        "figure moves them most",
    )
    parser.add_argument(
        "--mechanisms",
        action="store_true",
        help="also model without each mechanism of the timing model that figures can turn off",
    )
    parser.add_argument(
        "--acceptance",
        type=_rates,
        metavar="RATE[,RATE...]",
        help="instead of a report: do the drafts of --speculative-config pay, for 1 to "
        "--requests requests, at these acceptance rates by position, as vLLM logs them?",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report as JSON")


def _add_work(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("the work")
    work.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=f"per data-parallel rank (default: {_DEFAULTS['requests']})",
    )
    work.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="concurrent requests; when one ends, the next begins (default: all at once)",
    )
    work.add_argument(
        "--prompt-tokens",
        type=_numbers,
        metavar="N[,N...]",
        help=f"prompt lengths, in turn (default: {MOST_TOKENS}, or what the model's context "
        "allows)",
    )
    work.add_argument(
        "--output-tokens",
        type=_numbers,
        metavar="N[,N...]",
        help="output lengths, in turn (default: 4)",
    )
    work.add_argument(
        "--sampled-chunks",
        type=int,
        metavar="N",
        help="model N chunks of the longest prompt, alone, and interpolate the others; requests "
        "then begin with their prompt's last token (default: run all prompts)",
    )
    work.add_argument(
        "--routing",
        default="balanced",
        metavar="balanced|NUMBER|FILE",
        help="load of the busiest expert rank over the mean: a number, or recorded loads as "
        "JSON, a list of layers, each a list of its experts' rows (default: %(default)s)",
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    served = parser.add_argument_group("a server instead")
    served.add_argument(
        "--serve", action="store_true", help="run `vllm serve`, with answers in modelled time"
    )
    served.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="SCALE",
        help="host seconds per modelled second; divide clients' figures by it (default: "
        "%(default)s)",
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _rates(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split(","))


def run(options: argparse.Namespace, engine_arguments: list[str]) -> int:
    """Exit status 0 with a report; 1 if the model does not fit or cannot run, 2 for bad options.

    engine_arguments: options of `vllm serve`
    """
    console = Console(stderr=True)

    def tell(problem: object) -> None:
        console.print(f"vllm-davinci dry-run: {problem}", markup=False, soft_wrap=True)

    sizes_of_costs = options.prompt_tokens
    with contextlib.ExitStack() as models:
        try:
            if options.deployment is not None:
                engine_arguments = [*take_deployment(options, models), *engine_arguments]
        except DeploymentError as error:
            tell(error)
            return 1
        for name, value in _DEFAULTS.items():
            if getattr(options, name) is None:
                setattr(options, name, value)
        if options.prompt_tokens is None:
            length = fitting_prompt(options.model, engine_arguments, options.output_tokens)
            options.prompt_tokens = (length,)
        problem = _problem(options, engine_arguments) or unknown_option(engine_arguments)
        if problem is not None:
            tell(problem)
            return 2
        from vllm_davinci.vnpu import VirtualDeviceError

        try:
            if options.step_costs is not None:
                return _write_step_costs(options, engine_arguments, sizes_of_costs)
            if options.acceptance is not None:
                return _tell_gain_of_drafts(options, engine_arguments)
            return (_serve if options.serve else _run)(options, engine_arguments)
        except (DryRunError, DeviceLibraryError, VirtualDeviceError) as error:
            tell(error)
            return 1


def _problem(options: argparse.Namespace, engine_arguments: list[str]) -> str | None:
    """Says which option is wrong and what to change, or None. Sets the concurrency."""
    concurrency = options.requests if options.concurrency is None else options.concurrency
    if min(options.requests, concurrency, *options.prompt_tokens, *options.output_tokens) < 1:
        return "--requests, --concurrency, --prompt-tokens and --output-tokens must be at least 1"
    options.concurrency = min(concurrency, options.requests)
    if options.model is None and engine_arguments and not engine_arguments[0].startswith("-"):
        return f"{engine_arguments[0]} is no option: did you mean --model {engine_arguments[0]}?"
    if options.model is None or options.chip is None:
        return (
            "name what to run: --model DIRECTORY and --chip NAME, or --deployment NAME "
            "(`vllm-davinci deployments` lists them)"
        )
    if options.serve and (options.trace is not None or options.json is not None):
        return "--serve has no report: leave out --trace and --json, or leave out --serve"
    if options.sampled_chunks is not None and (
        options.sampled_chunks < 3 or options.serve or options.acceptance or options.step_costs
    ):
        return "--sampled-chunks is at least 3, and applies to the report of steps only"
    many = [f"--{name}" for name in ("sensitivity", "mechanisms") if getattr(options, name)]
    if many and (options.serve or options.step_costs is not None):
        return (
            f"{many[0]} applies to the report of steps: leave it out, or --serve and --step-costs"
        )
    if not (Path(options.model) / "config.json").is_file():
        return f"{options.model} has no config.json. Name the directory of a model's configuration."
    if installed_version("vllm-davinci-vnpu") is None:
        return "the virtual NPU is not installed: pip install vllm-davinci-vnpu"
    return None


def _write_step_costs(
    options: argparse.Namespace, engine_arguments: list[str], sizes: tuple[int, ...] | None
) -> int:
    from vllm_davinci.planner.dry_run import step_costs

    costs = step_costs.measure(options, engine_arguments, sizes or step_costs.SIZES)
    options.step_costs.write_text(json.dumps(costs, indent=1) + "\n", encoding="utf-8")
    for step in costs["steps"]:
        whole, split = step["by_method"]["whole"], step["by_method"]["split"]
        print(
            f"{step['tokens']:7} tokens: whole {_fastest(whole)}, split {_fastest(split)}, modelled"
            f"{': split' if step['split'] < step['whole'] else ''}"
        )
    for step in costs["decodes"]:
        print(f"{step['tokens']:7} decodes: {_fastest(step['by_method'])}, modelled")
    return 0


def _fastest(durations: dict[str, int]) -> str:
    """The shortest step time, with its method if there are several."""
    name = min(durations, key=durations.__getitem__)
    return f"{durations[name] / 10**9:9.3f} ms{f' ({name})' if len(durations) > 1 else ''}"


def _tell_gain_of_drafts(options: argparse.Namespace, engine_arguments: list[str]) -> int:
    from vllm_davinci.planner.dry_run import draft_gain

    report = draft_gain.measure(options, engine_arguments)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(draft_gain.told(report))
    return 0


def _serve(options: argparse.Namespace, engine_arguments: list[str]) -> int:
    from vllm_davinci.vnpu import VirtualDeviceConfig, activate

    virtual = VirtualDeviceConfig(
        devices=MOST_DEVICES,
        compute=False,
        chip=options.chip,
        topology=options.topology,
        paced=options.time_scale,
        phantom_ranks=True,
    )
    machine = virtual.machine()
    assert machine is not None
    os.environ.update(virtual.environment())
    activate(virtual)
    from vllm_davinci.planner.dry_run.serving import run_server

    run_server(options.model, options.routing, engine_arguments, machine)
    return 0


def _run(options: argparse.Namespace, engine_arguments: list[str]) -> int:
    import tempfile

    from vllm_davinci.planner.dry_run.this_process import become_rank
    from vllm_davinci.vnpu.timing import modelled_timeline

    with tempfile.TemporaryDirectory(prefix="vllm-davinci-dry-run.") as timelines:
        machine = become_rank(
            options,
            timelines if options.trace is not None else None,
            options.sensitivity,
            options.mechanisms,
        )
        from vllm_davinci.planner.dry_run.engine import run_workload
        from vllm_davinci.planner.dry_run.workload import Workload

        workload = Workload(
            options.requests,
            options.concurrency,
            options.prompt_tokens,
            options.output_tokens,
            options.sampled_chunks,
        )
        result = run_workload(options.model, workload, options.routing, engine_arguments, machine)
        if options.trace is not None:
            from vllm_davinci.vnpu.timing import write_timeline

            write_timeline()
            modelled_timeline.merge([Path(timelines)], options.trace)
    from vllm_davinci.planner.dry_run.report import print_report

    if options.json is not None:
        options.json.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    print_report(result, Console())
    return 0
