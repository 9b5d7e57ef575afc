"""Measures the host cost of switching ubatches: our greenlets, vLLM's threads, and a whole step.

A hand-over is all work at a ubatch's collective: events are recorded and awaited, streams switched,
and the other ubatch resumed with its forward context. vLLM's side makes the calls of its
all-to-all, in two threads on the same virtual device. The step has 61 layers with two collectives
each. Operators do no work, so that only the host's time is measured.
"""

import argparse
from typing import Any

from child import measured
from result import Result, Row

LIMIT_S = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hand-overs", type=int, default=2000, help="number per repetition")
    parser.add_argument("--steps", type=int, default=20, help="repetitions of each kind of step")
    parser.add_argument("--layers", type=int, default=61)


def run(args: argparse.Namespace) -> Result:
    options = {key: getattr(args, key) for key in ("hand_overs", "steps", "layers")}
    more = {"VNPU_COMPUTE": "0", "OMP_NUM_THREADS": "1"}
    found = measured("multistream.switch_process", options, LIMIT_S, more)
    return Result(
        ours="greenlets (vllm_davinci.multistream)",
        baseline="vLLM's threads (UBatchContext); for steps: see the row",
        rows=_rows(found, args.layers),
        settings={
            "collectives_per_layer": 2,
            "launches_per_layer": found["launches_per_layer"],
            "frames_below_a_hand_over": found["depth"],
        },
        device="vnpu, policy eager, operators do no work",
        bounded_by=(
            "at a collective, the look for a torch operator on the stack and six calls of Python; "
            "in a step, the launches of both halves"
        ),
    )


def _rows(found: dict[str, Any], layers: int) -> list[Row]:
    def row(name: str, ours: str, baseline: str, at_most: float | None, note: str = "") -> Row:
        both = found[ours], found[baseline]
        return Row.median(name, "us", *both, at_most=at_most, note=note)

    return [
        row(
            "hand-over at a collective, beyond the collective itself",
            "beyond_collective",
            "vllm_dispatch",
            0.1,
            "the median of paired differences, and their quartiles; vLLM's at a dispatch; our "
            "events are those that HCCL's own stream needs anyway",
        ),
        row(
            "the same, vLLM's at a combine, which yields twice",
            "beyond_collective",
            "vllm_combine",
            0.1,
        ),
        row(
            f"step of {layers} layers: halves in turn against one after the other",
            "interleaved",
            "halves",
            1.05,
        ),
    ]
