"""Cost of fault-injection points in operator calls.

One process has no fault plan. The other has a rule that each point looks up but that never applies,
which bounds the cost of a point without a plan. The processes alternate, so that other load on the
machine affects both.
"""

import argparse
import statistics
import time
from collections.abc import Callable

from child import AskedChild
from result import Kind, Result, Row

MOST = 1.01
OPERATORS = ("add", "matmul")
# Never reached: these processes have one rank and no group.
UNREACHED = "segment:open@1000000=throw"
BLOCK_CALLS = 400
LIMIT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--blocks", type=int, default=300, help="number of blocks of calls per process"
    )


def run(args: argparse.Namespace) -> Result:
    rows = []
    for operator in OPERATORS:
        with _side(operator, "") as without, _side(operator, UNREACHED) as with_a_rule:
            sides = without, with_a_rule
            for side in sides:
                side.answer()
            ratios, times = [], []
            for number in range(args.blocks):
                order = (0, 1) if number % 2 else (1, 0)
                found = {side: sides[side].ask(None) for side in order}
                ratios.append(found[1] / found[0])
                times.append(found[0])
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


def _side(operator: str, plan: str) -> AskedChild:
    more = {"OMP_NUM_THREADS": "1", "VNPU_FAULTS": plan}
    return AskedChild("vnpu.faults", operator, LIMIT_S, more)


def answerer(operator: str) -> Callable[[None], float]:
    """Answers with the microseconds per call in one block of calls."""
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

    def block(_: None) -> float:
        begin = time.process_time()
        for _number in range(BLOCK_CALLS):
            call()
        torch.npu.synchronize()
        return (time.process_time() - begin) / BLOCK_CALLS * 1e6

    return block
