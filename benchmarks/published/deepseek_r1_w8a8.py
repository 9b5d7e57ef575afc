"""Split decisions for DeepSeek-R1 W8A8 on 16 chips, and the host's time to model its steps.

Steps are split if step times predict a gain; regret is relative to the faster of whole and split.
`published/page` compares such steps with published ones. `--rows` runs only the decisions or only
the host's times.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from published.runs import SERIAL_ORDER, Runs
from published.split_regret import regret_rows
from result import Kind, Result, Row

GIB = 2**30
GOAL_STEP_S, GOAL_TIMELINE_S, GOAL_START_S, GOAL_MEMORY_GIB = 0.2, 1.0, 25.0, 1.5


def cost_rows(runs: Runs) -> list[Row]:
    """Returns rows on the time that this host needs to model a prefill."""
    trace = runs.directory / "timeline.json"
    plain, host = runs.prefill(SERIAL_ORDER), runs.newest_host
    traced = runs.prefill(SERIAL_ORDER, f"--trace={trace}")
    figures = {
        "step of a prefill": ("s", plain["wall_seconds"], GOAL_STEP_S),
        "step of a prefill, with its timeline": ("s", traced["wall_seconds"], GOAL_TIMELINE_S),
        "start of the engine": ("s", host["start_seconds"], GOAL_START_S),
        "memory": ("GiB", host["peak_rss_bytes"] / GIB, GOAL_MEMORY_GIB),
    }
    return [
        Row(f"cost of modelling: {name}", unit, ours, Kind.MEASURED, at_most=goal)
        for name, (unit, ours, goal) in figures.items()
    ]


ROWS: dict[str, Callable[[Runs], list[Row]]] = {"regret": regret_rows, "cost": cost_rows}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chip", default="ascend910b2", help="a chip that `vnpu machines` lists")
    parser.add_argument("--topology", default="two-meshes-of-8")
    parser.add_argument(
        "--routing", default="balanced", help="load of the busiest expert rank over the mean"
    )
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="(default: all)"
    )


def run(args: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory(prefix="published.") as directory:
        runs = Runs(args, Path(directory))
        rows = [row for name in args.rows for row in ROWS[name](runs)]
    return Result(
        ours="steps as they are decided, on the modelled clock with contention",
        baseline="the better of whole and split steps, on the same machine",
        rows=rows,
        settings={
            "rows": " ".join(args.rows),
            "figures": runs.machine["hash"],
            "assumed figures": len(runs.machine["assumptions"]),
        },
        device=f"modelled, no NPU: {runs.machine['title']}",
    )
