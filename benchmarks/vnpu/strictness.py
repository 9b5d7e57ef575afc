"""Cost of checking every call against CANN's documents. Also checks that no call is refused.

Two engines take turns batch by batch, so that other load affects both: one on virtual NPUs that
check calls, one with VNPU_STRICT=0, which checks nothing and omits workspaces. Each has its own
process and one thread of torch. All batches have the same steps; each step's shortest time counts.
Replayed graphs make few calls; eager steps make all calls.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from child import AskedChild
from result import Kind, Result, Row
from serving import offline_throughput, random_llama
from vllm_davinci.vnpu import refusals

LEAST_RATIO = 0.97
MOST_TIME_RATIO = 1.03
PART = "serving.timed_steps_process"
STEPS: dict[str, dict[str, Any]] = {"graphs": {}, "eager": {"enforce_eager": True}}


class Batches(NamedTuple):
    """An engine's batches, as answered by `timed_steps_process.py`.

    calls: number of calls checked meanwhile
    """

    ours: dict[str, list[float]]
    baseline: dict[str, list[float]]
    calls: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    offline_throughput.add_arguments(parser)
    parser.set_defaults(rounds=2, repetitions=10)


def run(args: argparse.Namespace) -> Result:
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        model: Path = args.model or Path(scratch) / "llama"
        if args.model is None:
            random_llama.write(model, args.seed)
        options = offline_throughput.process_options(args, model)
        counted = Path(scratch) / "refusals"
        counted.mkdir()
        rows = []
        for steps, engine in STEPS.items():
            batches: list[Batches] = []
            for number in range(1, args.rounds + 1):
                console.print(f"{steps}: round {number}/{args.rounds}")
                batches += _take_turns({**options, "engine": engine}, counted)
            rows += _rows(steps, batches, options)
        found = refusals.read(counted)
    return Result(
        ours="calls checked against CANN's documents",
        baseline="the same without checks",
        rows=[*rows, _refused_row(found)],
        settings={
            "model": args.model.name if args.model else {"llama": random_llama.SHAPE},
            **{key: options[key] for key in ("requests", "prompt_tokens", "output_tokens",
                                             "kv_cache_bytes", "repetitions")},
        },
        bounded_by="the checks of a call's sizes, dtypes and numbers, before its launch, and "
        "torch_npu's allocation of its workspace",
    )  # fmt: skip


def _take_turns(options: dict[str, Any], counted: Path) -> list[Batches]:
    """Runs batches of both sides in turn; omits the first batch, a warm-up."""
    with (
        _child(options, counted, is_strict=True) as strict,
        _child(options, counted, is_strict=False) as lenient,
    ):
        for child in (strict, lenient):
            child.answer()
        found = []
        for number in range(options["repetitions"] + 1):
            calls = _calls(counted)
            # The order alternates from turn to turn.
            if number % 2 == 0:
                ours, baseline = strict.ask(None), lenient.ask(None)
            else:
                baseline, ours = lenient.ask(None), strict.ask(None)
            found.append(Batches(ours, baseline, calls=_calls(counted) - calls))
    return found[1:]


def _child(options: dict[str, Any], counted: Path, is_strict: bool) -> AskedChild:
    more = {"VNPU_STRICT": str(int(is_strict)), "VNPU_REFUSALS": str(counted)}
    return AskedChild(PART, options, offline_throughput.PROCESS_LIMIT_S, more)


def _calls(counted: Path) -> int:
    return sum(refusals.read(counted).calls.values())


def _rows(steps: str, batches: list[Batches], options: dict[str, Any]) -> list[Row]:
    tokens = options["requests"] * options["output_tokens"]
    ours, baseline = ([getattr(each, side) for each in batches] for side in ("ours", "baseline"))
    num_steps = len(ours[0]["elapsed"])
    return [
        Row(
            name=f"{steps}: tokens per second",
            unit="tokens/s",
            ours=tokens / sum(_least(ours, "elapsed")),
            baseline=tokens / sum(_least(baseline, "elapsed")),
            kind=Kind.MEASURED,
            at_least=LEAST_RATIO,
        ),
        Row(
            name=f"{steps}: processor time of a step",
            unit="ms",
            ours=sum(_least(ours, "processor")) / num_steps * 1e3,
            baseline=sum(_least(baseline, "processor")) / num_steps * 1e3,
            kind=Kind.MEASURED,
            at_most=MOST_TIME_RATIO,
        ),
        Row(
            name=f"{steps}: calls checked against the documents, per step",
            unit="calls",
            ours=statistics.median(each.calls for each in batches) / num_steps,
            kind=Kind.COUNTED,
        ),
    ]


def _least(batches: list[dict[str, list[float]]], clock: str) -> list[float]:
    """Returns each step's shortest time over all batches."""
    return [min(times) for times in zip(*(batch[clock] for batch in batches), strict=True)]


def _refused_row(found: refusals.Refusals) -> Row:
    return Row(
        name="calls refused",
        unit="calls",
        ours=float(len(found.refused)),
        kind=Kind.COUNTED,
        at_most=0.0,
        note="; ".join(sorted({refusal.message for refusal in found.refused}))[:200],
    )
