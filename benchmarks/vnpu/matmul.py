"""Matrix products on the virtual NPU, compared with torch's CPU device.

Products are `rows x depth @ depth x columns`. The second operand is a linear layer's weight
([columns, depth], transposed), the same in all calls. A call of the virtual NPU includes its
launch; one wait ends each batch of calls. The two sides take turns.

A ratio above 1 means that torch's library is faster on this processor.
"""

import argparse
import functools
import os
import time
from collections.abc import Callable

from result import Result, Row

BATCHES = 15
# Rows of one decode, a batch of decodes, and a prefill; weights of a small model, an output layer,
# and a 7B model's projection.
ROWS = (1, 32, 256)
WEIGHTS = ((192, 192), (384, 2048), (1024, 384), (384, 8192), (4096, 4096))
DTYPES = ("bfloat16", "float16", "float32")
MOST_OF_THE_LIBRARY = 1.1  # measured times of two equal sides differ by about a tenth


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--batch-ms", type=float, default=10.0, help="duration of a batch of calls")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Result:
    import torch

    torch.manual_seed(args.seed)
    rows = []
    for dtype in args.dtype:
        for count in args.rows:
            for depth, columns in WEIGHTS:
                x = torch.randn(count, depth).to(getattr(torch, dtype))
                weight = torch.randn(columns, depth).to(x.dtype)
                ours, baseline = _in_turn(
                    functools.partial(torch.mm, x.npu(), weight.npu().t()),
                    functools.partial(torch.mm, x, weight.t()),
                    torch.npu.synchronize,
                    args.batch_ms / 1000,
                )
                name = f"{dtype}, {count} x {depth} @ {depth} x {columns}"
                rows.append(Row.median(name, "us", ours, baseline, at_most=MOST_OF_THE_LIBRARY))
    return Result(
        ours="torch.mm on npu over vnpu",
        baseline="torch.mm on the CPU",
        rows=rows,
        settings={
            "threads": torch.get_num_threads(),
            "ONEDNN_MAX_CPU_ISA": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        },
        bounded_by="the processor's matrix instructions; for few rows, memory and the launch",
    )


def _in_turn(
    ours: Callable[[], object],
    baseline: Callable[[], object],
    synchronize: Callable[[], None],
    batch_s: float,
) -> tuple[list[float], list[float]]:
    """Returns microseconds per call of both sides, one value per batch."""
    sides: list[tuple[Callable[[], object], list[float]]] = [(ours, []), (baseline, [])]
    calls = {}
    for call, _ in sides:
        for _ in range(3):
            call()
        synchronize()
        begin = time.perf_counter()
        call()
        synchronize()
        calls[call] = max(1, int(batch_s / (time.perf_counter() - begin)))
    for _ in range(BATCHES):
        for call, times in sides:
            begin = time.perf_counter()
            for _ in range(calls[call]):
                call()
            synchronize()
            times.append((time.perf_counter() - begin) / calls[call] * 1e6)
    return sides[0][1], sides[1][1]
