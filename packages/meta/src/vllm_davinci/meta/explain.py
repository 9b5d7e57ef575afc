"""`vllm-davinci explain`: why was a step not split into ubatches, and how many drafts were
accepted?

vllm-davinci explain http://localhost:8000
    the reasons that a running server has counted, and what would change each; with speculative
    decoding, the accepted drafts by position
vllm-davinci explain MODEL --tokens 512 512 --decodes 8 -- --tensor-parallel-size 2 --enable-dbo
    what an engine with these options of `vllm serve` would decide for such a step
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_davinci.meta import core_access
from vllm_davinci.meta.engine_configuration import engine_configuration
from vllm_davinci.meta.errors import ExplanationError, MetaError, ServerError
from vllm_davinci.meta.given_arguments import problem_of_engine
from vllm_davinci.meta.server_metrics import Acceptance, acceptance, decision_counts, metrics_text

if TYPE_CHECKING:
    from vllm_davinci.core.ubatch.explanation import Explanation, StepExplanation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.usage = "%(prog)s URL | MODEL --tokens N ... [--decodes N] [-- OPTIONS OF VLLM SERVE]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("subject", metavar="URL|MODEL", help="a server, or a model's directory")
    step = parser.add_argument_group("the step, for a MODEL")
    step.add_argument(
        "--tokens", type=int, nargs="+", metavar="N", help="new tokens of each prefilled request"
    )
    step.add_argument(
        "--requests", type=int, metavar="N", help="number of requests if --tokens is one number"
    )
    step.add_argument("--decodes", type=int, default=0, metavar="N", help="decoding requests")
    step.add_argument(
        "--special",
        action="store_true",
        help="a request has images, and the model's definition cannot split a step with images",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, engine_arguments: list[str]) -> int:
    """Exit status 0 with an answer; 1 without one, with the reason; 2 for bad options.

    engine_arguments: options of `vllm serve`
    """
    console = Console(stderr=True)
    is_server = options.subject.startswith(("http://", "https://"))
    problem = _problem_with(options, engine_arguments, is_server)
    if problem is not None:
        console.print(f"vllm-davinci explain: {problem}", markup=False, soft_wrap=True)
        return 2
    try:
        if is_server:
            _explain_server(options.subject, options.json)
        else:
            _explain_step(options, engine_arguments)
    except MetaError as error:
        console.print(f"vllm-davinci explain: {error}", markup=False, soft_wrap=True)
        return 1
    return 0


def _problem_with(
    options: argparse.Namespace, engine_arguments: list[str], is_server: bool
) -> str | None:
    describes_step = options.tokens is not None or options.decodes != 0
    if is_server:
        if describes_step or options.requests or engine_arguments:
            return "a URL takes no step: name the URL alone, or a MODEL and a step"
        return None
    is_path = options.subject.startswith(("/", "./", "../"))
    if is_path and not Path(options.subject).is_dir():
        return (
            f"{options.subject} is not a directory: name a model's directory, or a server's "
            "http:// address"
        )
    if not describes_step:
        return "describe the step: --tokens N ... for requests that prefill, --decodes N for others"
    if options.requests is not None and len(options.tokens or ()) != 1:
        return "--requests repeats one number of --tokens; give one, or list each request's"
    numbers = [*(options.tokens or ()), options.requests or 1]
    if min(numbers) < 1 or options.decodes < 0:
        return "--tokens and --requests must be at least 1, and --decodes at least 0"
    return None


def _explain_server(url: str, as_json: bool) -> None:
    text = metrics_text(url)  # before vLLM is imported: reports a wrong address at once
    counts, drafts = decision_counts(text), acceptance(text)
    if not counts and drafts is None:
        raise ServerError(
            f"{url} counts no overlap decisions and no drafts: both are off there, or the server "
            "has run no step yet. Start it with --enable-dbo or --speculative-config, and send it "
            "a request."
        )
    core_access.prepare()
    from vllm_davinci.core.ubatch.explanation import EXPLANATIONS, Explanation

    def explanation(reason: str) -> Explanation:
        unknown = Explanation("a reason of another version of this package", "see its guide")
        return EXPLANATIONS.get(reason, unknown)

    if as_json:
        reasons = {reason: asdict(explanation(reason)) for _, reason in counts}
        rows = [{"engine": e, "reason": r, "steps": n} for (e, r), n in counts.items()]
        told = {} if drafts is None else {"drafts": drafts._asdict()}
        print(json.dumps({"steps": rows, "reasons": reasons, **told}, indent=2))
        return
    console = Console()
    if drafts is not None:
        console.print(told_acceptance(drafts), markup=False)
    if not counts:
        return
    total = sum(counts.values())
    split = sum(count for (_, reason), count in counts.items() if reason == "split")
    console.print(f"{url}: {split} of {total} steps were split into ubatches.", markup=False)
    several = len({engine for engine, _ in counts}) > 1
    table = Table(show_lines=True)
    if several:
        table.add_column("DP rank", justify="right")
    table.add_column("steps", justify="right")
    for column in ("reason", "what was seen", "what would change it"):
        table.add_column(column, overflow="fold")
    for (engine, reason), count in sorted(counts.items(), key=lambda item: (item[0][0], -item[1])):
        found = explanation(reason)
        cells = [f"{count} ({count / total:.0%})", reason, found.meaning, found.change]
        table.add_row(*([engine] if several else []), *map(Text, cells))
    console.print(table)


def told_acceptance(drafts: Acceptance) -> str:
    """Describes the acceptance rates."""
    rates = [f"{count / drafts.steps:.0%}" for count in drafts.by_position]
    share = drafts.accepted / max(drafts.drafted, 1)
    told = (
        f"{drafts.accepted} of {drafts.drafted} drafts were accepted ({share:.0%}), "
        f"{1 + drafts.accepted / drafts.steps:.2f} tokens in a request's step; by position: "
        f"{', '.join(rates)}."
    )
    if not drafts.accepted:
        told += (
            " A drafter of another model or quantization, or an untrained one, is never "
            "accepted: check --speculative-config, or start without it."
        )
    return told


def _explain_step(options: argparse.Namespace, engine_arguments: list[str]) -> None:
    if (problem := problem_of_engine(options.subject, engine_arguments)) is not None:
        raise ExplanationError(problem)
    core_access.prepare()
    from vllm_davinci.core.errors import CoreError  # imports torch and vLLM
    from vllm_davinci.core.ubatch.explanation import explain_step

    tokens = list(options.tokens or ())
    if options.requests is not None:
        tokens *= options.requests
    try:
        found = explain_step(
            engine_configuration("vllm-davinci explain", options.subject, engine_arguments),
            [1] * options.decodes + tokens,
            is_supported=not options.special,
        )
    except CoreError as error:
        raise ExplanationError(str(error)) from error
    if options.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print_step(found, options.decodes, tokens, Console())


def _told_durations(durations: dict[str, float]) -> str:
    """Prints each schedule's step time, and the excess over the fastest."""
    least = min(durations.values(), default=0.0)
    return "; ".join(
        f"{name}: {ms:.1f} ms" + (f" (+{ms / least - 1:.0%})" if ms > least else "")
        for name, ms in durations.items()
    )


def print_step(found: StepExplanation, decodes: int, tokens: list[int], console: Console) -> None:
    """Prints the decision in a line, then its reasons in a table."""
    step = f"{len(tokens) + decodes} requests, {sum(tokens) + decodes} tokens ({decodes} decodes)"
    if found.reason == "split":
        parts = " + ".join(map(str, found.part_tokens))
        console.print(Text(f"{step}: split into {parts} tokens", style="bold green"))
    else:
        console.print(Text(f"{step}: stays whole ({found.reason})", style="bold yellow"))
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    rows: dict[str, Any] = {
        "what was seen": found.explanation.meaning,
        "what would change it": found.explanation.change,
        "options now": ", ".join(f"{name} = {value!r}" for name, value in found.options.items()),
        "modelled": _told_durations(found.durations),
        "not looked at": "graphs, cached prefixes within the step, other DP ranks",
    }
    for name, text in rows.items():
        if text:
            table.add_row(name, Text(text))
    console.print(table)
