"""Cost of fault-injection points in operator calls.

One process has no fault plan. The other has a rule that each point looks up but that never applies,
which bounds the cost of a point without a plan. The processes alternate, so that other load on the
machine affects both.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from result import Kind, Result, Row

MOST = 1.01
OPERATORS = ("add", "matmul")
# Never reached: these processes have one rank and no group.
UNREACHED = "segment:open@1000000=throw"
BLOCK_CALLS = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--blocks", type=int, default=300, help="number of blocks of calls per process"
    )


def run(args: argparse.Namespace) -> Result:
    rows = []
    for operator in OPERATORS:
        sides = [_start(operator, plan) for plan in ("", UNREACHED)]
        try:
            ratios, times = [], []
            for number in range(args.blocks):
                order = (0, 1) if number % 2 else (1, 0)
                found = {side: _block(sides[side]) for side in order}
                ratios.append(found[1] / found[0])
                times.append(found[0])
        finally:
            for side in sides:
                side.kill()
                side.wait()
        low, median, high = statistics.quantiles(ratios, n=4)
        off_us = statistics.median(times)
        rows.append(
            Row(
                name=f"{operator}, enqueue + sync",
                unit="us",
                ours=off_us * median,
                baseline=off_us,
                kind=Kind.MEASURED,
                at_most=MOST,
                quartiles=(off_us * low, off_us * high),
            )
        )
    return Result(
        ours="each point looks a rule up",
        baseline="no plan: one branch",
        rows=rows,
        settings={"calls per block": BLOCK_CALLS},
        device="vnpu, policy eager",
        bounded_by="the call itself",
    )


def _start(operator: str, plan: str) -> subprocess.Popen[str]:
    path = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "VNPU_FAULTS": plan}
    return subprocess.Popen(
        [sys.executable, __file__, operator],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _block(side: subprocess.Popen[str]) -> float:
    """Returns microseconds per call in one block."""
    assert side.stdin is not None and side.stdout is not None
    side.stdin.write("\n")
    side.stdin.flush()
    return float(side.stdout.readline())


def _serve(operator: str) -> None:
    import torch
    import torch_npu  # noqa: F401 - the device

    torch.set_num_threads(1)
    a, b = (torch.randn(64, 64).npu() for _ in range(2))
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: torch.add(a, b),
        "matmul": lambda: torch.mm(a, b),
    }
    call = calls[operator]
    for _ in range(2 * BLOCK_CALLS):
        call()
    for _ in sys.stdin:
        begin = time.process_time()
        for _ in range(BLOCK_CALLS):
            call()
        torch.npu.synchronize()
        print((time.process_time() - begin) / BLOCK_CALLS * 1e6, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
