"""Host time of a decode step's forward: replayed from a graph, and eager.

Operators do no work (VNPU_COMPUTE=0), so that only the host's calls of torch, torch_npu and CANN
are measured, in processor time of the calling thread. Models: tiny_deepseek, and one with 61 of its
layers, the first three dense, like DeepSeek-V3. One process per model alternates both kinds of step
on one engine. --split also measures two ranks of the larger model: whole steps and two ubatches,
captured and eager.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from child import measured
from result import Kind, Result, Row

PROCESS_LIMIT_S = 600
CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny_deepseek"
GOAL = 0.15
SPLIT_GOALS = {"graph": 1.3, "eager": 1.9}
# Operators do no work, and the calling thread makes all launches.
HOST_ALONE = {"VNPU_COMPUTE": "0", "TASK_QUEUE_ENABLE": "0"}
SIDE_STREAMS = {
    "torchair_graph_config": {"enable_multistream_mla": True, "enable_multistream_moe": True}
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--steps", type=int, default=24, help="generated tokens per request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=61, help="layers of the larger model")
    parser.add_argument("--side-streams", action="store_true", help="for MLA and shared experts")
    parser.add_argument(
        "--split", action="store_true", help="also measure two ubatches, on two ranks"
    )


def run(args: argparse.Namespace) -> Result:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        large = Path(scratch) / "large"
        large.mkdir()
        shape = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
        shape |= {"num_hidden_layers": args.layers, "first_k_dense_replace": 3}
        (large / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        for name, model, load_format in (
            ("tiny_deepseek", CHECKPOINT, "auto"),
            (f"{args.layers} layers", large, "dummy"),
        ):
            options: dict[str, Any] = {
                "model": str(model),
                "load_format": load_format,
                "requests": args.requests,
                "steps": args.steps,
                "rounds": args.rounds,
                "additional_config": SIDE_STREAMS if args.side_streams else {},
            }
            rows += _rows(name, _found("decode_step", options))
        if args.split:
            rows += _split_rows(f"{args.layers} layers", _found("split_step", options))
    return Result(
        ours="replayed from a graph",
        baseline="eager",
        rows=rows,
        settings={**HOST_ALONE},
        bounded_by="the host: one update of each layer's attention, and one launch",
    )


def _found(part: str, options: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = measured(
        f"serving.{part}_process", options, PROCESS_LIMIT_S, HOST_ALONE
    )
    return found


def _rows(name: str, found: dict[str, Any]) -> list[Row]:
    def row(what: str, key: str, **goal: float) -> Row:
        both = (found[kind][key] for kind in ("graph", "eager"))
        return Row.median(f"{name}: {what}", "ms", *both, scale=1e3, **goal)

    launches, of_eager = (statistics.median(found[kind]["launches"]) for kind in ("graph", "eager"))
    return [
        row("host time of the forward", "seconds", at_most=GOAL),
        row("the same by the clock, beside the device's threads", "elapsed"),
        Row(f"{name}: launches of the host", "", launches, Kind.COUNTED, baseline=of_eager),
    ]


def _split_rows(name: str, found: dict[str, Any]) -> list[Row]:
    def slower(kind: str, which: int) -> list[float]:
        """Returns the slower rank's figures. which: 0 for the step, 1 for its forward"""
        return [max(rank[which] for rank in of) for of in found[kind]]

    return [
        Row.median(
            f"{name}, two ranks, {kind}: host time of {what} as two ubatches, against whole",
            "ms",
            slower(f"{kind} split", which),
            slower(f"{kind} whole", which),
            scale=1e3,
            at_most=None if which else SPLIT_GOALS[kind],
        )
        for kind in ("graph", "eager")
        for which, what in enumerate(("a step", "its forward"))
    ]
