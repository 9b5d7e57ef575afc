"""Memory and time of an engine's sleep, wake-up and new weights, compared with its start.

One process starts an engine, which alternately sleeps and wakes. Times are those of this host's
memory and processor; a chip copies weights over its own link. The device counts bytes.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from child import run_child
from result import Kind, Result, Row

PROCESS_LIMIT_S = 600
CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny_llama"
CHILD = Path(__file__).with_name("sleep_process.py")
MOST_LEFT = 0.01  # bytes of weights and KV cache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--rounds", type=int, default=5)


def run(args: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "found.json"
        options = {"model": str(args.model), "rounds": args.rounds, "result": str(result)}
        run_child([str(CHILD), json.dumps(options)], PROCESS_LIMIT_S, dict(os.environ))
        found = json.loads(result.read_text(encoding="utf-8"))
    times = found["seconds"]
    start = times.pop("start")
    rows = [
        Row(
            "weights and KV cache on the device during sleep",
            "bytes",
            found["bytes_asleep"],
            Kind.COUNTED,
            baseline=found["bytes_awake"],
            at_most=MOST_LEFT,
        )
    ]
    rows += [
        Row(name, "ms", statistics.median(seconds) * 1e3, Kind.MEASURED, baseline=start[0] * 1e3)
        for name, seconds in times.items()
    ]
    return Result(
        ours="an engine that sleeps",
        baseline="awake; for times: the start of the engine",
        rows=rows,
        settings={"model": args.model.name},
        bounded_by="copies between device and host",
    )
