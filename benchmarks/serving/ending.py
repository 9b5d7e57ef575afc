"""Seconds from a signal to the end of a server whose engine is in a step longer than every limit.

Each server has open requests, streams and others, and gets SIGINT as from a terminal or SIGTERM as
from a supervisor. `answered` is when the last request had its last chunk or its error, `ended` when
the last process was gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
from pathlib import Path

from result import Kind, Result, Row
from vllm_davinci_testing.engines.server_process import ForkedServer
from vllm_davinci_testing.engines.signalled_server import signalled_server

CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny_llama"
ANSWERED_WITHIN_S, ENDED_WITHIN_S = 3.0, 15.0
SIGNALS = {"SIGINT": (signal.SIGINT, True), "SIGTERM": (signal.SIGTERM, False)}
LAYOUTS = {"one rank": (), "two ranks": ("-tp=2",)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--ends", type=int, default=50, help="servers, of all kinds together")


def run(args: argparse.Namespace) -> Result:
    kinds = [(layout, name) for layout in LAYOUTS for name in SIGNALS]
    answered: list[float] = []
    ended: list[float] = []
    statuses: list[int] = []
    for number in range(args.ends):
        layout, name = kinds[number % len(kinds)]
        with (
            tempfile.TemporaryDirectory() as folder,
            signalled_server(ForkedServer, args.model, Path(folder), *LAYOUTS[layout]) as ending,
        ):
            ending.open_requests()
            at_s = ending.signal(*SIGNALS[name])
            ended.append(ending.wait_for_end() - at_s)
            answered.append(max(each.ended_at_s for each in ending.requests) - at_s)
            statuses.append(ending.server.process.returncode)
            print(
                f"{number + 1} {layout}, {name}: answered {answered[-1]:.2f} s, "
                f"ended {ended[-1]:.2f} s, status {statuses[-1]}",
                flush=True,
            )
    rows = [
        Row(f"{name}, {what}", "s", of(times), Kind.MEASURED, at_most=limit_s)
        for name, times, limit_s in (
            ("answered", answered, ANSWERED_WITHIN_S),
            ("ended", ended, ENDED_WITHIN_S),
        )
        for what, of in (("median", statistics.median), ("worst", max))
    ]
    rows.append(Row("ends with status 0", "", statuses.count(0), Kind.COUNTED, at_least=args.ends))
    return Result(
        benchmark="serving/ending",
        ours="seconds from the signal",
        baseline="none: vLLM waits without a limit for such requests",
        rows=rows,
        settings={"model": args.model.name, "ends": args.ends},
        seed=0,
        device="vnpu, policy " + os.environ.get("VNPU_SCHEDULE", "eager"),
        bounded_by="vLLM's limits for its processes",
    )
