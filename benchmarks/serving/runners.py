"""A decode step on vLLM's V2 model runner, compared with V1: launches, waits and host time.

Each runs in its own process; they take turns. Operators do no work (VNPU_COMPUTE=0), and the
calling thread makes the launches, so that the host's time is measured. A step includes the
scheduler, inputs, forward, sampling and output.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from child import AskedChild
from result import Kind, Result, Row

PROCESS_LIMIT_S = 900
CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
CHILD = Path(__file__).with_name("runners_process.py")
HOST_ALONE = {"VNPU_COMPUTE": "0", "TASK_QUEUE_ENABLE": "0"}
RUNNERS = {"V1": "0", "V2": "1"}
GOAL = 1.05
MODES = ("graph", "eager")
COUNTED = {
    "launches": "launches of a step outside the model",
    "waits": "waits of a step for the device",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=["tiny_llama", "tiny_deepseek"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 24, 256])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)


def run(args: argparse.Namespace) -> Result:
    rows: list[Row] = []
    for model in args.models:
        with ExitStack() as stack:
            children = {
                name: stack.enter_context(_child(model, args, value))
                for name, value in RUNNERS.items()
            }
            for child in children.values():
                child.answer()
            for batch in args.batches:
                for mode in MODES:
                    rows += _rows(f"{model}, {batch} requests, {mode}", children, batch, mode, args)
    return Result(
        benchmark="serving/runners",
        ours="V2",
        baseline="V1",
        rows=rows,
        settings={key: getattr(args, key) for key in ("models", "batches", "steps", "rounds")}
        | HOST_ALONE,
        seed=0,
        device="vnpu, policy " + os.environ.get("VNPU_SCHEDULE", "eager"),
        bounded_by="Python of vLLM's scheduler, runner and output processor",
    )


def _child(model: str, args: argparse.Namespace, runner: str) -> AskedChild:
    options = {
        "model": str(CHECKPOINTS / model),
        "batches": args.batches,
        "steps": args.steps,
    }
    environment = {**os.environ, **HOST_ALONE, "VLLM_USE_V2_MODEL_RUNNER": runner}
    return AskedChild(
        [str(CHILD), json.dumps(options)], PROCESS_LIMIT_S, environment, sys.executable
    )


def _rows(
    name: str, children: dict[str, AskedChild], batch: int, mode: str, args: argparse.Namespace
) -> list[Row]:
    """Medians over rounds; the first round is a warm-up on both sides."""
    found: dict[str, list[dict[str, Any]]] = {each: [] for each in children}
    for _ in range(args.rounds + 1):
        for each, child in children.items():
            found[each].append(child.ask({"batch": batch, "mode": mode}))
    medians = {
        each: {key: statistics.median(one[key] for one in of[1:]) for key in of[0]}
        for each, of in found.items()
    }
    return [
        Row(
            f"{name}: host time of a step",
            "ms",
            medians["V2"]["seconds"] * 1e3,
            Kind.MEASURED,
            baseline=medians["V1"]["seconds"] * 1e3,
            at_most=GOAL,
        ),
        *(
            Row(
                f"{name}: {what}",
                "",
                medians["V2"][key],
                Kind.COUNTED,
                baseline=medians["V1"][key],
            )
            for key, what in COUNTED.items()
        ),
    ]
