"""Memory and time of an engine's sleep, wake-up and new weights, compared with its start.

One process starts an engine, which alternately sleeps and wakes. Times are those of this host's
memory and processor; a chip copies weights over its own link. The device counts bytes.
"""

import argparse
from pathlib import Path

from child import measured
from result import Kind, Result, Row

PROCESS_LIMIT_S = 600
CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny_llama"
MOST_LEFT = 0.01  # bytes of weights and KV cache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--rounds", type=int, default=5)


def run(args: argparse.Namespace) -> Result:
    options = {"model": str(args.model), "rounds": args.rounds}
    found = measured("serving.sleep_process", options, PROCESS_LIMIT_S)
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
    rows += [Row.median(name, "ms", seconds, start, scale=1e3) for name, seconds in times.items()]
    return Result(
        ours="an engine that sleeps",
        baseline="awake; for times: the start of the engine",
        rows=rows,
        settings={"model": args.model.name},
        bounded_by="copies between device and host",
    )
