"""Forward time of an image encoder, with and without a blocking copy in each block.

Operators do no work and sleep for a given time (VNPU_PACE) in a thread of the device, so that host
and device can work at the same time. The bound is the slower of the two, each timed alone: the host
while the device is blocked, the device after all launches. The blocking form reads sequence lengths
back from the device in every layer.
"""

import argparse
import statistics
import tempfile
from typing import Any

from child import measured
from result import Kind, Result, Row

PROCESS_LIMIT_S = 600
MOST_OF_BOUND = 1.03
MOST_OF_BLOCKING = 0.8  # a speedup of 1.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=27)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--side", type=int, default=16, help="size of an image, in patches")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--pace", type=int, default=1, help="microseconds per operator, without wake-up"
    )


def run(args: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as scratch:
        options: dict[str, Any] = {
            **{key: getattr(args, key) for key in ("blocks", "images", "side", "rounds")},
            "init": f"file://{scratch}/init",
        }
        more = {"VNPU_COMPUTE": "0", "VNPU_SCHEDULE": "threads", "VNPU_PACE": f"aclnn={args.pace}"}
        found = measured("serving.vision_encoder_process", options, PROCESS_LIMIT_S, more)
    ours, blocking, host, device = (
        statistics.median(found[name]) * 1e3 for name in ("ours", "blocking", "host", "device")
    )
    return Result(
        ours="lengths from the host",
        baseline="a blocking copy per block",
        rows=[
            Row(
                "forward", "ms", ours, Kind.MEASURED, baseline=blocking, at_most=MOST_OF_BLOCKING,
                bound=max(host, device),
            ),
            Row("forward / the slower of host and device", "", ours / max(host, device),
                Kind.MEASURED, at_most=MOST_OF_BOUND),
            Row("host alone", "ms", host, Kind.MEASURED),
            Row("device alone", "ms", device, Kind.MEASURED),
            *(
                Row(name, "", found["counts"][key], Kind.COUNTED,
                    baseline=found["blocking_counts"][key])
                for name, key in (
                    ("copies from the device", "copies_to_host"),
                    ("waits for the device", "synchronizations"),
                    ("launches", "launches"),
                )
            ),
        ],
        device="vnpu, policy threads, operators without work",
        bounded_by="the slower of host and device",
    )  # fmt: skip
